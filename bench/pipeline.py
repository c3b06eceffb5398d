"""Do two stages on a core each prefill twice as fast as one stage on one core, and do answers flow meanwhile?

One line each. prefill_16k, prefill_4k: seconds to the first token of a prompt, on a tiny llama of 24 layers,
where attention is nearly all, and on SmolLM2; *_plans: the steps it took. short: eight prompts of 64 tokens
at once, until all have their first token. ratio of these: one stage / two stages.
beside: four answers run while a prompt is computed. *_gap_ratio: p95 of the time between an answer's tokens
/ the same without the prompt; *_first_ratio: the prompt's first token / alone; ratio: the worst gap ratio.
Linux: it pins with taskset.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, pairwise, repeat

from bench.alternate import Run, alternate, ratio
from bench.engines import answer, model_folder, place_on_a_core, prompts, running_engine
from bench.narrow import narrow_llama
from bench.record import Spread, tell
from omlx.node.engine import Engine
from omlx.node.sequence import Request
from omlx.node.step import SamplingParams

MODEL, SMALL = "smollm2-135m-instruct-f32", "deep-llama"
DEEP = {"num_hidden_layers": 24, "num_attention_heads": 1, "num_key_value_heads": 1}
"""Of the last layer a chunk wants no more than keys and values: of four layers that were a quarter."""
ROUNDS = 2
WARM_UP = 8
"""In the round that is not counted a prompt is so many times shorter."""
(LONG,) = prompts(1, 4096, 40_000)
(LONGER,) = prompts(1, 16_384, 500)
SHORT = prompts(8, 64, 40_000)
(BESIDE,) = prompts(1, 1536, 40_000)
STREAMS = prompts(4, 32, 500)
SETTLE_S, QUIET_S = 2.0, 4.0
MOST_TOKENS = 100_000
"""More than any answer here gets to."""


def first_token(engine: Engine, prompt: Sequence[int], plans: list[float]) -> Run:
    """Seconds; how many plans it took goes to `plans`."""
    lengths = chain((len(prompt) // WARM_UP,), repeat(len(prompt)))

    async def run() -> float:
        before = engine.meters.plans
        given = await answer(engine, prompt[: next(lengths)], 1)
        plans.append(engine.meters.plans - before)
        return given.first_s

    return run


def all_first_tokens(engine: Engine, asked: Sequence[Sequence[int]]) -> Run:
    """Seconds until each of them has its first token."""

    async def run() -> float:
        answers = await asyncio.gather(*(answer(engine, prompt, 1) for prompt in asked))
        return max(given.first for given in answers) - min(given.asked for given in answers)

    return run


# ------------------------------------------------------------------ a prompt beside answers


@dataclass(frozen=True, slots=True)
class Beside:
    """Seconds."""

    quiet_gap_s: float
    """p95 of the time from a token of an answer to its next one."""
    gap_s: float
    """The same while the prompt is computed."""
    alone_s: float
    """The prompt's first token while nothing else runs."""
    first_s: float


async def flow(engine: Engine, prompt: Sequence[int], times: list[float]) -> None:
    """An answer without end: when its tokens come goes to `times`, until this is cancelled."""
    stream = engine.submit(Request(tuple(prompt), SamplingParams(temperature=0), MOST_TOKENS, frozenset()))
    try:
        async for _ in stream:
            times.append(time.perf_counter())
    finally:
        await stream.aclose()


@asynccontextmanager
async def flowing(engine: Engine) -> AsyncIterator[list[list[float]]]:
    """STREAMS under way; the times of each one's tokens."""
    flows: list[list[float]] = [[] for _ in STREAMS]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(flow(engine, prompt, times))
            for prompt, times in zip(STREAMS, flows, strict=True)
        ]
        await asyncio.sleep(SETTLE_S)
        yield flows
        for task in tasks:
            task.cancel()


def p95_gap(flows: list[list[float]], begin: float, end: float) -> float:
    """Of gaps that end in [begin, end)."""
    gaps = [b - a for times in flows for a, b in pairwise(times) if begin <= b < end]
    return statistics.quantiles(gaps, n=20)[-1]


async def beside(engine: Engine, prompt: Sequence[int]) -> Beside:
    alone = await answer(engine, prompt, 1)
    async with flowing(engine) as flows:
        began = time.perf_counter()
        await asyncio.sleep(QUIET_S)
        given = await answer(engine, prompt, 1)
    return Beside(
        p95_gap(flows, began, given.asked),
        p95_gap(flows, given.asked, given.first),
        alone.first_s,
        given.first_s,
    )


async def measure_beside(
    engines: dict[str, Engine], prompt: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """The figures by their names; the keys of `engines` come first in them."""
    seen: dict[str, list[Beside]] = {name: [] for name in engines}

    def watched(name: str) -> Run:
        lengths = chain((len(prompt) // WARM_UP,), repeat(len(prompt)))

        async def run() -> float:
            seen[name].append(await beside(engines[name], prompt[: next(lengths)]))
            return seen[name][-1].first_s

        return run

    await alternate({name: watched(name) for name in engines}, rounds)
    found: dict[str, list[float]] = {}
    for name, all_rounds in seen.items():
        counted = all_rounds[1:]
        found[f"{name}_quiet_gap_ms"] = [one.quiet_gap_s * 1e3 for one in counted]
        found[f"{name}_gap_ms"] = [one.gap_s * 1e3 for one in counted]
        found[f"{name}_gap_ratio"] = [one.gap_s / one.quiet_gap_s for one in counted]
        found[f"{name}_alone_s"] = [one.alone_s for one in counted]
        found[f"{name}_first_s"] = [one.first_s for one in counted]
        found[f"{name}_first_ratio"] = [one.first_s / one.alone_s for one in counted]
    return found


def tell_beside(bench: str, model: str, found: dict[str, list[float]]) -> None:
    figures = {name: Spread.of(values) for name, values in found.items()}
    worst = max(spread.median for name, spread in figures.items() if name.endswith("_gap_ratio"))
    tell(bench, model, worst, figures)


# ------------------------------------------------------------------ one stage against two


async def prefill(bench: str, model: str, engines: dict[str, Engine], prompt: Sequence[int]) -> None:
    """The first of `engines` is the one that the others are compared with."""
    plans: dict[str, list[float]] = {name: [] for name in engines}
    runs = {name: first_token(engine, prompt, plans[name]) for name, engine in engines.items()}
    times = await alternate(runs, ROUNDS)
    found = {f"{name}_s": values for name, values in times.items()}
    found |= {f"{name}_plans": values[1:] for name, values in plans.items()}
    one, *others = engines
    speedups = {name: ratio(times[one], times[name]) for name in others}
    found |= {f"{name}_speedup": [speedup] for name, speedup in speedups.items()}
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell(bench, model, speedups[others[0]], figures)


async def short(one: Engine, two: Engine) -> None:
    runs = {"one_stage_s": all_first_tokens(one, SHORT), "two_stages_s": all_first_tokens(two, SHORT)}
    found = await alternate(runs, 2 * ROUNDS)
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("pipeline_short", MODEL, ratio(found["one_stage_s"], found["two_stages_s"]), figures)


async def main() -> None:
    folder = narrow_llama(SMALL, DEEP)
    async with (
        running_engine(folder, 1, place_on_a_core) as one,
        running_engine(folder, 2, place_on_a_core) as two,
    ):
        await prefill("pipeline_prefill_16k", SMALL, {"one_stage": one, "two_stages": two}, LONGER)
    folder = model_folder(MODEL)
    async with (
        running_engine(folder, 1, place_on_a_core) as one,
        running_engine(folder, 2, place_on_a_core) as two,
    ):
        engines = {"one_stage": one, "two_stages": two}
        await prefill("pipeline_prefill_4k", MODEL, engines, LONG)
        await short(one, two)
        tell_beside("pipeline_beside", MODEL, await measure_beside(engines, BESIDE, 1))


if __name__ == "__main__":
    asyncio.run(main())
