"""Where a model goes: which of the nodes, in which order, with which layers, for one of two objectives. Pure.

`plan_shards` and `plan_work` cut a model over nodes that somebody else chose; here they are chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omlx.cluster.candidate import Candidate
from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.offer import Terms
from omlx.cluster.order_search import bound, even_out, in_order, search_orders
from omlx.cluster.partition import LayerSums
from omlx.cluster.planner import ShardPlan, Span, gigabytes, stage_of
from omlx.cluster.rates import LinkRate, Links, NodeRates
from omlx.cluster.span_search import (
    MOST_TICKS,
    NEVER,
    SLOWEST,
    SUM,
    TICKS_PER_S,
    Found,
    Problem,
    is_small,
    search,
    ticks_of,
)
from omlx.errors import DoesNotFit, Refused
from omlx.node.manifest import ModelManifest

Objective = Literal["throughput", "single"]
Floats = NDArray[np.float64]

MANY = 8
"""Where it is for throughput a plan counts with so many sequences, which share the memory of one long one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the plan is for."""

    context_tokens: int
    sequences: int = 1
    """So many of that length at once: memory is counted for all of them."""
    objective: Objective = "single"
    step_tokens: int = 512


def demand_of(
    terms: Terms,
    least_tokens: int,
    *,
    objective: Objective | None = None,
    sequences: int | None = None,
    context_tokens: int | None = None,
) -> Demand:
    """What a server plans for: one sequence of `least_tokens`, or for throughput many that share these; with
    what else is asked for in the place of that."""
    if objective is None:
        objective = terms.objective
        if sequences is not None:
            objective = "single" if sequences == 1 else "throughput"
    if sequences is None:
        sequences = 1 if objective == "single" else min(MANY, terms.places)
    if context_tokens is None:
        context_tokens = -(-least_tokens // max(1, sequences))
    return Demand(context_tokens, sequences, objective, terms.step_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """The plan, and how good it is. `value_s` is the objective's: seconds of the slowest stage or transfer
    in a step of `rows` sequences each, or of one token's whole way."""

    plan: ShardPlan
    used: tuple[Candidate, ...]
    left_out: tuple[Candidate, ...]
    demand: Demand
    rows: int
    value_s: float
    exact: bool
    """No plan is better: all were searched, or this one reaches the bound that none can beat."""
    bound_s: float


def place(
    manifest: ModelManifest, candidates: Sequence[Candidate], links: Links, demand: Demand
) -> Placement:
    """The best contiguous spans over any of `candidates`, in any order.

    throughput: the least time of the slowest stage or transfer in a step, with the sequences dealt out in as
    many groups as there are candidates; among equals the least sum. single: the least sum of all stages and
    hops for one token; among equals the least slowest stage. A node that would not help is left out.

    Exact for up to eight nodes that all differ (nine or ten where all links are alike or layers are few), and
    for many in few classes, such as 64 of one kind and a few others (`span_search.is_small`). Beyond these
    a few orders are tried, and `exact` is True only where the plan meets the lower bound `bound_s`.

    Raises Refused for nonsense (no nodes, one name twice, a count or a budget below 1) and DoesNotFit with
    the arithmetic per node; beyond the exact search that says that no order tried fits.
    """
    _refuse_nonsense(candidates, demand)
    load = LayerSums.of(manifest, demand.context_tokens, demand.sequences, demand.step_tokens)
    work = ModelWork.of(manifest, demand.context_tokens)
    rows = rows_of(demand, len(candidates))
    classes = _classes(candidates, links)
    problem = build_problem(load, work, [[candidates[i] for i in like] for like in classes], links, rows)
    solution = solve(problem, demand.objective)
    if solution is None:
        raise _does_not_fit(manifest, load, candidates, demand)
    waiting = [list(like) for like in classes]
    order = [waiting[stage[0]].pop(0) for stage in solution.found.stages]
    used = tuple(candidates[index] for index in order)
    stages = tuple(
        stage_of(load, node.budget, Span(start, end), last=end == load.layers)
        for node, (_, start, end) in zip(used, solution.found.stages, strict=True)
    )
    return Placement(
        plan=ShardPlan(stages, demand.context_tokens, demand.sequences),
        used=used,
        left_out=tuple(node for index, node in enumerate(candidates) if index not in order),
        demand=demand,
        rows=rows,
        value_s=solution.value / TICKS_PER_S,
        exact=solution.value == solution.bound,
        bound_s=solution.bound / TICKS_PER_S,
    )


def rows_of(demand: Demand, nodes: int) -> int:
    """Rows of the steps that a plan over so many candidates is made for."""
    if demand.objective == "single":
        return 1
    return -(-demand.sequences // min(demand.sequences, nodes))


@dataclass(frozen=True, slots=True)
class Solution:
    """What a problem came to, in ticks."""

    found: Found
    value: int
    bound: int
    """No plan of any order is below this; equal to `value` where that was shown to be the best."""


def solve(problem: Problem, objective: Objective) -> Solution | None:
    """The best plan; None where none was found. Of plans equal by one measure, the best by the other."""
    measures = (SUM,) if objective == "single" else (SLOWEST, SUM)
    measure, exact = measures[0], is_small(problem, measures)
    least = 0 if exact else bound(problem, measure)
    if least is None:
        return None
    found = search(problem, measure) if exact else search_orders(problem, measure, least)
    if found is None:
        return None
    value = measure.of(problem, found)
    if measure is SUM:
        found = even_out(problem, found)
    elif exact:
        found = search(problem.capped(value), SUM) or found
    else:
        order = [stage[0] for stage in found.stages]
        found = in_order(problem.capped(value), order, SUM, all_of_them=False) or found
    return Solution(found, value, value if exact else least)


def build_problem(
    load: LayerSums, work: ModelWork, classes: Sequence[Sequence[Candidate]], links: Links, rows: int
) -> Problem:
    """Ticks of every span on a node of every class, and of the hops between classes."""
    sizes = span_bytes(load)
    kinds: dict[NodeRates, NDArray[np.int64]] = {}
    spans = np.empty((len(classes), *sizes.shape), np.int64)
    for index, like in enumerate(classes):
        rates = like[0].rates
        if rates not in kinds:
            each = np.array([ticks_of(s) for s in work.kinds_decode_s(rates, rows)], np.int64)
            sums = np.concatenate([[0], np.cumsum(each[list(work.which)])])
            kinds[rates] = sums[None, :] - sums[:, None]
            kinds[rates][:, -1] += ticks_of(work.head_s(rates, rows))
        spans[index] = np.where(sizes <= like[0].budget.bytes, kinds[rates], NEVER)
    latency_s, per_byte_s = _link_rates(classes, links)
    busy_s = rows * work.row_bytes * per_byte_s
    return Problem(
        counts=tuple(min(len(like), load.layers) for like in classes),
        spans=spans,
        hops=_ticks(latency_s + busy_s),
        busy=_ticks(busy_s),
        back=_ticks(latency_s),
    )


def span_bytes(load: LayerSums) -> NDArray[np.int64]:
    """[start, end]: bytes of a stage with these layers, as `LayerSums` counts them; NEVER without any."""
    sums = np.array(load.additive, np.int64)
    kv = np.triu(np.broadcast_to(np.array((0, *load.layer_kv), np.int64), (load.layers + 1,) * 2), 1)
    sizes: NDArray[np.int64] = sums[None, :] - sums[:, None] + np.maximum.accumulate(kv, axis=1)
    sizes += load.fixed(first=False, last=False)
    for first, last, where in (
        (True, False, (0, slice(0, -1))),
        (False, True, (slice(1, None), -1)),
        (True, True, (0, -1)),
    ):
        sizes[where] += load.fixed(first=first, last=last) - load.fixed(first=False, last=False)
    sizes[np.tri(load.layers + 1, dtype=bool)] = NEVER
    return sizes


def _classes(candidates: Sequence[Candidate], links: Links) -> list[list[int]]:
    """Indices of nodes that could be swapped: same memory, same rates, same links to all the others."""
    known: dict[str, dict[str, LinkRate]] = {node.name: {} for node in candidates}
    for one, other in (sorted(pair) for pair in links.known if len(pair) == 2):
        rate = links.between(one, other)
        if one in known and other in known and rate != links.default:
            known[one][other] = known[other][one] = rate
    classes: dict[tuple[int, NodeRates], list[list[int]]] = {}
    for index, node in enumerate(candidates):
        alike = classes.setdefault((node.budget.bytes, node.rates), [])
        for like in alike:
            if _same_links(known, candidates[like[0]].name, node.name):
                like.append(index)
                break
        else:
            alike.append([index])
    return sorted(like for alike in classes.values() for like in alike)


def _same_links(known: Mapping[str, Mapping[str, LinkRate]], one: str, other: str) -> bool:
    pair = (one, other)
    ours, theirs = ({name: rate for name, rate in known[node].items() if name not in pair} for node in pair)
    return ours == theirs


def _link_rates(classes: Sequence[Sequence[Candidate]], links: Links) -> tuple[Floats, Floats]:
    """[from, to]: seconds of latency and seconds for a byte, between nodes of two classes and of one.

    A class of one node borrows the link to another class.
    """
    names = [[node.name for node in like[:2]] for like in classes]
    rates = [[links.between(one[0], other[0]) for other in names] for one in names]
    for index, like in enumerate(names):
        if len(like) > 1:
            rates[index][index] = links.between(like[0], like[1])
        elif len(names) > 1:
            rates[index][index] = rates[index][0 if index else 1]
    return (
        np.array([[rate.latency_s for rate in row] for row in rates]),
        np.array([[1 / rate.bytes_per_s for rate in row] for row in rates]),
    )


def _ticks(seconds: Floats) -> NDArray[np.int64]:
    """As `ticks_of`, all at once."""
    return np.clip(np.rint(seconds * TICKS_PER_S), 1, MOST_TICKS).astype(np.int64)


def _refuse_nonsense(candidates: Sequence[Candidate], demand: Demand) -> None:
    if not candidates:
        raise Refused("a plan needs at least one node; give one with --node name=64GB")
    names = [node.name for node in candidates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Refused(f"two nodes are called {twice[0]}; give each a name of its own")
    for node in candidates:
        if node.budget.bytes < 1:
            raise Refused(f"node {node.name} gives {node.budget.bytes} bytes; its budget must be above 0")
        if not (node.rates.bandwidth > 0 and node.rates.compute > 0):
            raise Refused(f"node {node.name} has a rate of 0; measure it again, or leave it out")
    for what, count in (
        ("context", demand.context_tokens),
        ("sequences", demand.sequences),
        ("step", demand.step_tokens),
    ):
        if count < 1:
            raise Refused(f"a plan for {what} = {count} makes no sense; it must be 1 or more")


def _does_not_fit(
    manifest: ModelManifest, load: LayerSums, candidates: Sequence[Candidate], demand: Demand
) -> DoesNotFit:
    """What each node could hold, the largest first, and what is left over then."""
    sizes = span_bytes(load)
    parts, placed = [], 0
    for node in sorted(candidates, key=lambda node: -node.budget.bytes):
        end = placed + int((sizes[placed, placed + 1 :] <= node.budget.bytes).sum())
        # What is left over is at least one layer: with its head the last stage holds fewer.
        end = min(end, load.layers - 1)
        if end == placed:
            least, room = int(sizes[placed, placed + 1]), node.budget.bytes
            parts.append(f"{node.name} holds none: one layer takes {gigabytes(least)} of {gigabytes(room)}")
            continue
        used = int(sizes[placed, end])
        kv = load.kv[end] - load.kv[placed]
        weights = load.weights[end] - load.weights[placed] + load.ends(first=placed == 0, last=False)
        parts.append(
            f"{node.name} holds layers {placed} to {end - 1}: {gigabytes(weights)} weights + "
            f"{gigabytes(kv)} KV + {gigabytes(used - weights - kv)} scratch = {gigabytes(used)} of "
            f"{gigabytes(node.budget.bytes)}"
        )
        placed = end
    short = int(sizes[placed, load.layers])
    return DoesNotFit(
        f"{manifest.folder.name} with {demand.sequences} sequences of {demand.context_tokens} tokens does "
        f"not fit: {'; '.join(parts)}; layers {placed} to {load.layers - 1} have no place, "
        f"{gigabytes(short)} short; use a shorter context, fewer sequences, more memory or another node",
        short_bytes=short,
    )
