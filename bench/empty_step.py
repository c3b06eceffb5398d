"""What does the head cost a step? Steps of tiny-llama through sockets against the same in one process.

empty_*: a plan that computes nothing, sent to every stage, until the last one's result is back.
token_*: one greedy token of one sequence through the engine; in_process_*: the same Stage.step calls in
one process. overhead_*: the difference, which is what head, sockets and processes cost a token.
head_cpu_*: the head's processor time a token, which other work on the machine moves less than the clock.
ratio: token_1 / in_process_1, with a model whose own step is next to nothing.
"""

import asyncio
import time
from itertools import count

from bench.alternate import Run, alternate, ratio
from bench.bare import Ask, Bare, running_bare
from bench.engines import answer, model_folder, new_pipeline, prompts, running_engine, shards
from bench.record import Spread, tell
from omlx.errors import StageLost
from omlx.ids import Epoch, PlanId
from omlx.node.engine import Engine
from omlx.node.pipeline import Pipeline
from omlx.node.step import StepPlan, StepResult

MODEL = "tiny-llama"
FOLDER = model_folder(MODEL)
ROUNDS = 9
STEPS = 100
STAGES = (1, 3)
VOCABULARY = 500
(PROMPT,) = prompts(1, 16, VOCABULARY)
SPANS = {stages: tuple((span.start, span.end) for span in shards(FOLDER, stages).spans) for stages in STAGES}
EPOCH = Epoch(0)


def empty(pipeline: Pipeline) -> Run:
    """Milliseconds a step, one step at a time."""
    numbers = count()

    async def run() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            pipeline.send(StepPlan(PlanId(next(numbers)), EPOCH, (), (), ()))
            while not isinstance(event := await pipeline.events.get(), StepResult):
                if isinstance(event, StageLost):
                    raise event
        return (time.perf_counter() - started) / STEPS * 1e3

    return run


def through_engine(engine: Engine, head_cpu_ms: list[float]) -> Run:
    """Milliseconds a token."""

    async def run() -> float:
        before = time.process_time()
        given = await answer(engine, PROMPT, STEPS)
        head_cpu_ms.append((time.process_time() - before) / STEPS * 1e3)
        return given.token_s * 1e3

    return run


def in_process(bare: Bare, ask: Ask) -> Run:
    """Milliseconds a token or a step."""

    async def run() -> float:
        return (await bare.run(ask)).token_s * 1e3

    return run


async def measure_empty(bare: Bare) -> dict[str, list[float]]:
    pipelines = {stages: new_pipeline(FOLDER, stages) for stages in STAGES}
    try:
        for pipeline in pipelines.values():
            await pipeline.open(EPOCH, lambda done, total: None)
        runs = {f"empty_{stages}_ms": empty(pipeline) for stages, pipeline in pipelines.items()}
        for stages in STAGES:
            ask = Ask("empty", STEPS, spans=SPANS[stages])
            runs[f"empty_in_process_{stages}_ms"] = in_process(bare, ask)
        return await alternate(runs, ROUNDS)
    finally:
        for pipeline in pipelines.values():
            await pipeline.close()


async def measure_tokens(bare: Bare) -> dict[str, list[float]]:
    async with running_engine(FOLDER, 1) as one, running_engine(FOLDER, 3) as three:
        runs: dict[str, Run] = {}
        head: dict[str, list[float]] = {}
        for stages, engine in zip(STAGES, (one, three), strict=True):
            ask = Ask("steps", STEPS, PROMPT, SPANS[stages])
            head_cpu_ms = head[f"head_cpu_{stages}_ms"] = []
            runs[f"token_{stages}_ms"] = through_engine(engine, head_cpu_ms)
            runs[f"in_process_{stages}_ms"] = in_process(bare, ask)
        found = await alternate(runs, ROUNDS)
    return found | {name: values[1:] for name, values in head.items()}  # the first round warms up


async def main() -> None:
    async with running_bare(FOLDER) as bare:
        found = await measure_empty(bare) | await measure_tokens(bare)
    for stages in STAGES:
        pairs = zip(found[f"token_{stages}_ms"], found[f"in_process_{stages}_ms"], strict=True)
        found[f"overhead_{stages}_ms"] = [token - plain for token, plain in pairs]
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("empty_step", MODEL, ratio(found["token_1_ms"], found["in_process_1_ms"]), figures)


if __name__ == "__main__":
    asyncio.run(main())
