"""Runs what is compared in turn, the order reversed every round, so that drift hits all alike."""

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping

Run = Callable[[], Awaitable[float]]
"""One measurement; what it returns is a time or a rate."""


WITHIN_S = 120.0
"""No round begins later: on a busy machine a bench has fewer rounds instead of more minutes."""


async def alternate(
    runs: Mapping[str, Run], rounds: int, within_s: float = WITHIN_S
) -> dict[str, list[float]]:
    """Each run once a round, after one round that is not counted: caches fill, code is compiled.

    At least one counted round, at most `rounds`; every name has as many values as the others.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    for round_number in range(rounds + 1):
        if round_number > 1 and time.perf_counter() - started > within_s:
            break
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
