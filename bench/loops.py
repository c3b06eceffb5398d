"""Plain loops without an engine: `python -m bench.loops FOLDER`, one JSON request and one answer a line."""

import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.utils import load_model

from bench.bare import Ask, Told
from bench.engines import prompts
from omlx.ids import Epoch, PlanId, SeqId
from omlx.node.links import QueueLink
from omlx.node.loader import load_span
from omlx.node.stage import Finished, Stage
from omlx.node.step import Admit, Sampled, SamplingParams, Slice, StepPlan

SEQ = SeqId(0)
DEADLINE_S = 60.0


class Loops:
    """A model is loaded when a loop first needs it, and kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: nn.Module | None = None
        self._lines: dict[tuple[tuple[int, int], ...], StageLine] = {}

    def run(self, ask: Ask) -> Told:
        if ask.loop == "decode":
            return self._decode(ask)
        if ask.loop == "together":
            return self._together(ask)
        if ask.spans not in self._lines:
            self._lines[ask.spans] = StageLine(self._folder, ask.spans)
        line = self._lines[ask.spans]
        line.begin()
        return line.empty(ask.count) if ask.loop == "empty" else line.decode(ask.prompt, ask.count)

    def _whole(self) -> nn.Module:
        if self._model is None:
            self._model, _ = load_model(self._folder)
        return self._model

    def _together(self, ask: Ask) -> Told:
        """As fast as batched steps can be asked for: the next is built while the last one computes."""
        model = self._whole()
        rows = prompts(ask.rows, len(ask.prompt), 40_000)
        caches = [BatchKVCache([0] * ask.rows) for _ in model.layers]
        y = mx.argmax(model(mx.array(rows), cache=caches)[:, -1], axis=-1)
        mx.eval(y)
        times = [time.perf_counter()]
        for _ in range(ask.count - 1):
            after = mx.argmax(model(y[:, None], cache=caches)[:, -1], axis=-1)
            mx.async_eval(after)
            y.tolist()
            times.append(time.perf_counter())
            y = after
        y.tolist()
        times.append(time.perf_counter())
        return Told(_apart(times[1:]), ())

    def _decode(self, ask: Ask) -> Told:
        times, tokens = [], []
        for token, _ in generate_step(mx.array(ask.prompt), self._whole(), max_tokens=ask.count):
            times.append(time.perf_counter())
            tokens.append(int(token))
        return Told(_apart(times), tuple(tokens))


class StageLine:
    """Every stage of a model in this process, one after the other, joined by queues."""

    def __init__(self, folder: Path, spans: tuple[tuple[int, int], ...]) -> None:
        self._finished: list[Finished] = []
        self._stages = [
            Stage(load_span(folder, start, end, lambda done, total: None), self._finished.append)
            for start, end in spans or ((0, None),)
        ]
        self._epoch = Epoch(0)
        self._plan = 0

    def begin(self) -> None:
        self._epoch = Epoch(self._epoch + 1)
        self._plan = 0
        links = [QueueLink(DEADLINE_S) if len(self._stages) > 1 else None for _ in self._stages]
        for place, stage in enumerate(self._stages):
            stage.begin(self._epoch, links[place - 1], links[place])

    def empty(self, count: int) -> Told:
        times = []
        for _ in range(count):
            self._step((), ())
            times.append(time.perf_counter())
        return Told(_apart(times), ())

    def decode(self, prompt: tuple[int, ...], count: int) -> Told:
        self._step((Admit(SEQ, SamplingParams(temperature=0), (), ()),), ())
        if len(prompt) > 1:
            self._step((), (Slice(SEQ, prompt[:-1], 0, sample=False),))
        times: list[float] = []
        tokens: list[int] = []
        token = prompt[-1]
        for start in range(len(prompt) - 1, len(prompt) - 1 + count):
            token = self._step((), (Slice(SEQ, (token,), start, sample=True),))[0].token
            times.append(time.perf_counter())
            tokens.append(token)
        return Told(_apart(times), tuple(tokens))

    def _step(self, admits: tuple[Admit, ...], slices: tuple[Slice, ...]) -> tuple[Sampled, ...]:
        plan = StepPlan(PlanId(self._plan), self._epoch, (), admits, slices, PlanId(self._plan))
        self._plan += 1
        for stage in self._stages:
            stage.step(plan)
            stage.settle()
        drawn = self._finished[-1].sampled
        self._finished.clear()
        return drawn


def _apart(times: list[float]) -> float:
    """The mean time from one to the next."""
    return (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    loops = Loops(Path(sys.argv[1]))
    for line in sys.stdin:
        told = loops.run(msgspec.json.decode(line, type=Ask))
        print(msgspec.json.encode(told).decode(), flush=True)


if __name__ == "__main__":
    main()
