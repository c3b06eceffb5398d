"""Is one answer as fast through the engine as in a bare mlx_lm loop? SmolLM2, one sequence, greedy.

ratio: tokens/s through the engine (one stage process) / tokens/s of mlx_lm's generate_step in a process of
its own with the same libraries; the first token is not counted, and both must say the same tokens.
*_cpu_ms: processor time a token, prompt included, of all processes of a side; other work on the machine
moves it less than the clock.
"""

import asyncio
import os

import psutil

from bench.alternate import alternate, ratio
from bench.bare import Ask, running_bare
from bench.engines import answer, model_folder, prompts, running_engine
from bench.record import Spread, tell

MODEL = "smollm2-135m-instruct-f32"
ROUNDS = 9
TOKENS = 32
(PROMPT,) = prompts(1, 32, 40_000)


def cpu_s(*pids: int) -> float:
    """Seconds that the processes have computed so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)


async def main() -> None:
    folder = model_folder(MODEL)
    said: set[tuple[int, ...]] = set()
    async with running_engine(folder, 1) as engine, running_bare(folder) as bare:
        stage_pids = [stage.process.pid for stage in engine.pipeline.stages]
        used: dict[str, list[float]] = {"engine_cpu_ms": [], "mlx_lm_cpu_ms": []}

        async def through_engine() -> float:
            before = cpu_s(os.getpid(), *stage_pids)
            given = await answer(engine, PROMPT, TOKENS)
            used["engine_cpu_ms"].append((cpu_s(os.getpid(), *stage_pids) - before) / TOKENS * 1e3)
            said.add(given.tokens)
            return 1 / given.token_s

        async def plain() -> float:
            before = cpu_s(bare.pid)
            told = await bare.run(Ask("decode", TOKENS, PROMPT))
            used["mlx_lm_cpu_ms"].append((cpu_s(bare.pid) - before) / TOKENS * 1e3)
            said.add(told.tokens)
            return 1 / told.token_s

        found = await alternate({"engine_tps": through_engine, "mlx_lm_tps": plain}, ROUNDS)
    if len(said) != 1:
        raise SystemExit("bench: the engine and mlx_lm said different tokens; nothing was compared")
    counted = {name: values[1:] for name, values in used.items()}  # the first round warms up
    figures = {name: Spread.of(values) for name, values in (found | counted).items()}
    tell("decode_alone", MODEL, ratio(found["engine_tps"], found["mlx_lm_tps"]), figures)


if __name__ == "__main__":
    asyncio.run(main())
