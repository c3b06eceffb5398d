"""Does an idle server sleep? CPU seconds over 20 s without a request, after an answer and 10 s of rest.

stages_N_head, stages_N_stages: percent of a core, of the server's own process and of all its stages'
together. ratio: the largest sum of both as a share of a core; 0.01 is the most that it should be. Linux.
"""

import asyncio

import psutil

from bench.engines import model_folder
from bench.record import Spread, tell
from bench.servers import Server, running_server
from bench.start_up import HELLO, serve

MODEL = "smollm2-135m-instruct-f32"
STAGES = (1, 3)
REST_S, IDLE_S = 10.0, 20.0


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def idle_percent(server: Server) -> tuple[float, float]:
    """Of a core: the head, and the stages together."""
    await server.first_answer(HELLO)
    await asyncio.sleep(REST_S)
    tree = server.tree()
    before = [cpu_s(process) for process in tree]
    await asyncio.sleep(IDLE_S)
    head, *stages = [
        100 * (cpu_s(process) - then) / IDLE_S for process, then in zip(tree, before, strict=True)
    ]
    return head, sum(stages)


async def main() -> None:
    folder = model_folder(MODEL)
    figures: dict[str, Spread] = {}
    worst = 0.0
    for count in STAGES:
        async with running_server(serve(folder, "--stages", str(count))) as server:
            head, stages = await idle_percent(server)
        figures[f"stages_{count}_head_percent"] = Spread.of([head])
        figures[f"stages_{count}_stages_percent"] = Spread.of([stages])
        worst = max(worst, (head + stages) / 100)
    tell("idle", MODEL, worst, figures)


if __name__ == "__main__":
    asyncio.run(main())
