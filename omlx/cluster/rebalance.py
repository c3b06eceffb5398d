"""Whether a model should lie otherwise: the better plan, what moves for it, and what that costs. Pure.

The best plan by `choose` is weighed against those that keep the order of the nodes and move few bytes; of
plans within NEARLY of the fastest the one is taken that keeps the order, and then the one that reads least.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, isfinite

import numpy as np

from omlx.cluster.candidate import Candidate
from omlx.cluster.choice import choose
from omlx.cluster.forecast import Forecast, Way, forecast, milliseconds
from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.order_search import in_order
from omlx.cluster.partition import LayerSums
from omlx.cluster.placement import Demand, Placement, build_problem, rows_of
from omlx.cluster.planner import ShardPlan, Span, StagePlan, gigabytes, stage_of
from omlx.cluster.rates import Links
from omlx.cluster.span_search import NEVER, SLOWEST, SUM, TICKS_PER_S, Found, Problem, Ticks
from omlx.errors import Refused
from omlx.node.manifest import ModelManifest

NEARLY = 1.02
"""Plans that differ by less are as good as each other."""
MOST_ORDERS = 12
"""In which newcomers are put between the nodes that there are."""
LEAST_GAIN = 1.1
TIMES_ITS_COST = 2.0
"""What an automatic move must win within the horizon."""
READ_BYTES_PER_S = 1e9
"""From an SSD, where nothing is known: a plain one, with room for what else happens while a model loads."""

Stages = Sequence[tuple[str, Span]]
"""Nodes by name with their layers, in pipeline order."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What moving costs besides the plan."""

    tokens: int = 0
    """Of requests that run and chats that likely go on: computed again, for caches stay behind."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """By node: how it reads weights that it lacks, from its SSD, or over the network if they must come."""

    def read_s(self, node: str, size: int) -> float:
        return size / self.bytes_per_s.get(node, READ_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class Move:
    """One node before and after; None where it runs nothing of the model."""

    node: str
    before: Span | None
    after: Span | None
    gained: int
    """Layers that it has to read."""
    given: int
    """Layers that it gives up."""
    read_bytes: int
    """Weights that it did not hold, an embedding or a head that it did not need included."""
    read_s: float

    def line(self) -> str:
        """For a terminal: `studio 0-11 -> 0-15 (+4 layers, 3.10 GB to read)`."""
        counts = [f"{sign}{count}" for sign, count in (("+", self.gained), ("-", self.given)) if count]
        noun = "layer" if self.gained + self.given == 1 else "layers"
        read = f", {gigabytes(self.read_bytes)} to read" if self.read_bytes else ""
        return f"{self.node} {_words(self.before)} -> {_words(self.after)} ({' '.join(counts)} {noun}{read})"


@dataclass(frozen=True, slots=True)
class Proposal:
    """The plan to have, which may be the one that there is: then `moves` is empty."""

    model: str
    placement: Placement
    moves: tuple[Move, ...]
    now: Forecast | None
    """Of the stages that run, by today's rates; None where a node of theirs is no candidate any more."""
    expected: Forecast
    needed: str | None
    """Why the stages cannot stay as they are, whatever is gained; None where they can."""
    reread_tokens: int
    read_s: float
    """Of the node that has most to read."""
    recompute_s: float

    @property
    def now_per_s(self) -> float:
        """Tokens per second of what the plan is for: of one stream, or of all together."""
        return 0.0 if self.now is None else _speed(self.now, self.placement.demand)

    @property
    def expected_per_s(self) -> float:
        return _speed(self.expected, self.placement.demand)

    @property
    def gain(self) -> float:
        return self.expected_per_s / self.now_per_s if self.now_per_s > 0 else inf

    @property
    def cost_s(self) -> float:
        return self.read_s + self.recompute_s if self.moves else 0.0

    def as_json(self) -> dict[str, object]:
        """Plain values; spans are half-open."""
        stages = zip(self.placement.used, self.placement.plan.spans, strict=True)
        return {
            "model": self.model,
            "objective": self.placement.demand.objective,
            "now_tokens_per_s": self.now_per_s,
            "expected_tokens_per_s": self.expected_per_s,
            "gain": self.gain if isfinite(self.gain) else None,
            "cost_s": self.cost_s,
            "read_s": self.read_s,
            "recompute_s": self.recompute_s,
            "needed": self.needed,
            "worth": worth(self),
            "stages": [{"node": node.name, "start": at.start, "end": at.end} for node, at in stages],
            "moves": [asdict(move) for move in self.moves],
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        if not self.moves:
            return [f"{self.model} lies well: {self.expected_per_s:.1f} tokens/s, nothing to move"]
        slowest = f"slowest stage {milliseconds(max(self.expected.stage_s))}"
        if self.now is None:
            first = f"{self.model}: {self.expected_per_s:.1f} tokens/s expected, {slowest}"
        else:
            first = (
                f"{self.model}: {self.now_per_s:.1f} tokens/s now, {self.expected_per_s:.1f} expected "
                f"(x{self.gain:.2f}), {slowest}, now {milliseconds(max(self.now.stage_s))}"
            )
        again = f", {self.reread_tokens} tokens computed again" if self.reread_tokens else ""
        cost = f"costs about {milliseconds(self.cost_s)}: {gigabytes(self._read_bytes)} to read{again}"
        needed = [f"it must move: {self.needed}"] if self.needed is not None else []
        return [first, *needed, *(move.line() for move in self.moves), cost]

    @property
    def _read_bytes(self) -> int:
        return sum(move.read_bytes for move in self.moves)


def propose(  # noqa: PLR0913 (what is asked, what there is, what it costs)
    manifest: ModelManifest,
    current: Stages,
    candidates: Sequence[Candidate],
    links: Links,
    demand: Demand,
    costs: MoveCosts | None = None,
    *,
    prompt_tokens: int = 1024,
) -> Proposal:
    """The plan that `candidates` should run, by their budgets and rates of today, seen from `current`.

    A node of `current` that is not among the candidates has to give its layers away. Raises as `place`, and
    Refused where `current` is no plan of this model.
    """
    _refuse_nonsense(manifest, current)
    costs = costs or MoveCosts()
    search = _Search.of(manifest, current, candidates, links, demand)
    here, needed = search.here(), search.needed()
    best = choose(manifest, candidates, links, demand, prompt_tokens).placement
    plans = [] if here is None or needed is not None else [here]
    plans += [search.placement(found) for found in search.rivals(best)]
    plans.append(best)
    seen = [(plan, forecast(manifest, plan, links, prompt_tokens)) for plan in plans]
    fastest = max(_speed(expected, demand) for _, expected in seen)
    good = [pair for pair in seen if _speed(pair[1], demand) * NEARLY >= fastest]
    placement, expected = min(good, key=lambda pair: (*search.upheaval(pair[0]), -_speed(pair[1], demand)))
    moves = search.moves(placement, costs)
    chunk_s = max(Way.of(manifest, placement, links).chunk_s(demand.step_tokens))
    return Proposal(
        model=manifest.folder.name,
        placement=placement,
        moves=moves,
        now=None if here is None else forecast(manifest, here, links, prompt_tokens),
        expected=expected,
        needed=needed,
        reread_tokens=costs.tokens if moves else 0,
        read_s=max((move.read_s for move in moves), default=0.0),
        recompute_s=costs.tokens * chunk_s / demand.step_tokens if moves else 0.0,
    )


def worth(proposal: Proposal, horizon_s: float = 600.0) -> bool:
    """Whether to move without being asked: it gains a tenth, and what it wins within the horizon is more than
    twice what it costs. What `needed` says is not weighed here."""
    if not proposal.moves or proposal.gain < LEAST_GAIN:
        return False
    won_s = horizon_s * (1 - 1 / proposal.gain)
    return won_s > TIMES_ITS_COST * proposal.cost_s


@dataclass(frozen=True, slots=True)
class _Search:
    """What the plans near the current one are looked for with; nodes are indices of `candidates`."""

    manifest: ModelManifest
    current: Stages
    candidates: tuple[Candidate, ...]
    links: Links
    demand: Demand
    load: LayerSums
    problem: Problem
    reads: Ticks
    """[node, start, end]: bytes that the node would have to read for these layers."""

    @classmethod
    def of(
        cls,
        manifest: ModelManifest,
        current: Stages,
        candidates: Sequence[Candidate],
        links: Links,
        demand: Demand,
    ) -> "_Search":
        load = LayerSums.of(manifest, demand.context_tokens, demand.sequences, demand.step_tokens)
        work, rows = ModelWork.of(manifest, demand.context_tokens), rows_of(demand, len(candidates))
        problem = build_problem(load, work, [[node] for node in candidates], links, rows)
        held = dict(current)
        reads = np.stack([_reads(manifest, held.get(node.name)) for node in candidates])
        return cls(manifest, current, tuple(candidates), links, demand, load, problem, reads)

    @property
    def kept(self) -> list[int]:
        """The nodes that run, in pipeline order, those that are candidates no more left out."""
        places = {node.name: index for index, node in enumerate(self.candidates)}
        return [places[name] for name, _ in self.current if name in places]

    def here(self) -> Placement | None:
        """The stages that run; None where a node is gone."""
        if len(self.kept) < len(self.current):
            return None
        spans = [span for _, span in self.current]
        stages = zip(self.kept, spans, strict=True)
        return self.placement(Found(tuple((index, span.start, span.end) for index, span in stages)))

    def needed(self) -> str | None:
        names = {node.name for node in self.candidates}
        for name, _ in self.current:
            if name not in names:
                return f"{name} is no longer there to run its layers"
        here = self.here()
        for stage in () if here is None else here.plan.stages:
            if stage.headroom < 0:
                return (
                    f"{stage.node.name} gives {gigabytes(stage.node.bytes)}, its layers take "
                    f"{gigabytes(stage.used)}"
                )
        return None

    def placement(self, found: Found) -> Placement:
        used = tuple(self.candidates[index] for index, _, _ in found.stages)
        stages = tuple(
            stage_of(self.load, node.budget, Span(start, end), last=end == self.load.layers)
            for node, (_, start, end) in zip(used, found.stages, strict=True)
        )
        measure = SUM if self.demand.objective == "single" else SLOWEST
        return Placement(
            plan=ShardPlan(stages, self.demand.context_tokens, self.demand.sequences),
            used=used,
            left_out=tuple(node for node in self.candidates if node not in used),
            demand=self.demand,
            rows=rows_of(self.demand, len(self.candidates)),
            value_s=measure.of(self.problem, found) / TICKS_PER_S,
            exact=False,
            bound_s=0.0,
        )

    def rivals(self, best: Placement) -> Iterator[Found]:
        """For each order worth a look, the best plan and the one that is nearly as good and reads least."""
        for order in self._orders(best):
            if self.demand.objective == "single":
                yield from self._least_sum(order)
            else:
                yield from self._least_slowest(order)

    def _orders(self, best: Placement) -> list[list[int]]:
        """The current one, as it is and without who should leave, with newcomers somewhere; and the best."""
        places = {node.name: index for index, node in enumerate(self.candidates)}
        wanted = [places[node.name] for node in best.used]
        kept = self.kept
        newcomers = [index for index in wanted if index not in kept]
        old = [index for index in kept if index in wanted]
        orders = [kept, old, wanted]
        # Newcomers stay together: with one, as is usual, these are all orders there are.
        if newcomers:
            cuts = range(len(old) + 1)[:MOST_ORDERS]
            orders += [[*old[:cut], *newcomers, *old[cut:]] for cut in cuts]
        return [order for number, order in enumerate(orders) if order and order not in orders[:number]]

    def _least_slowest(self, order: Sequence[int]) -> Iterator[Found]:
        found = in_order(self.problem, order, SLOWEST, all_of_them=False)
        if found is None:
            return
        yield found
        most = int(SLOWEST.of(self.problem, found) * NEARLY)
        capped = self.problem.capped(most)
        spans = np.where(capped.spans < NEVER, self.reads, NEVER)
        hops = np.where(capped.busy < NEVER, 0, NEVER)
        reading = Problem(capped.counts, spans, hops, hops, hops)
        yield in_order(reading, order, SUM, all_of_them=False) or found

    def _least_sum(self, order: Sequence[int]) -> Iterator[Found]:
        found = in_order(self.problem, order, SUM, all_of_them=False)
        if found is None:
            return
        yield found
        # Bytes at a price by which reading everything costs what may be lost.
        whole = max(1, self.manifest.span_bytes(0, self.manifest.num_layers))
        price = (NEARLY - 1) * SUM.of(self.problem, found) / whole
        dearer = self.problem.spans + (self.reads * price).astype(np.int64)
        spans = np.where(self.problem.spans < NEVER, dearer, NEVER)
        priced = Problem(self.problem.counts, spans, self.problem.hops, self.problem.busy, self.problem.back)
        yield in_order(priced, order, SUM, all_of_them=False) or found

    def read_bytes(self, stage: StagePlan) -> int:
        """Weights of the stage that its node lacks."""
        index = next(index for index, node in enumerate(self.candidates) if node.name == stage.node.name)
        return int(self.reads[index, stage.span.start, stage.span.end])

    def upheaval(self, placement: Placement) -> tuple[bool, int]:
        """Whether the order of those that stay changes, and how many bytes are read."""
        places = {name: index for index, (name, _) in enumerate(self.current)}
        staying = [places[node.name] for node in placement.used if node.name in places]
        return staying != sorted(staying), sum(map(self.read_bytes, placement.plan.stages))

    def moves(self, placement: Placement, costs: MoveCosts) -> tuple[Move, ...]:
        """Of each node whose layers change; those that have none any more come last."""
        before = dict(self.current)
        after = {stage.node.name: stage for stage in placement.plan.stages}
        moves = []
        for name in dict.fromkeys([*after, *before]):
            old, new = before.get(name), after[name].span if name in after else None
            if old != new:
                size = self.read_bytes(after[name]) if name in after else 0
                gained, given = _apart(old, new), _apart(new, old)
                moves.append(Move(name, old, new, gained, given, size, costs.read_s(name, size)))
        return tuple(moves)


def _speed(expected: Forecast, demand: Demand) -> float:
    return expected.single if demand.objective == "single" else expected.throughput


def _apart(one: Span | None, other: Span | None) -> int:
    """How many layers of `other` are not in `one`."""
    held = range(0) if one is None else range(one.start, one.end)
    return 0 if other is None else sum(index not in held for index in range(other.start, other.end))


def _ends(manifest: ModelManifest, span: Span | None) -> dict[str, int]:
    """What a stage holds besides its layers: parts by name, in bytes."""
    last = span is not None and span.end == manifest.num_layers
    parts = {"tail": manifest.tail_bytes(alone=True)} if last else {}
    if span is not None and (span.start == 0 or (last and manifest.tied)):
        parts["embedding"] = manifest.embedding_bytes
    return parts


def _reads(manifest: ModelManifest, before: Span | None) -> Ticks:
    """[start, end]: bytes of weights that a node which runs `before` lacks for the layers of another span."""
    lacking = np.array([layer.weights for layer in manifest.layers], np.int64)
    if before is not None:
        lacking[before.start : before.end] = 0
    sums = np.concatenate([[0], np.cumsum(lacking)])
    sizes: Ticks = sums[None, :] - sums[:, None]
    had, last = _ends(manifest, before), manifest.num_layers
    for where, span in (
        ((0, slice(0, -1)), Span(0, last - 1)),
        ((slice(1, None), -1), Span(1, last)),
        ((0, -1), Span(0, last)),
    ):
        sizes[where] += sum(size for part, size in _ends(manifest, span).items() if part not in had)
    return sizes


def _words(span: Span | None) -> str:
    if span is None:
        return "none"
    return f"{span.start}-{span.end - 1}" if len(span) > 1 else f"{span.start}"


def _refuse_nonsense(manifest: ModelManifest, current: Stages) -> None:
    edges = [0, *(span.end for _, span in current)]
    joined = [span.start for _, span in current] == edges[:-1] and edges[-1] == manifest.num_layers
    if not joined or not all(len(span) > 0 for _, span in current) or len(dict(current)) < len(current):
        shown = ", ".join(f"{name} {_words(span)}" for name, span in current) or "nothing"
        raise Refused(f"{shown}: that is no plan for {manifest.folder.name}, {manifest.num_layers} layers")
