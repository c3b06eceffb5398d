"""Do two stages answer more tokens a second than one? SmolLM2, several answers at once, greedy.

*_at_4, *_at_8: tokens/s of so many requests at once, sent together, prompts included. ratio: two stages
with 8 at once / one stage with 4; same_ratio and twice_ratio say it round by round.
"""

import asyncio
import time

from bench.alternate import Run, alternate, ratio
from bench.engines import answer, model_folder, prompts, running_engine
from bench.record import Spread, tell
from omlx.node.engine import Engine

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 4
TOKENS = 16
FEW, MANY = 4, 8
PROMPTS = prompts(MANY, 16, 40_000)


def together(engine: Engine, requests: int) -> Run:
    """Tokens/s over all answers."""

    async def run() -> float:
        started = time.perf_counter()
        answers = await asyncio.gather(*(answer(engine, prompt, TOKENS) for prompt in PROMPTS[:requests]))
        return sum(len(given.tokens) for given in answers) / (time.perf_counter() - started)

    return run


async def main() -> None:
    folder = model_folder(MODEL)
    async with running_engine(folder, 1) as one, running_engine(folder, 2) as two:
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
