"""Spans for a given order of nodes, good orders where there are too many to try all, and how good at best.

The exact search (`span_search`) decides about small clusters and large ones of few classes. For many nodes
that all differ the order is NP-hard (bin packing is a special case), so a few sensible orders are tried: for
each of them the choice of nodes and the spans are exact, and `bound` says what no plan of any order beats.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from omlx.cluster.span_search import NEVER, SLOWEST, SUM, Found, Measure, Problem, Ticks, then

GRAIN = 4096
"""The most units of work that the bound counts in."""


def in_order(problem: Problem, order: Sequence[int], measure: Measure, *, all_of_them: bool) -> Found | None:
    """The least plan whose stages are of the classes in `order`, or of some of these in that order.

    Exact but for the hop back to the first stage, which is not weighed. Dynamic programming over (last node
    used, layers placed). None where none fits.
    """
    links = measure.links(problem)
    values = np.full((len(order), problem.layers + 1), NEVER, np.int64)
    start = np.full(problem.layers + 1, NEVER, np.int64)
    start[0] = 0
    for index, last in enumerate(order):
        base = _before(values, links, order, index, measure, all_of_them)
        if index == 0 or not all_of_them:
            base = np.minimum(base, start)
        values[index] = then(measure, base, problem.spans[last])
    ends = values[-1:, -1] if all_of_them else values[:, -1]
    index = int(ends.argmin()) + (len(order) - len(ends))
    if values[index, -1] >= NEVER:
        return None
    return _walk_back(problem, order, measure, values, index, all_of_them)


def _before(
    values: Ticks, links: Ticks, order: Sequence[int], index: int, measure: Measure, all_of_them: bool
) -> Ticks:
    """Least ticks by layers placed when the node at `index` begins after another one."""
    first = max(0, index - 1) if all_of_them else 0
    if index == 0:
        return np.full(values.shape[1], NEVER, np.int64)
    hops = links[list(order[first:index]), order[index]]
    base: Ticks = measure.join(values[first:index], hops[:, None]).min(axis=0)
    return base


def _walk_back(
    problem: Problem,
    order: Sequence[int],
    measure: Measure,
    values: Ticks,
    index: int,
    all_of_them: bool,
) -> Found:
    links, end = measure.links(problem), problem.layers
    stages: list[tuple[int, int, int]] = []
    while True:
        last, value = order[index], values[index, end]
        alone = index == 0 or not all_of_them
        if alone and problem.spans[last, 0, end] == value:
            stages.append((last, 0, end))
            return Found(tuple(reversed(stages)))
        first = max(0, index - 1) if all_of_them else 0
        ways = measure.join(values[first:index], links[list(order[first:index]), last][:, None])
        here = measure.join(ways, problem.spans[last, :, end])
        previous, start = (int(place) for place in np.argwhere(here == value)[-1])
        stages.append((last, start, end))
        index, end = first + previous, start


def search_orders(problem: Problem, measure: Measure, enough: int = 0) -> Found | None:
    """The best plan over some orders; of equally good ones the one with the fewest nodes.

    Ends with the first one that is as good as `enough`.
    """
    best: tuple[int, int] | None = None
    found = None
    for order in _orders(problem):
        tried = in_order(problem, order, measure, all_of_them=False)
        if tried is None:
            continue
        key = (measure.of(problem, tried), len(tried.stages))
        if best is None or key < best:
            best, found = key, tried
        if key[0] <= enough:
            break
    return found


def _orders(problem: Problem) -> Iterator[list[int]]:
    """As given, by speed and by room, each from either end, and along the shortest hops."""
    every = [index for index, count in enumerate(problem.counts) for _ in range(count)]
    cheapest = _cheapest(problem)
    slowness = cheapest[:, 0].tolist()
    room = (cheapest < NEVER).sum(axis=1).tolist()
    seen: list[list[int]] = []
    for order in (
        every,
        sorted(every, key=lambda node: (slowness[node], -room[node])),
        sorted(every, key=lambda node: (-slowness[node], -room[node])),
        sorted(every, key=lambda node: (-room[node], slowness[node])),
        _along_hops(problem, every, slowness),
    ):
        if order not in seen:
            seen.append(order)
            yield order


def _along_hops(problem: Problem, every: Sequence[int], slowness: Sequence[int]) -> list[int]:
    """From the fastest node always to the nearest one that is left, the faster of equally near ones."""
    left = sorted(every, key=lambda node: slowness[node])
    order = [left.pop(0)]
    while left:
        hops = problem.hops[order[-1]]
        order.append(left.pop(min(range(len(left)), key=lambda place: int(hops[left[place]]))))
    return order


def _cheapest(problem: Problem) -> Ticks:
    """[class, n - 1]: the ticks of the cheapest n layers in a row, wherever they lie."""
    lengths = range(1, problem.layers + 1)
    columns = [np.diagonal(problem.spans, n, axis1=1, axis2=2).min(axis=1) for n in lengths]
    return np.stack(columns, axis=1)


def bound(problem: Problem, measure: Measure) -> int | None:
    """What no plan beats; None where not even the sums of what nodes can hold reach all layers.

    It drops the order: each node may take any run of layers for itself, together they must make up the work
    of all layers, counted in units (`_units`), at most GRAIN of them and rounded in favour of the bound.
    SLOWEST: a limit T lets each node do the most units of any run within T, so T is the U-th smallest of all
    nodes' costs of one unit more; nor is it below the dearest layer's cost on the best node for it. SUM: the
    units at the cheapest price each, as far as memory goes, and the cheapest hops that so many nodes need.
    """
    units = _units(problem)
    if units is None:
        return None
    sums = np.concatenate([[0], np.cumsum(units)])
    coarse = max(1, -(-int(sums[-1]) // GRAIN))
    starts, ends = np.triu_indices(problem.layers + 1, 1)
    done = -((sums[starts] - sums[ends]) // coarse)
    costs = _by_units(problem.spans[:, starts, ends], done)
    wanted = -(-int(sums[-1]) // coarse)
    room = (costs < NEVER).sum(axis=1)
    if int(room @ np.array(problem.counts)) < wanted:
        return None
    single = np.diagonal(problem.spans, 1, axis1=1, axis2=2)
    if measure is SLOWEST:
        every = np.repeat(costs, problem.counts, axis=0).ravel()
        return max(int(np.partition(every, wanted - 1)[wanted - 1]), int(single.min(axis=0).max()))
    prices = np.where(single < NEVER, single / units, np.inf).min(axis=1)
    return int(_fill(problem, prices, room * coarse, int(sums[-1])) * (1 - 1e-9)) + _fewest_hops(
        problem, room, wanted
    )


def _units(problem: Problem) -> Ticks | None:
    """Each layer's work, 1 or more: its price on a middling node. None where no node holds some layer."""
    single = np.diagonal(problem.spans, 1, axis1=1, axis2=2)
    holds = single < NEVER
    if not holds.any(axis=0).all():
        return None
    shares = np.where(holds, single, 0) / np.maximum(1, np.where(holds, single, 0).mean(axis=1))[:, None]
    work = shares.sum(axis=0) / holds.sum(axis=0)
    scaled = np.maximum(1, np.round(work / max(work.min(), work.max() / GRAIN) * 16)).astype(np.int64)
    units: Ticks = scaled // np.gcd.reduce(scaled)
    return units


def _by_units(costs: Ticks, done: Ticks) -> Ticks:
    """[class, n - 1]: the ticks of the cheapest run of n units or more."""
    by_done = np.argsort(done, kind="stable")
    levels, firsts = np.unique(done[by_done], return_index=True)
    least = np.minimum.reduceat(costs[:, by_done], firsts, axis=1)
    least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
    table: Ticks = np.repeat(least, np.diff(levels, prepend=0), axis=1)
    return table


def _fill(problem: Problem, prices: NDArray[np.float64], room: Ticks, work: int) -> float:
    """The price of `work` units, the cheapest nodes first, each up to its room."""
    total, left = 0.0, work
    for index in np.argsort(prices, kind="stable").tolist():
        taken = min(left, int(room[index]) * problem.counts[index])
        if taken:
            total, left = total + taken * float(prices[index]), left - taken
    return total


def _fewest_hops(problem: Problem, room: Ticks, wanted: int) -> int:
    """Ticks of the cheapest hops and way back of as few nodes as can hold everything."""
    most = np.cumsum(-np.sort(-np.repeat(room, problem.counts)))
    needed = int(np.searchsorted(most, wanted)) + 1
    return (needed - 1) * int(problem.hops.min()) + int(problem.back.min()) if needed > 1 else 0


def even_out(problem: Problem, found: Found) -> Found:
    """The same nodes in the same order at the same SUM, with the least slowest stage that allows it."""
    if len(found.stages) == 1:
        return found
    classes = sorted({stage[0] for stage in found.stages})
    order = [classes.index(stage[0]) for stage in found.stages]
    small, total = problem.only(classes), SUM.of(problem, found)
    low, high = 0, SLOWEST.of(problem, found)
    while high - low > 1 + high // 1000:
        middle = (low + high) // 2
        tried = in_order(small.capped(middle), order, SUM, all_of_them=True)
        if tried is not None and SUM.of(small, tried) <= total:
            found = Found(tuple((classes[index], start, end) for index, start, end in tried.stages))
            high = SLOWEST.of(problem, found)
        else:
            low = middle
    return found
