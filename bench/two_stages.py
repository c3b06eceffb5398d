"""Do two stages on a core each answer more tokens a second than one stage on one core? SmolLM2, greedy.

*_at_4, *_at_8: tokens/s of so many requests at once while all of them decode. ratio: two stages with 8 at
once / one stage with 4; same_ratio and twice_ratio say it round by round. Linux: it pins with taskset.
"""

import asyncio

from bench.alternate import Run, alternate, ratio
from bench.engines import answer, model_folder, place_on_a_core, prompts, running_engine
from bench.record import Spread, tell
from omlx.node.engine import Engine

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 4
TOKENS = 24
FEW, MANY = 4, 8
PROMPTS = prompts(MANY, 16, 40_000)


def together(engine: Engine, requests: int) -> Run:
    """Tokens/s over all answers, each by its own time after its first token."""

    async def run() -> float:
        answers = await asyncio.gather(*(answer(engine, prompt, TOKENS) for prompt in PROMPTS[:requests]))
        return sum(1 / given.token_s for given in answers)

    return run


async def main() -> None:
    folder = model_folder(MODEL)
    async with (
        running_engine(folder, 1, place_on_a_core) as one,
        running_engine(folder, 2, place_on_a_core) as two,
    ):
        found = await alternate(
            {
                "one_stage_at_4_tps": together(one, FEW),
                "two_stages_at_4_tps": together(two, FEW),
                "one_stage_at_8_tps": together(one, MANY),
                "two_stages_at_8_tps": together(two, MANY),
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
