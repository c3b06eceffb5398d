"""Do two stages on a core each answer more tokens a second than one stage on one core? SmolLM2, greedy.

*_at_4, *_at_8: tokens/s of so many requests at once while all of them decode. ratio: two stages with 8 at
once / one stage with 4; same_ratio and twice_ratio say it round by round. Linux: it pins with taskset.
"""

import asyncio

from bench.alternate import Run, alternate, ratio
from bench.engines import model_folder, place_on_a_core, prompts, running_engine, together
from bench.record import Spread, tell
from omlx.node.engine import Engine

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 4
TOKENS = 32
FEW, MANY = 4, 8
PROMPTS = prompts(MANY, 16, 40_000)


def at_once(engine: Engine, requests: int) -> Run:
    """Tokens/s while all of them decode."""
    return lambda: together(engine, PROMPTS[:requests], TOKENS)


async def main() -> None:
    folder = model_folder(MODEL)
    async with (
        running_engine(folder, 1, place_on_a_core) as one,
        running_engine(folder, 2, place_on_a_core) as two,
    ):
        found = await alternate(
            {
                "one_stage_at_4_tps": at_once(one, FEW),
                "two_stages_at_4_tps": at_once(two, FEW),
                "one_stage_at_8_tps": at_once(one, MANY),
                "two_stages_at_8_tps": at_once(two, MANY),
            },
            ROUNDS,
        )
    base = found["one_stage_at_4_tps"]
    for name, side in (("same", found["two_stages_at_4_tps"]), ("twice", found["two_stages_at_8_tps"])):
        found[f"{name}_ratio"] = [two_tps / one_tps for two_tps, one_tps in zip(side, base, strict=True)]
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("two_stages", MODEL, ratio(found["two_stages_at_8_tps"], base), figures)


if __name__ == "__main__":
    asyncio.run(main())
