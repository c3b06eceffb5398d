"""Which nodes, in which order, with which spans: the search over classes of like nodes. Numbers only, pure.

Costs are whole ticks (picoseconds), so that equal is equal and ties are broken the same way everywhere. Two
measures, and one algorithm for both, a shortest path over (nodes used, layers placed):

- SUM: stages and hops one after the other, and the hop from the last stage back to the first;
- SLOWEST: the longest of the stages and of the transfers between them.

Exact: dynamic programming over how many nodes of each class are used (a subset per state where all nodes
differ, as Held and Karp did for tours), and within it over layers by min-plus or min-max products of vectors
and matrices. That is Sum(classes) * Product(nodes of a class + 1) products of (layers + 1)^2; `order_search`
takes over where `is_small` says that these are too many.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

Ticks = NDArray[np.int64]
TICKS_PER_S = 10**12
NEVER = 2**60
"""No plan takes so many ticks (13 days); seven of them still fit into an int64."""
MOST_TICKS = 10**15
"""For one layer or hop; what is slower (1,000 s) counts as this slow."""
FEW_NODES = 12
EXACT_WORK_S = {"few": 0.3, "many": 0.035}
"""How long the exact search may be expected to take on a plain core: few nodes are worth a wait."""


def ticks_of(seconds: float) -> int:
    """At least one: a hop that costs nothing would not keep a useless node out."""
    return max(1, min(MOST_TICKS, round(seconds * TICKS_PER_S)))


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Classes of nodes that are alike in every respect, and what spans and hops cost them.

    spans[c, a, b]: ticks of layers [a, b) on a node of class c, NEVER where memory does not hold them or
    a >= b; what only the first or the last stage does is in row 0 and in the last column.
    hops[c, d]: ticks from a stage of class c to the next one of class d; busy[c, d]: of these, those during
    which the link can do nothing else; back[c, d]: ticks of drawn tokens from the last stage to the first.
    """

    counts: tuple[int, ...]
    spans: Ticks
    hops: Ticks
    busy: Ticks
    back: Ticks

    @property
    def layers(self) -> int:
        return int(self.spans.shape[1]) - 1

    def only(self, classes: Sequence[int]) -> "Problem":
        """With these classes, numbered anew."""
        pairs = np.ix_(classes, classes)
        counts = tuple(self.counts[index] for index in classes)
        return Problem(
            counts, self.spans[list(classes)], self.hops[pairs], self.busy[pairs], self.back[pairs]
        )

    def capped(self, most: int) -> "Problem":
        """Without stages and transfers that take longer than `most`."""
        spans = np.where(self.spans > most, NEVER, self.spans)
        return Problem(self.counts, spans, np.where(self.busy > most, NEVER, self.hops), self.busy, self.back)


@dataclass(frozen=True, slots=True)
class Found:
    """Stages in pipeline order: (class, first layer, end)."""

    stages: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Measure:
    """How costs of stages and hops come together."""

    join: Callable[[Ticks, Ticks], Ticks]
    closes: bool
    """Whether the hop back to the first stage counts."""

    def links(self, problem: Problem) -> Ticks:
        return problem.hops if self.closes else problem.busy

    def of(self, problem: Problem, found: Found) -> int:
        """What `found` costs; NEVER or more where it cannot be."""
        links, stages = self.links(problem), found.stages
        costs = [int(problem.spans[stage]) for stage in stages]
        costs += [int(links[a[0], b[0]]) for a, b in pairwise(stages)]
        if self.closes and len(stages) > 1:
            costs.append(int(problem.back[stages[-1][0], stages[0][0]]))
        return sum(costs) if self.closes else max(costs)


SUM = Measure(np.add, closes=True)
SLOWEST = Measure(np.maximum, closes=False)


def then(measure: Measure, base: Ticks, spans: Ticks) -> Ticks:
    """Least ticks by layers placed when one more stage comes after `base`: never more than NEVER, so that
    three of these and hops can be added before it is asked again."""
    least: Ticks = np.minimum(measure.join(base[:, None], spans).min(axis=0), NEVER)
    return least


def exact_work(problem: Problem, measure: Measure) -> float:
    """Seconds that `search` may take, roughly: so many products of so many layers."""
    states = prod(count + 1 for count in problem.counts)
    products = sum(states * count // (count + 1) for count in problem.counts)
    return products * len(_firsts(problem, measure)) * (12e-6 + 1.2e-9 * (problem.layers + 1) ** 2)


def is_small(problem: Problem, measures: Sequence[Measure]) -> bool:
    """Whether searches by all of `measures` are worth their time."""
    limit = EXACT_WORK_S["few" if sum(problem.counts) <= FEW_NODES else "many"]
    return sum(exact_work(problem, measure) for measure in measures) <= limit


def search(problem: Problem, measure: Measure) -> Found | None:
    """The least plan by `measure`, of equally good ones the one with fewest nodes; None where none fits."""
    best: tuple[int, int, tuple[int, ...], int] | None = None
    table: dict[tuple[int, ...], Ticks] = {}
    for firsts in _firsts(problem, measure):
        tried = _fill(problem, measure, firsts)
        for key in _ends(problem, measure, tried, firsts):
            if best is None or key < best:
                best, table = key, tried
    if best is None:
        return None
    _, _, negated, last = best
    return Found(_walk_back(problem, measure, table, tuple(-count for count in negated), last))


def _firsts(problem: Problem, measure: Measure) -> list[tuple[int, ...]]:
    """Classes that may begin, by run: each in a run of its own where the way back depends on it."""
    every = tuple(range(len(problem.counts)))
    uneven = measure.closes and any(len(set(row.tolist())) > 1 for row in problem.back)
    return [(one,) for one in every] if uneven else [every]


def _fill(problem: Problem, measure: Measure, firsts: Sequence[int]) -> dict[tuple[int, ...], Ticks]:
    """By nodes used of each class: [class of the last one, layers placed] -> least ticks."""
    shape = (len(problem.counts), problem.layers + 1)
    table: dict[tuple[int, ...], Ticks] = {}
    # In this order every state comes after those with one node less.
    for state in product(*(range(count + 1) for count in problem.counts)):
        values = np.full(shape, NEVER, np.int64)
        for last, count in enumerate(state):
            if count:
                base = _base(problem, measure, table, _without(state, last), last, firsts)
                if base is not None:
                    values[last] = then(measure, base, problem.spans[last])
        table[state] = values
    return table


def _base(
    problem: Problem,
    measure: Measure,
    table: dict[tuple[int, ...], Ticks],
    before: tuple[int, ...],
    last: int,
    firsts: Sequence[int],
) -> Ticks | None:
    """Least ticks by layers placed before a stage of class `last` begins; None where it cannot."""
    if any(before):
        base: Ticks = measure.join(table[before], measure.links(problem)[:, last, None]).min(axis=0)
        return base if base.min() < NEVER else None
    if last not in firsts:
        return None
    start = np.full(problem.layers + 1, NEVER, np.int64)
    start[0] = 0
    return start


def _without(state: tuple[int, ...], last: int) -> tuple[int, ...]:
    return (*state[:last], state[last] - 1, *state[last + 1 :])


def _ends(
    problem: Problem, measure: Measure, table: dict[tuple[int, ...], Ticks], firsts: Sequence[int]
) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """(ticks, nodes, the negated state, class of the last): the smallest of these is the best plan."""
    back = problem.back[:, firsts[0]]
    for state, values in table.items():
        nodes = sum(state)
        for last in np.flatnonzero(values[:, -1] < NEVER).tolist():
            closing = int(back[last]) if measure.closes and nodes > 1 else 0
            yield int(values[last, -1]) + closing, nodes, tuple(-count for count in state), last


def _walk_back(
    problem: Problem,
    measure: Measure,
    table: dict[tuple[int, ...], Ticks],
    state: tuple[int, ...],
    last: int,
) -> tuple[tuple[int, int, int], ...]:
    """The stages that led to all layers in `state`, found again from the values."""
    links = measure.links(problem)
    stages: list[tuple[int, int, int]] = []
    end = problem.layers
    while True:
        value, before = table[state][last, end], _without(state, last)
        if not any(before):
            stages.append((last, 0, end))
            return tuple(reversed(stages))
        ways = measure.join(table[before], links[:, last, None])
        here = measure.join(ways, problem.spans[last, :, end])
        previous, start = (int(index) for index in np.argwhere(here == value)[-1])
        stages.append((last, start, end))
        state, last, end = before, previous, start
