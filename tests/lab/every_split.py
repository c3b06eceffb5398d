"""All ways to lay layers over hosts, and what each takes by what was measured: tried, without the planner."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, pairwise

PLANNED = 8
"""A plan for throughput counts with so many sequences."""

Stages = tuple[tuple[str, int], ...]
"""Hosts by name with how many layers they run, in pipeline order."""
Paces = Mapping[str, Mapping[int, float]]
"""By host, and by how many layers it held: how long a layer took there. The quickest host's takes 1."""
Costs = Mapping[str, tuple[float, float]]
"""By host, of one layer: seconds of a step, and of each row of it."""


def layers_of(stages: Stages, head: float) -> list[float]:
    """What each stage computes, in layers: the last one has the head as well."""
    last = len(stages) - 1
    return [layers + (head if number == last else 0.0) for number, (_, layers) in enumerate(stages)]


def slowest(stages: Stages, by_host: Paces, head: float) -> float:
    """What its slowest stage takes. A host is as fast as it was with the most similar number of layers: a
    quota is felt less by a host that has little to do."""
    times = []
    for (host, layers), work in zip(stages, layers_of(stages, head), strict=True):
        nearest = min(by_host[host], key=lambda held: abs(held - layers))
        times.append(work * by_host[host][nearest])
    return max(times)


def tokens_per_s(stages: Stages, costs: Costs, head: float) -> float:
    """Of PLANNED sequences in the best number of groups: each group's step reads all weights, so one stage
    more, which takes one group more, need not pay even where it makes the slowest stage faster."""
    rates = []
    for groups in range(1, min(PLANNED, len(stages) + 1) + 1):
        rows = -(-PLANNED // groups)
        times = [
            work * (costs[host][0] + rows * costs[host][1])
            for (host, _), work in zip(stages, layers_of(stages, head), strict=True)
        ]
        rates.append(PLANNED / max(groups * max(times), sum(times)))
    return max(rates)


def splits(order: Sequence[str], layers: int) -> Iterator[Stages]:
    """All contiguous ones of hosts in this order; a host may get nothing."""
    for cuts in combinations_with_replacement(range(layers + 1), len(order) - 1):
        sizes = [end - start for start, end in pairwise((0, *cuts, layers))]
        yield tuple((host, size) for host, size in zip(order, sizes, strict=True) if size)
