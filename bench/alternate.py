"""Runs what is compared in turn, the order reversed every round, so that drift hits all alike."""

import statistics
from collections.abc import Awaitable, Callable, Mapping

Run = Callable[[], Awaitable[float]]
"""One measurement; what it returns is a time or a rate."""


async def alternate(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Each run once a round, after one round that is not counted: caches fill, code is compiled."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        order = list(runs)
        if round_number % 2:
            order.reverse()
        for name in order:
            value = await runs[name]()
            if round_number > 0:
                found[name].append(value)
    return found


def ratio(above: list[float], below: list[float]) -> float:
    """The median of the rounds' own ratios: a slow moment of the machine hits both sides of a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
