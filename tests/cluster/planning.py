"""Large problems for the planner, for tests and the bench."""

import numpy as np

from omlx.cluster.span_search import NEVER, Problem


def large(shape: str) -> Problem:
    """64 nodes, 128 layers."""
    rng = np.random.default_rng(7)
    kinds = {"alike": 1, "two classes": 2, "seven classes": 7, "all different": 64}[shape]
    counts = [64 // kinds + (1 if index < 64 % kinds else 0) for index in range(kinds)]
    work = np.concatenate([[0], np.cumsum(100 + 50 * (np.arange(128) % 4))])
    spans = np.empty((kinds, 129, 129), np.int64)
    for index in range(kinds):
        slowness, room = int(rng.integers(2000, 9000)), int(rng.integers(300, 3000))
        size = work[None, :] - work[:, None]
        spans[index] = np.where(size <= room, size * slowness, NEVER)
        spans[index][:, -1] += 300 * slowness
    spans[:, np.tri(129, dtype=bool)] = NEVER
    spans = np.minimum(spans, NEVER)
    links = np.full((kinds, kinds), 300_000, np.int64)
    return Problem(tuple(counts), spans, links, links // 10, links)
