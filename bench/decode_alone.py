"""Is one answer as fast through the engine as in a bare mlx_lm loop? SmolLM2, one sequence, greedy.

ratio: tokens/s through the engine (one stage process) / tokens/s of mlx_lm's generate_step in a process of
its own with the same libraries; the first token is not counted, and both must say the same tokens.
"""

import asyncio

from bench.alternate import alternate, ratio
from bench.bare import Ask, running_bare
from bench.engines import answer, model_folder, prompts, running_engine
from bench.record import Spread, tell

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 9
TOKENS = 48
(PROMPT,) = prompts(1, 32, 40_000)


async def main() -> None:
    folder = model_folder(MODEL)
    said: set[tuple[int, ...]] = set()
    async with running_engine(folder, 1) as engine, running_bare(folder) as bare:

        async def through_engine() -> float:
            given = await answer(engine, PROMPT, TOKENS)
            said.add(given.tokens)
            return 1 / given.token_s

        async def plain() -> float:
            told = await bare.run(Ask("decode", TOKENS, PROMPT))
            said.add(told.tokens)
            return 1 / told.token_s

        found = await alternate({"engine_tps": through_engine, "mlx_lm_tps": plain}, ROUNDS)
    if len(said) != 1:
        raise SystemExit("bench: the engine and mlx_lm said different tokens; nothing was compared")
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("decode_alone", MODEL, ratio(found["engine_tps"], found["mlx_lm_tps"]), figures)


if __name__ == "__main__":
    asyncio.run(main())
