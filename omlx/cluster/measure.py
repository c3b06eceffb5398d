"""How fast nodes and links really are: rates for the planner, from what stages and probes have measured.

A stage tells its times, `node/costs.py` fits a line to them, and here that line becomes NodeRates. What is
measured of a stage is one sum over its layers and perhaps the head; the line's parts are shared out in the
proportions of the table: the step by bytes that it reads, rows and tokens by arithmetic. So the planner's
model gives the stage's own times back, and predicts those of any other span of that model.

For all other models there is one ratio for each of two resources: bytes per second in a step of one row,
operations per second in a chunk. That is the simplest thing that carries over: a busy, hot or throttled
machine is slower at everything, and errors of the table that all nodes share fall out of a comparison of
nodes. Thermal slowdown needs nothing of its own: it is seen here, as slower steps.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from omlx.cluster.candidate import Candidate
from omlx.cluster.layer_costs import LayerWork, ModelWork
from omlx.cluster.planner import Span
from omlx.cluster.rates import LayerTimes, LinkRate, Links, NodeRates
from omlx.node.costs import StageCost
from omlx.node.manifest import ModelManifest

CHUNK_TOKENS = 512
"""The chunk whose seconds stand for prompts."""
SPACING = 8
"""Plans between one fit that counts and the next: between them a fit has heard nothing new."""
REMEMBERED, LEAST = 9, 5
"""Fits of one span, and links' samples, of which the middle one is believed; so many are needed."""
CHANGE, EARLY = 0.1, 0.03
"""What differs less from what was told before is not told; the second until a span is well known."""
SETTLED = 32
"""Fits that count until it is: the first ones know a chunk or two."""
SPANS = 4
"""Of one model on one node that are remembered, to tell its kinds of layers apart."""
RIDGE = 0.03
"""Pulls what the spans leave open towards the table's proportions."""
MOST_APART = 4.0
"""How far a kind may lie from the table's proportions, in either direction."""
SMALL_FRAME, LARGE_FRAME = 2**16, 2**22
"""Bytes of hidden states of a decode step, and of a chunk: what a link's change is judged by."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a stage takes, as its engine has fitted it, and what it runs."""

    manifest: ModelManifest
    span: Span
    cost: StageCost
    plans: int
    """That the engine has sent so far (`ModelFigures.plans`): tells how much is new in `cost`."""


@dataclass(frozen=True, slots=True)
class Line:
    """A stage in seconds: decode steps are a line over their rows."""

    step_s: float
    row_s: float
    chunk_s: float
    """A chunk of CHUNK_TOKENS without a prefix."""
    fewest: int
    """Rows that were measured, the fewest and the most."""
    most: int

    def decode_s(self, rows: int) -> float:
        return self.step_s + rows * self.row_s

    def differs(self, other: "Line", by: float = CHANGE) -> bool:
        """By so much or more, where this one was measured."""
        pairs = [(self.decode_s(rows), other.decode_s(rows)) for rows in (self.fewest, self.most)]
        return any(abs(a / b - 1) >= by for a, b in [*pairs, (self.chunk_s, other.chunk_s)])


def line_of(cost: StageCost) -> Line | None:
    """None while no batch size was measured often enough to be known."""
    if not cost.steps or cost.fixed + cost.row <= 0:
        return None
    chunk_s = cost.chunk + cost.chunk_part(CHUNK_TOKENS, CHUNK_TOKENS**2 / 2)
    if chunk_s <= 0:
        return None
    return Line(cost.fixed, cost.row, chunk_s, cost.steps[0][0], cost.steps[-1][0])


def middle(lines: Sequence[Line]) -> Line:
    """The one whose steps are the middle ones. Whole, because step and row of one fit belong together; fits
    are cleared of outliers and follow slowly (`costs.OUTLIER`, `FOLLOW`), and what still gets through from a
    machine that paused is on the edge here."""
    rows = max(line.most for line in lines)
    chosen = sorted(lines, key=lambda line: line.decode_s(rows))[len(lines) // 2]
    return replace(chosen, chunk_s=median(line.chunk_s for line in lines))


def rates_of(work: ModelWork, measured: Sequence[tuple[Span, Line]]) -> NodeRates:
    """Rates by which a stage of the last span takes what its line says.

    The earlier spans, of the same model on the same node, tell only how kinds of layers compare. Kinds that
    the node never ran are taken to be as much slower or faster than the table as the others together.
    """
    span, line = measured[-1]
    scale = _proportions(work, measured)
    layers = [work.kinds[index] for index in work.which[span.start : span.end]]
    units = [*layers, work.head] if span.end == len(work.which) else layers
    sizes, every = (sum(scale[unit.kind] * _bytes(work, unit) for unit in some) for some in (layers, units))
    byte_s, head_byte_s = _shares(line, sizes, every)
    row_flop_s = line.row_s / sum(scale[unit.kind] * _flop(unit) for unit in units)
    arithmetic = sum(scale[unit.kind] * _flop(unit) for unit in layers)
    token_flop_s = max(0.0, line.chunk_s - byte_s * sizes) / CHUNK_TOKENS / arithmetic

    def times(unit: LayerWork, byte_s: float) -> LayerTimes:
        size, flop = scale[unit.kind] * _bytes(work, unit), scale[unit.kind] * _flop(unit)
        return LayerTimes(size * byte_s, flop * row_flop_s, flop * token_flop_s)

    return NodeRates(
        bandwidth=sum(_bytes(work, unit) for unit in units) / line.decode_s(1),
        compute=CHUNK_TOKENS * sum(_flop(unit) for unit in layers) / line.chunk_s,
        kinds=tuple((unit.kind, times(unit, byte_s)) for unit in work.kinds),
        head=times(work.head, head_byte_s),
    )


def _shares(line: Line, sizes: float, every: float) -> tuple[float, float]:
    """Seconds of a step for each byte: of the layers, which have `sizes`, and of the head with the rest."""
    if every == sizes:
        return line.step_s / sizes, line.step_s / sizes
    # A chunk reads all layers and takes longer than that: what a step takes beyond it is the head's.
    own_s = min(line.step_s * sizes / every, line.chunk_s)
    return own_s / sizes, (line.step_s - own_s) / (every - sizes)


def foretold(work: ModelWork, span: Span, rates: NodeRates, like: Line) -> Line:
    """What rates of `rates_of` say of another span; `like` says where to compare."""

    def decode_s(rows: int) -> float:
        head_s = work.head_s(rates, rows) if span.end == len(work.which) else 0.0
        return sum(work.decode_s(rates, rows)[span.start : span.end]) + head_s

    chunk_s = sum(work.chunk_s(rates, CHUNK_TOKENS)[span.start : span.end])
    return Line(decode_s(0), decode_s(1) - decode_s(0), chunk_s, like.fewest, like.most)


def _bytes(work: ModelWork, unit: LayerWork) -> float:
    """Of weights, in a step of one row; never zero, so that everything has a share."""
    return max(1.0, unit.shared + unit.experts * work.active)


def _flop(unit: LayerWork) -> float:
    return max(1.0, unit.flop)


def _proportions(work: ModelWork, measured: Sequence[tuple[Span, Line]]) -> dict[str, float]:
    """By kind, `head` among them, how its seconds compare to the table's: 1.0 for all of one span.

    Least squares of relative errors over the spans, with a ridge.
    """
    units = (*work.kinds, work.head)
    if len(measured) < 2:
        return {unit.kind: 1.0 for unit in units}
    rows = measured[-1][1].most
    seconds = np.array([line.decode_s(rows) for _, line in measured])
    sizes = np.array([_sizes(work, span) for span, _ in measured])
    seen = sizes * (seconds[-1] / sizes[-1].sum()) / seconds[:, None]
    squares = seen.T @ seen + RIDGE * np.eye(len(units))
    found = np.linalg.solve(squares, seen.sum(axis=0) + RIDGE)
    return {
        unit.kind: min(MOST_APART, max(1 / MOST_APART, float(ratio)))
        for unit, ratio in zip(units, found, strict=True)
    }


def _sizes(work: ModelWork, span: Span) -> list[float]:
    """Bytes that a step of this span reads, by kind and in the end the head's."""
    which = work.which[span.start : span.end]
    sizes = [which.count(index) * _bytes(work, unit) for index, unit in enumerate(work.kinds)]
    return [*sizes, _bytes(work, work.head) if span.end == len(work.which) else 0.0]


def presumed(nominal: NodeRates, known: Sequence[tuple[NodeRates, NodeRates]]) -> NodeRates:
    """Of a node that was never measured: what the table or a person says, slower by what the others are.

    known: (nominal, measured) of these. Without this a node that nobody has tried would look best wherever
    the table promises too much, and every model would move there.
    """
    if not known or nominal.source == "gauged":  # that is what it shows, and no promise
        return nominal
    return replace(
        nominal,
        bandwidth=nominal.bandwidth * median(seen.bandwidth / said.bandwidth for said, seen in known),
        compute=nominal.compute * median(seen.compute / said.compute for said, seen in known),
    )


def lent(rates: NodeRates, lenders: Sequence[NodeRates]) -> NodeRates:
    """`rates` with the kinds of layers as other nodes measured them, by how fast these are in general.

    So all candidates of one plan are timed by the same sort of figures.
    """
    names = dict.fromkeys(name for by in lenders for name, _ in by.kinds)
    found = [
        (name, [(times, by) for by in lenders if (times := by.times(name)) is not None]) for name in names
    ]
    heads = [(by.head, by) for by in lenders if by.head is not None]
    return replace(
        rates,
        kinds=tuple((name, _scaled(rates, pairs)) for name, pairs in found),
        head=_scaled(rates, heads) if heads else None,
    )


def _scaled(rates: NodeRates, pairs: Sequence[tuple[LayerTimes, NodeRates]]) -> LayerTimes:
    return LayerTimes(
        median(times.step_s * by.bandwidth for times, by in pairs) / rates.bandwidth,
        median(times.row_s * by.bandwidth for times, by in pairs) / rates.bandwidth,
        median(times.token_s * by.compute for times, by in pairs) / rates.compute,
    )


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One probe of a link."""

    round_trip_s: float
    bytes_per_s: float


def measured_link(samples: Sequence[LinkSample]) -> LinkRate | None:
    """The middle of the latest samples; None where they are too few."""
    latest = samples[-REMEMBERED:]
    if len(latest) < LEAST:
        return None
    return LinkRate(median(one.round_trip_s for one in latest) / 2, median(one.bytes_per_s for one in latest))


def _links_differ(one: LinkRate, other: LinkRate) -> bool:
    sizes = (SMALL_FRAME, LARGE_FRAME)
    return any(abs(one.seconds(size) / other.seconds(size) - 1) >= CHANGE for size in sizes)


@dataclass(slots=True)
class _Stretch:
    """One span's latest fits, while the node ran it."""

    span: Span
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    fits: int = 0
    """That counted so far."""
    first: Line | None = None
    """The middle line once it was well known."""

    @property
    def line(self) -> Line | None:
        return middle(self.lines) if len(self.lines) >= LEAST else None


@dataclass(slots=True)
class _Record:
    """One model on one node."""

    manifest: ModelManifest
    work: ModelWork
    stretches: list[_Stretch] = field(default_factory=list)
    """The span that runs comes last."""
    plans: int = 0

    def add(self, stage: StageTimes, line: Line) -> bool:
        """Whether it counts."""
        current = self.stretches[-1] if self.stretches else None
        if current is None or current.span != stage.span:
            others = [one for one in self.stretches if one.line is not None and one.span != stage.span]
            current = _Stretch(stage.span)
            self.stretches = [*others, current][-SPANS:]
        elif 0 <= stage.plans - self.plans < SPACING:
            return False
        self.plans = stage.plans
        current.lines.append(line)
        current.fits += 1
        now = current.line
        if now is None or current.fits < SETTLED:
            return True
        if current.first is None:
            current.first = now
        elif now.differs(current.first):
            # The node itself has become slower or faster: other spans' times are of another machine.
            current.first, self.stretches = now, [current]
        return True

    @property
    def settled(self) -> bool:
        return self.stretches[-1].fits > SETTLED

    def measured(self) -> list[tuple[Span, Line]]:
        """The span that runs comes last as soon as enough is known of it."""
        return [(one.span, line) for one in self.stretches if (line := one.line) is not None]


@dataclass(frozen=True, slots=True)
class _Told:
    """What is answered about one model on one node, and what it was made from."""

    span: Span
    line: Line
    rates: NodeRates


class Measures:
    """What nodes and links have shown so far. One owner: whoever plans.

    It answers with what it told before until something has changed by a tenth; then all nodes are told anew,
    because a plan compares them and their figures should be of one moment.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, Path], _Record] = {}
        self._told: dict[tuple[str, Path], _Told] = {}
        self._samples: dict[frozenset[str], deque[LinkSample]] = {}
        self._links: dict[frozenset[str], LinkRate] = {}

    def add(self, node: str, stage: StageTimes) -> bool:
        """To be called now and then with the latest fit. True where other rates are told from now on."""
        line = line_of(stage.cost)
        if line is None:
            return False
        key = node, stage.manifest.folder.resolve()
        record = self._records.get(key)
        if record is None or record.manifest != stage.manifest:
            record = self._records[key] = _Record(stage.manifest, ModelWork.of(stage.manifest, 1))
            self._told.pop(key, None)
        if not record.add(stage, line) or not self._is_news(key, record):
            return False
        for known, one in self._records.items():
            if measured := one.measured():
                self._told[known] = _Told(*measured[-1], rates_of(one.work, measured))
        return True

    def _is_news(self, key: tuple[str, Path], record: _Record) -> bool:
        measured, told = record.measured(), self._told.get(key)
        if not measured or told is None:
            return bool(measured)
        span, now = measured[-1]
        before = told.line if span == told.span else foretold(record.work, span, told.rates, now)
        return now.differs(before, CHANGE if record.settled else EARLY)

    def rates(self, node: str, model: Path | None = None) -> NodeRates | None:
        """Of a node that ran something; for a model that it did not run by the middle of those that it did.

        model: the manifest's folder, however it is written. None: never measured.
        """
        own = None if model is None else self._told.get((node, model.resolve()))
        if own is not None:
            return own.rates
        seen = [told.rates for (name, _), told in self._told.items() if name == node]
        if not seen:
            return None
        speed = NodeRates(
            median(rates.bandwidth for rates in seen), median(rates.compute for rates in seen), "measured"
        )
        return lent(speed, self._of_model(model))

    def candidates(self, nodes: Sequence[Candidate], model: Path | None = None) -> list[Candidate]:
        """`nodes`, that bear the rates of a table or a person, by what was measured of them and of others."""
        known = {node.name: self.rates(node.name, model) for node in nodes}
        pairs = [
            (node.rates, rates)
            for node in nodes
            if (rates := known[node.name]) is not None and node.rates.source != "gauged"
        ]
        lenders = self._of_model(model)
        return [
            replace(node, rates=known[node.name] or lent(presumed(node.rates, pairs), lenders))
            for node in nodes
        ]

    def _of_model(self, model: Path | None) -> list[NodeRates]:
        wanted = None if model is None else model.resolve()
        return [told.rates for (_, folder), told in self._told.items() if folder == wanted]

    def add_link(self, one: str, other: str, sample: LinkSample) -> bool:
        """Of either direction. True where another rate is told from now on."""
        pair = frozenset((one, other))
        samples = self._samples.setdefault(pair, deque(maxlen=REMEMBERED))
        samples.append(sample)
        rate, told = measured_link(list(samples)), self._links.get(pair)
        if rate is None or (told is not None and not _links_differ(rate, told)):
            return False
        self._links[pair] = rate
        return True

    def links(self, otherwise: Links) -> Links:
        """otherwise: of pairs that were not measured here."""
        return Links(otherwise.default, {**otherwise.known, **self._links})
