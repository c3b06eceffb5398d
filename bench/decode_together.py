"""Are batches as fast through the engine as plain batched steps? SmolLM2, 1 to 16 sequences, greedy.

engine_B_tps: tokens/s through the engine (one stage process) while B sequences decode; steps_B_tps: a loop
in a process of its own that asks mlx_lm's model for B rows at a time, the next step built while the last one
computes. ratio: the worst of the four ratios of medians.
"""

import asyncio

from bench.alternate import Run, alternate, ratio
from bench.bare import Ask, Bare, running_bare
from bench.engines import model_folder, prompts, running_engine, together
from bench.record import Spread, tell
from omlx.node.engine import Engine

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 5
BATCHES = (1, 4, 8, 16)
PROMPT_TOKENS = 32
TOKENS = 40


def through_engine(engine: Engine, rows: int) -> Run:
    async def run() -> float:
        return await together(engine, prompts(rows, PROMPT_TOKENS, 40_000), TOKENS)

    return run


def plain(bare: Bare, rows: int) -> Run:
    async def run() -> float:
        (prompt,) = prompts(1, PROMPT_TOKENS, 40_000)
        return rows / (await bare.run(Ask("together", TOKENS, prompt, rows=rows))).token_s

    return run


async def main() -> None:
    folder = model_folder(MODEL)
    async with running_engine(folder, 1, places=max(BATCHES)) as engine, running_bare(folder) as bare:
        figures: dict[str, Spread] = {}
        ratios = []
        for rows in BATCHES:
            sides = {"engine": through_engine(engine, rows), "steps": plain(bare, rows)}
            found = await alternate(sides, ROUNDS)
            figures |= {f"{side}_{rows}_tps": Spread.of(values) for side, values in found.items()}
            shares = [a / b for a, b in zip(found["engine"], found["steps"], strict=True)]
            figures[f"ratio_{rows}"] = Spread.of(shares)
            ratios.append(ratio(found["engine"], found["steps"]))
    tell("decode_together", MODEL, min(ratios), figures)


if __name__ == "__main__":
    asyncio.run(main())
