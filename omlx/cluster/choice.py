"""The plan that is taken, what holds it back, and why nodes were left out of it. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from omlx.cluster.candidate import Candidate
from omlx.cluster.forecast import Forecast, Way, forecast, milliseconds
from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.offer import Offer
from omlx.cluster.order_search import in_order
from omlx.cluster.partition import LayerSums
from omlx.cluster.placement import Demand, Placement, build_problem, place, span_bytes
from omlx.cluster.rates import Links
from omlx.cluster.span_search import SLOWEST, SUM, TICKS_PER_S
from omlx.errors import DoesNotFit
from omlx.node.manifest import ModelManifest

UNLIMITED = 10**17
"""Bytes: more than any model."""
MATTERS = 1.01
"""Less than a hundredth of difference decides nothing."""
MOST_DROPPED = 12
"""Plans with fewer and fewer nodes that are looked at."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One placement of all that were weighed, and what it will do."""

    placement: Placement
    expected: Forecast
    left_out: tuple[Candidate, ...]
    """Every candidate that it does not use."""
    passed_over: Forecast | None = None
    """Of the plan with the least slowest stage, where one with fewer nodes is forecast to do more."""


@dataclass(frozen=True, slots=True)
class Explained:
    """In words: what holds the plan back, and (name, why) of each node that it does not use."""

    binds: str
    left_out: tuple[tuple[str, str], ...]


def choose(
    manifest: ModelManifest,
    candidates: Sequence[Candidate],
    links: Links,
    demand: Demand,
    prompt_tokens: int = 1024,
) -> Choice:
    """`place`, and for throughput fewer nodes where more would be slower.

    A pipeline needs more sequences than it has stages to be full: with few, the least slowest stage is not
    yet the most tokens per second. So it is weighed by forecast against the plan for a single stream, and
    those over the nodes that are left when the one with the least work goes, again and again. Raises
    as `place`.
    """
    first = place(manifest, candidates, links, demand)
    expected = forecast(manifest, first, links, prompt_tokens)
    best = Choice(first, expected, first.left_out)
    if demand.objective == "single":
        return best
    for rival in _with_fewer(manifest, first, links):
        seen = forecast(manifest, rival, links, prompt_tokens)
        if seen.throughput > best.expected.throughput * MATTERS:
            names = {node.name for node in rival.used}
            left_out = tuple(node for node in candidates if node.name not in names)
            best = Choice(rival, seen, left_out, passed_over=expected)
    return best


def choose_of(
    manifest: ModelManifest, offer: Offer, links: Links, demand: Demand, prompt_tokens: int = 1024
) -> tuple[Choice, bool]:
    """What is chosen of an offer, and whether the hot tier has its room beside it: it goes without where the
    model would not fit else. Raises as `place`."""
    try:
        if beside := offer.candidates():
            return choose(manifest, beside, links, demand, prompt_tokens), True
    except DoesNotFit:
        pass  # perhaps without
    return choose(manifest, offer.candidates(with_hot=False), links, demand, prompt_tokens), False


def _with_fewer(manifest: ModelManifest, first: Placement, links: Links) -> Iterator[Placement]:
    everybody = [*first.used, *first.left_out]
    yield place(manifest, everybody, links, replace(first.demand, objective="single"))
    last = first
    for _ in range(min(MOST_DROPPED, len(first.used) - 1)):
        seconds = Way.of(manifest, last, links).decode_s(last.rows)
        idlest = min(range(len(seconds)), key=lambda index: seconds[index])
        others = [node for index, node in enumerate(last.used) if index != idlest]
        if not others:
            return
        try:
            last = place(manifest, others, links, first.demand)
        except DoesNotFit:
            return
        yield last


def explain(manifest: ModelManifest, choice: Choice, links: Links) -> Explained:
    """Takes a search more, and one for each node left out."""
    reasons = tuple((node.name, _why(manifest, choice, links, node)) for node in choice.left_out)
    return Explained(what_binds(manifest, choice.placement, links), reasons)


def _why(manifest: ModelManifest, choice: Choice, links: Links, node: Candidate) -> str:
    demand = choice.placement.demand
    load = LayerSums.of(manifest, demand.context_tokens, demand.sequences, demand.step_tokens)
    if int(span_bytes(load).min()) > node.budget.bytes:
        return "its memory holds none of the layers"
    if choice.passed_over is not None:
        return _passed_over(choice, choice.passed_over)
    return _why_left_out(load, manifest, choice.placement, links, node)


def _passed_over(choice: Choice, over: Forecast) -> str:
    return (
        f"slower: with more nodes {choice.placement.demand.sequences} sequences would get "
        f"{over.throughput:.1f} tokens/s together, {choice.expected.throughput:.1f} with fewer"
    )


def what_binds(manifest: ModelManifest, placement: Placement, links: Links) -> str:
    """The one thing that more of would help most: a node's memory, its speed, or a link."""
    everybody = [*placement.used, *placement.left_out]
    roomy = [replace(node, budget=replace(node.budget, bytes=UNLIMITED)) for node in everybody]
    free = place(manifest, roomy, links, placement.demand).value_s
    if free * MATTERS < placement.value_s:
        tightest = min(placement.plan.stages, key=lambda stage: stage.headroom / stage.node.bytes)
        return (
            f"memory, first of all that of {tightest.node.name}: with enough on every node "
            f"{_what(placement.demand)} would take {milliseconds(free)}"
        )
    way = Way.of(manifest, placement, links)
    stages = way.decode_s(placement.rows)
    if placement.demand.objective == "single":
        hops = way.hop_s(1)
        if hops > max(stages):
            return f"the links: {milliseconds(hops)} of {milliseconds(placement.value_s)} for each token"
    elif max(way.busy_s(placement.rows), default=0.0) > max(stages):
        index = max(range(len(way.hops)), key=lambda hop: way.busy_s(placement.rows)[hop])
        return f"the link from {placement.used[index].name} to {placement.used[index + 1].name}"
    slowest = max(range(len(stages)), key=lambda index: stages[index])
    return f"the speed of {placement.used[slowest].name}, {milliseconds(stages[slowest])} a step"


def _why_left_out(
    load: LayerSums, manifest: ModelManifest, placement: Placement, links: Links, node: Candidate
) -> str:
    """One clause about a node of `placement.left_out`."""
    demand = placement.demand
    if len(placement.used) == load.layers:
        return "no layer is left for it"
    with_it = _least_with(load, manifest, placement, links, node)
    if with_it is None:
        return "its memory holds no layers that the other nodes could leave to it"
    if with_it > placement.value_s:
        return (
            f"slower: {_what(demand)} would take at least {milliseconds(with_it)} with it, "
            f"{milliseconds(placement.value_s)} without"
        )
    return f"no gain: {_what(demand)} takes {milliseconds(placement.value_s)} with it and without"


def _least_with(
    load: LayerSums, manifest: ModelManifest, placement: Placement, links: Links, node: Candidate
) -> float | None:
    """The objective when `node` has to have layers too, anywhere between the others; None: it cannot be."""
    nodes = [*placement.used, node]
    work = ModelWork.of(manifest, placement.demand.context_tokens)
    problem = build_problem(load, work, [[one] for one in nodes], links, placement.rows)
    measure = SUM if placement.demand.objective == "single" else SLOWEST
    others = list(range(len(placement.used)))
    costs = []
    for place_of_it in range(len(nodes)):
        order = [*others[:place_of_it], len(others), *others[place_of_it:]]
        found = in_order(problem, order, measure, all_of_them=True)
        if found is not None:
            costs.append(measure.of(problem, found))
    return min(costs) / TICKS_PER_S if costs else None


def _what(demand: Demand) -> str:
    return "a token" if demand.objective == "single" else "the slowest step"
