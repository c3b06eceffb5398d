"""How a step spends its time and how its cost grows: the files of docs/performance/, which the plots draw.

decode_* and mixed_*: some steps of a trace, on one stage and on three, in Chrome's trace event format: four
answers, then with a prompt of a thousand tokens beside them. curves.json: a step's time over the batch, over
the context, a prompt's time over its length, and tokens/s over the stages. SmolLM2; tiny-llama where a
context is long. Some four minutes. scripts/performance_plots.py draws it.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from bench.engines import answer, model_folder, prompts, running_engine, together
from bench.record import ROOT, commit, machine
from omlx.node.engine import Engine
from omlx.node.timeline import DEVICE, HEAD, Timeline

FOLDER = ROOT / "docs" / "performance"
MODEL, SMALL = "smollm2-135m-instruct-f32", "tiny-llama"
STAGES = (1, 2, 3)
TRACED = (1, 3)
"""Stages whose steps are shown."""
BATCHES = (1, 2, 4, 8, 16)
ROUNDS = 2
"""Through BATCHES; the last one counts: until then the engine tries how to deal its groups."""
TOKENS = 24
"""Of an answer while its steps are measured."""
SHORT = 12
"""Tokens of a prompt whose length does not matter."""
TOLD_WITHIN_S = 0.3
"""A stage tells of its last plans so soon."""
ANSWERS = prompts(4, SHORT, 40_000)
(PROMPT,) = prompts(1, 1024, 40_000, seed=1)
LENGTHS = {MODEL: (64, 256, 512, 1024, 2048, 3072), SMALL: (512, 2048, 4096, 8192, 16_384)}
VOCABULARY = {MODEL: 40_000, SMALL: 500}
SHOWN = 12
"""Plans in an excerpt."""

Event = dict[str, Any]
"""Of Chrome's trace event format."""


class Batch(msgspec.Struct, frozen=True):
    """Answers that decode side by side."""

    stages: int
    answers: int
    rows: int
    """Of a step: fewer, where the answers were dealt into groups."""
    device_ms: tuple[float, ...]
    """Of a step, the median, stage by stage."""
    tokens_s: float
    """Of all answers."""


class Length(msgspec.Struct, frozen=True):
    """A prompt and its answer, alone on one stage."""

    model: str
    tokens: int
    first_ms: float
    """Until the first token."""
    step_ms: float
    """From each token to the next, the median."""


class Prompt(msgspec.Struct, frozen=True):
    """PROMPT alone."""

    stages: int
    tokens_s: float


class Cost(msgspec.Struct, frozen=True):
    """What the engine had fitted for a stage (omlx/node/costs.py) when its batches had been measured."""

    stages: int
    stage: int
    fixed_ms: float
    row_ms: float


class Curves(msgspec.Struct, frozen=True):
    machine: str
    commit: str
    date: str
    load_average: float
    """While it ran: other work on the machine shows in every figure."""
    model: str
    batches: tuple[Batch, ...]
    lengths: tuple[Length, ...]
    prompts: tuple[Prompt, ...]
    costs: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """What ran in between, on time.monotonic."""

    begin: float
    end: float

    def __contains__(self, event: Event) -> bool:
        return "ts" in event and self.begin <= event["ts"] / 1e6 < self.end


async def within(work: Coroutine[object, object, object]) -> Window:
    begin = time.monotonic()
    await work
    return Window(begin, time.monotonic())


@asynccontextmanager
async def traced(model: str, stages: int, file: Path) -> AsyncIterator[Engine]:
    """Its timeline's file is complete once it is closed."""
    folder = model_folder(model)
    async with running_engine(folder, stages, places=max(BATCHES), timeline=Timeline(file)) as engine:
        await answer(engine, PROMPT[:SHORT], TOKENS)
        yield engine
        await asyncio.sleep(TOLD_WITHIN_S)


def read_events(file: Path) -> list[Event]:
    found: list[Event] = json.loads(file.read_text(encoding="utf-8").rstrip(",\n") + "]")
    return found


def plans_of(events: Iterable[Event], window: Window, stage: int) -> list[Event]:
    """What one stage's device did in the window, an event a plan."""
    return [
        event
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (stage + 1, DEVICE) and event in window
    ]


# ------------------------------------------------------------------ some steps, as they are


async def mixed(engine: Engine) -> None:
    """Four answers, and a prompt beside them."""
    async with asyncio.TaskGroup() as group:
        group.create_task(together(engine, ANSWERS, 3 * TOKENS))
        await asyncio.sleep(0)  # the answers are asked for first
        group.create_task(answer(engine, PROMPT, 2))


def excerpt(events: Sequence[Event], plans: Sequence[int]) -> list[Event]:
    """These plans' spans, the marks between them, and the names of what they ran on; begins at zero."""
    spans = [event for event in events if event["ph"] == "X" and event["args"]["plan"] in plans]
    begin = min(event["ts"] for event in spans)
    whole = Window(begin / 1e6, max(event["ts"] + event["dur"] for event in spans) / 1e6)
    marks = [event for event in events if event["pid"] == HEAD and event in whole]
    shown = sorted(spans + marks, key=lambda event: float(event["ts"]))
    return [event for event in events if event["ph"] == "M"] + [
        event | {"ts": round(event["ts"] - begin, 1)} for event in shown
    ]


def show_decode(events: Sequence[Event], window: Window) -> list[Event]:
    """From the middle: all answers are under way."""
    plans = [event["args"]["plan"] for event in plans_of(events, window, 0)]
    middle = max(0, (len(plans) - SHOWN) // 2)
    return excerpt(events, plans[middle:][:SHOWN])


def show_mixed(events: Sequence[Event], window: Window) -> list[Event]:
    """From two plans before the second chunk on."""
    found = plans_of(events, window, 0)
    second = [place for place, event in enumerate(found) if event["args"]["chunk tokens"]][1]
    return excerpt(events, [event["args"]["plan"] for event in found[max(0, second - 2) :][:SHOWN]])


def write_events(name: str, events: Sequence[Event]) -> None:
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


# ------------------------------------------------------------------ how the cost grows


@dataclass(frozen=True, slots=True)
class Run:
    """A batch that was run, before its trace is read."""

    answers: int
    window: Window
    tokens_s: float


async def run_batch(engine: Engine, answers: int) -> Run:
    begin = time.monotonic()
    tokens_s = await together(engine, prompts(answers, SHORT, VOCABULARY[MODEL]), TOKENS)
    return Run(answers, Window(begin, time.monotonic()), tokens_s)


def batch_of(run: Run, events: Sequence[Event], stages: int) -> Batch:
    """The steps that drew from as many rows as most did: the first and the last ones are smaller."""
    device_ms, rows = [], 0
    for stage in range(stages):
        found = [event for event in plans_of(events, run.window, stage) if event["args"]["rows"]]
        rows = statistics.mode(event["args"]["rows"] for event in found)
        device_ms.append(
            statistics.median(event["dur"] / 1e3 for event in found if event["args"]["rows"] == rows)
        )
    rounded = tuple(round(value, 2) for value in device_ms)
    return Batch(stages, run.answers, rows, rounded, round(run.tokens_s, 2))


def costs_of(engine: Engine) -> list[Cost]:
    costs = [stage.cost for stage in engine.figures().stages]
    return [
        Cost(len(costs), stage, round(cost.fixed * 1e3, 2), round(cost.row * 1e3, 3))
        for stage, cost in enumerate(costs)
        if cost is not None
    ]


async def measure_stages(stages: int, folder: Path) -> tuple[list[Batch], list[Cost], Prompt]:
    """Writes the excerpts on the way."""
    file = folder / f"{stages}.json"
    async with traced(MODEL, stages, file) as engine:
        runs = [await run_batch(engine, count) for _ in range(ROUNDS) for count in BATCHES]
        costs = costs_of(engine)
        prompt_s = (await answer(engine, PROMPT, 1)).first_s
        if stages in TRACED:
            decode = await within(together(engine, ANSWERS, TOKENS))
            beside = await within(mixed(engine))
    events = read_events(file)
    if stages in TRACED:
        write_events(f"decode_{stages}", show_decode(events, decode))
        write_events(f"mixed_{stages}", show_mixed(events, beside))
    batches = [batch_of(run, events, stages) for run in runs[-len(BATCHES) :]]
    return batches, costs, Prompt(stages, round(len(PROMPT) / prompt_s, 1))


async def measure_lengths(model: str) -> list[Length]:
    lengths = []
    async with running_engine(model_folder(model), 1) as engine:
        for tokens in (LENGTHS[model][0], *LENGTHS[model]):  # the first one warms up
            (prompt,) = prompts(1, tokens, VOCABULARY[model])
            given = await answer(engine, prompt, TOKENS)
            step_s = statistics.median(after - before for before, after in pairwise(given.times))
            lengths.append(Length(model, tokens, round(given.first_s * 1e3, 2), round(step_s * 1e3, 2)))
    return lengths[1:]


async def measure(folder: Path) -> Curves:
    batches: list[Batch] = []
    costs: list[Cost] = []
    alone: list[Prompt] = []
    for stages in STAGES:
        found, fitted, prompt = await measure_stages(stages, folder)
        batches += found
        costs += fitted
        alone.append(prompt)
    lengths = [length for model in LENGTHS for length in await measure_lengths(model)]
    return Curves(
        machine(),
        commit(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        round(os.getloadavg()[1], 2),
        MODEL,
        tuple(batches),
        tuple(lengths),
        tuple(alone),
        tuple(costs),
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        curves = asyncio.run(measure(Path(folder)))
    text = msgspec.json.format(msgspec.json.encode(curves), indent=1).decode()
    (FOLDER / "curves.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
