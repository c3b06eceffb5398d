"""How near to the arithmetic of pipelines do three and four stages come, whose device time is emulated?

The server's own stage processes and sockets, but a forward takes the time that bench/slow_stage.py is told:
  prefill  seconds to the first token of a 32k prompt; *_speedup: one stage / so many; *_of_limit: of
           S * m / (m + S - 1) for m chunks of step_tokens, unequal: of total / slowest; ratio: of four stages
  decode   tokens/s of eight answers, where reading weights decides and where rows do; *_of_limit: of
           rows / max(sum of stages, M * slowest) for the best number of groups M; ratio: the lowest of these
  beside   as bench/pipeline.py's, with a 4k prompt
  busy     the part of the time that stages compute, under a mixed load; ratio: that of the least busy one
One line each; `python -m bench.emulated NAME ...` for some of them.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench.alternate import Run, alternate, ratio
from bench.engines import answer, prompts, running_engine
from bench.narrow import VOCABULARY, narrow_llama
from bench.pipeline import first_token, measure_beside, tell_beside
from bench.record import Spread, tell
from bench.slow_stage import Cost
from omlx.cluster.local_actor import place_local
from omlx.node.client import StageProcess
from omlx.node.engine import Engine
from omlx.settings import Settings

MODEL = "narrow-llama"
NARROW = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
"""So narrow that its own computing is over long before the emulated one; four layers, four stages at most."""

GPU = Cost(fixed=0.040, row=0.001, token=0.0008, pair=0.0008 / 16_384)
"""A whole model on something like a Mac's GPU: a step reads the weights, whatever the rows; from 16k tokens
on attention takes longer than the rest."""
ROWS_DECIDE = Cost(fixed=0.008, row=0.020, token=0.0008, pair=0.0008 / 16_384)
"""Experts or long contexts: rows cost more than the weights that they share."""
FASTER = 0.2
"""The long prompt's device, by time: GPU would need a minute for it."""
EQUAL = {stages: (1 / stages,) * stages for stages in (1, 2, 3, 4)}
UNEQUAL = (0.5, 0.3, 0.2)
"""Each stage's share of the model."""
(LONG,) = prompts(1, 32_768, VOCABULARY)
(BESIDE,) = prompts(1, 4096, VOCABULARY)
ROWS = prompts(8, 16, VOCABULARY)
TOKENS = 40
ROUNDS = 2
CLIENTS = 8
LEARN_S, WATCH_S = 6.0, 15.0
"""Of the mixed load: not counted, and counted."""


@asynccontextmanager
async def emulated(whole: Cost, shares: Sequence[float]) -> AsyncIterator[Engine]:
    """An engine whose stages have these shares of a model that costs `whole`."""

    async def place(index: int, node: str) -> StageProcess:
        return await place_local(index, node, whole.part(shares[index]).command)

    async with running_engine(narrow_llama(MODEL, NARROW), len(shares), place) as engine:
        yield engine


# ------------------------------------------------------------------ prefill


async def prefill() -> None:
    sides = {"one": EQUAL[1], "three": EQUAL[3], "four": EQUAL[4], "unequal": UNEQUAL}
    chunks = -(-len(LONG) // Settings.model_fields["step_tokens"].default)
    limits = {name: len(shares) * chunks / (chunks + len(shares) - 1) for name, shares in sides.items()}
    limits["unequal"] = 1 / max(UNEQUAL)
    plans: dict[str, list[float]] = {name: [] for name in sides}
    async with AsyncExitStack() as stack:
        runs = {}
        for name, shares in sides.items():
            engine = await stack.enter_async_context(emulated(GPU.part(FASTER), shares))
            runs[name] = first_token(engine, LONG, plans[name])
        times = await alternate(runs, ROUNDS)
    found = {f"{name}_s": values for name, values in times.items()}
    found |= {f"{name}_plans": values[1:] for name, values in plans.items()}
    for name in list(sides)[1:]:
        speedups = [one / many for one, many in zip(times["one"], times[name], strict=True)]
        found[f"{name}_speedup"] = speedups
        found[f"{name}_of_limit"] = [speedup / limits[name] for speedup in speedups]
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("emulated_prefill", MODEL, ratio(times["one"], times["four"]), figures)


# ------------------------------------------------------------------ decode


def most_tokens_per_s(whole: Cost, shares: Sequence[float], rows: int) -> float:
    """By arithmetic: of all numbers of groups the best, hops for nothing."""

    def round_s(groups: int) -> float:
        step_s = whole.fixed + whole.row * -(-rows // groups)
        return step_s * max(sum(shares), groups * max(shares))

    return max(rows / round_s(groups) for groups in range(1, rows + 1))


def together(engine: Engine) -> Run:
    """Tokens/s of all answers while all of them decode."""

    async def run() -> float:
        answers = await asyncio.gather(*(answer(engine, prompt, TOKENS) for prompt in ROWS))
        begin = max(given.first for given in answers)
        end = min(given.last for given in answers)
        drawn = sum(begin < moment <= end for given in answers for moment in given.times)
        return drawn / (end - begin)

    return run


async def decode() -> None:
    regimes = {"weights": GPU, "rows": ROWS_DECIDE}
    sides = {"three": EQUAL[3], "four": EQUAL[4], "unequal": UNEQUAL}
    limits = {
        f"{regime}_{name}": most_tokens_per_s(whole, shares, len(ROWS))
        for regime, whole in regimes.items()
        for name, shares in sides.items()
    }
    async with AsyncExitStack() as stack:
        runs = {}
        for regime, whole in regimes.items():
            for name, shares in sides.items():
                engine = await stack.enter_async_context(emulated(whole, shares))
                runs[f"{regime}_{name}"] = together(engine)
        rates = await alternate(runs, ROUNDS)
    found = {f"{name}_tps": values for name, values in rates.items()}
    of_limit = {name: [rate / limits[name] for rate in values] for name, values in rates.items()}
    found |= {f"{name}_of_limit": values for name, values in of_limit.items()}
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("emulated_decode", MODEL, min(figures[f"{name}_of_limit"].median for name in rates), figures)


# ------------------------------------------------------------------ a prompt beside answers


async def beside() -> None:
    async with (
        emulated(GPU, EQUAL[1]) as one,
        emulated(GPU, EQUAL[2]) as two,
        emulated(GPU, EQUAL[4]) as four,
    ):
        engines = {"one_stage": one, "two_stages": two, "four_stages": four}
        found = await measure_beside(engines, BESIDE, 1)
    tell_beside("emulated_beside", MODEL, found)


# ------------------------------------------------------------------ a mixed load


async def client(engine: Engine, seed: int) -> None:
    """One request after the other, until this is cancelled."""
    draw = random.Random(seed)
    while True:
        (prompt,) = prompts(1, draw.randint(200, 3000), VOCABULARY, seed=draw.randrange(10**6))
        await answer(engine, prompt, draw.randint(30, 80))


async def busy_shares(stages: int) -> list[float]:
    async with emulated(GPU, EQUAL[stages]) as engine, asyncio.TaskGroup() as group:
        clients = [group.create_task(client(engine, seed)) for seed in range(CLIENTS)]
        await asyncio.sleep(LEARN_S)
        before, began = list(engine.meters.busy_s), time.perf_counter()
        await asyncio.sleep(WATCH_S)
        watched_s = time.perf_counter() - began
        shares = [(b - a) / watched_s for a, b in zip(before, engine.meters.busy_s, strict=True)]
        for one in clients:
            one.cancel()
    return shares


async def busy() -> None:
    found = {f"of_{stages}_share": await busy_shares(stages) for stages in (1, 2, 4)}
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("emulated_busy", MODEL, min(spread.min for spread in figures.values()), figures)


BENCHES: dict[str, Callable[[], Awaitable[None]]] = {
    "prefill": prefill,
    "decode": decode,
    "beside": beside,
    "busy": busy,
}


async def main() -> None:
    for name in sys.argv[1:] or BENCHES:
        await BENCHES[name]()


if __name__ == "__main__":
    asyncio.run(main())
