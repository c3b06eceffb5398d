"""What a plan costs a stage, in seconds of its device: fitted to the plans that it has carried out.

A plan that only decodes takes a + b * rows: a for reading the weights, b for each row's own arithmetic and
keys. Prompt chunks add a term for each token and one for each pair of a token and a position before it.
"""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Generic, TypeVar

from omlx.node.step import Work

K = TypeVar("K", bound=Hashable)
FOLLOW = 0.05
"""How far a kind's mean goes towards its next sample, once it has twenty."""
FADE = 0.99
"""A kind's weight after each sample of another kind, down to that of one sample: what was once learnt of
other batch sizes stays, or else the line through the only one would be anyone's guess."""
MOST_WEIGHT = 50.0
LEAST_S = 1e-5
"""Shorter times are not told apart."""
RIDGE = 0.0003
"""Pulls what the samples leave open towards zero: with one batch size, all of a step is `fixed`."""
OUTLIER = 2.0
"""A sample is cut to so many times what was expected: another program had the machine for a moment."""
TRUSTED = 4
"""So many samples make a batch size known."""
FIT_EVERY = 8
"""Samples from one fit to the next, once there are some."""
UNKNOWN_TOKEN = 1 / 16
"""A chunk's token, as part of a decode step, until a chunk was measured."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds; all of them at least zero."""

    fixed: float
    """a: a forward of decoding rows, before its rows."""
    row: float
    """b: each row of it."""
    chunk: float
    """A forward of prompt chunks, before its tokens."""
    token: float
    pair: float
    """Each pair of a chunk's token and a position before it, which attention looks at."""
    mixes: bool
    """Whether chunks and decoding rows share one forward."""
    steps: tuple[tuple[int, float], ...] = ()
    """(rows, seconds) of decode steps as measured, by rows. A step is no line everywhere: BLAS and GPU
    kernels change at certain batch sizes. Beyond these the line goes on from the nearest."""
    beside: float = 0.0
    """What decoding rows add to a forward of chunks, besides `row`: attention computes them apart."""

    def decode(self, rows: int) -> float:
        if not rows:
            return 0.0
        if not self.steps:
            return self.fixed + self.row * rows
        place = bisect_left(self.steps, (rows, 0.0))
        if place == len(self.steps):
            nearest, seconds = self.steps[-1]
            return seconds + self.row * (rows - nearest)
        above, seconds = self.steps[place]
        if above == rows or not place:
            return max(0.0, seconds - self.row * (above - rows))
        below, less = self.steps[place - 1]
        return less + (seconds - less) * (rows - below) / (above - below)

    def seconds(self, work: Work) -> float:
        if not work.tokens:
            return self.decode(work.rows)
        return self.rows_beside(work.rows) + self.chunk + self.chunk_part(work.tokens, work.pairs)

    def rows_beside(self, rows: int) -> float:
        """What decoding rows add to a plan with chunks."""
        if not self.mixes:
            return self.decode(rows)
        return self.row * rows + (self.beside if rows else 0.0)

    def chunk_part(self, tokens: int, pairs: float) -> float:
        """What chunks add to a forward."""
        return self.token * tokens + self.pair * pairs

    def tokens_within(self, seconds: float, prefix: int) -> float:
        """How many tokens behind `prefix` add so many seconds to a forward.

        The positive root of pair/2 * n^2 + (token + pair * prefix) * n = seconds.
        """
        linear = self.token + self.pair * prefix
        if seconds <= 0:
            return 0.0
        if self.pair * seconds < 1e-9 * linear * linear:
            return seconds / linear
        return (sqrt(linear * linear + 2 * self.pair * seconds) - linear) / self.pair if self.pair else inf


@dataclass(slots=True)
class Kind:
    """Samples that are alike: how many, their means, and when the last one came."""

    x: tuple[float, ...]
    y: float
    count: int = 1
    last: int = 0


class Fit(Generic[K]):
    """Least squares of relative errors over the means of kinds of samples; no coefficient is below zero.

    Relative, or else chunks of half a second would say what those of fifty milliseconds take.
    """

    def __init__(self, terms: int) -> None:
        self._terms = terms
        self._kinds: dict[K, Kind] = {}
        self.samples = 0

    def add(self, kind: K, x: tuple[float, ...], y: float) -> None:
        self.samples += 1
        known = self._kinds.setdefault(kind, Kind(x, y, 0))
        known.count += 1
        known.last = self.samples
        step = max(FOLLOW, 1 / known.count)
        known.x = tuple(mean + step * (value - mean) for mean, value in zip(known.x, x, strict=True))
        known.y += step * (y - known.y)

    def solve(self, prior: tuple[tuple[float, ...], float] | None = None) -> list[float]:
        """Terms that come out negative are left out, the most negative first, and the others fitted anew.

        prior: (x, y) of one sample more.
        """
        squares = [[0.0] * self._terms for _ in range(self._terms)]
        products = [0.0] * self._terms
        found = [(kind.x, kind.y, self._weight(kind)) for kind in self._kinds.values()]
        for x, y, count in [*found, (*prior, 1.0)] if prior is not None else found:
            weight = count / max(y, LEAST_S) ** 2
            for i, a in enumerate(x):
                products[i] += weight * a * y
                for j, b in enumerate(x):
                    squares[i][j] += weight * a * b
        return _solve(squares, products)

    def means(self) -> list[tuple[K, float]]:
        """Of each kind that is trusted."""
        return [(kind, known.y) for kind, known in self._kinds.items() if known.count >= TRUSTED]

    def _weight(self, kind: Kind) -> float:
        faded = min(kind.count, MOST_WEIGHT) * FADE ** (self.samples - kind.last)
        return max(1.0, faded)


def _solve(squares: list[list[float]], products: list[float]) -> list[float]:
    kept = [i for i in range(len(products)) if squares[i][i] > 0]
    found: list[float] = []
    while kept:
        found = _gauss(squares, products, kept)
        worst = min(range(len(kept)), key=found.__getitem__)
        if found[worst] >= 0:
            break
        del kept[worst]
        found = []
    whole = [0.0] * len(products)
    for i, value in zip(kept, found, strict=True):
        whole[i] = value
    return whole


def _gauss(squares: list[list[float]], products: list[float], kept: list[int]) -> list[float]:
    """Gauss-Jordan on the normal equations, scaled to a unit diagonal. The first term bears no ridge."""
    scale = [sqrt(squares[i][i]) for i in kept]
    rows = [
        [squares[i][j] / (scale[a] * scale[b]) + (RIDGE if i == j and i else 0.0) for b, j in enumerate(kept)]
        + [products[i] / scale[a]]
        for a, i in enumerate(kept)
    ]
    for p, pivot in enumerate(rows):
        pivot[:] = [value / pivot[p] for value in pivot]
        for row in rows:
            if row is not pivot:
                factor = row[p]
                row[:] = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    return [row[-1] / scale[a] for a, row in enumerate(rows)]


@dataclass(slots=True)
class StageMeter:
    """One stage's samples. One owner: the engine."""

    mixes: bool
    _decode: Fit[int] = field(default_factory=lambda: Fit(2))
    """By rows."""
    _chunks: Fit[tuple[int, int, bool]] = field(default_factory=lambda: Fit(4))
    """By tokens and prefix, each within a factor of two, and whether rows share the forward."""
    _cost: StageCost | None = None
    _fresh: int = 0
    """Samples since it was fitted."""

    def add(self, work: Work, seconds: float) -> None:
        own = self.cost()
        if own is not None and (expected := own.seconds(work)) > 0:
            seconds = min(seconds, OUTLIER * expected)
        if work.tokens:
            rows = own.rows_beside(work.rows) - own.beside if own is not None and work.rows else 0.0
            prefix = int(work.pairs / work.tokens)
            shared = self.mixes and work.rows > 0
            kind = work.tokens.bit_length(), prefix.bit_length(), shared
            x = (1.0, work.tokens, work.pairs, float(shared))
            self._chunks.add(kind, x, max(0.0, seconds - rows))
        elif work.rows:
            self._decode.add(work.rows, (1.0, work.rows), seconds)
        self._fresh += 1

    @property
    def known_rows(self) -> frozenset[int]:
        """The batch sizes that have been measured."""
        return frozenset(rows for rows, _ in self._decode.means())

    def cost(self) -> StageCost | None:
        """None before anything was measured."""
        samples = self._decode.samples + self._chunks.samples
        if samples and (self._cost is None or self._fresh >= min(FIT_EVERY, samples // 4)):
            self._fresh = 0
            fixed, row = self._decode.solve()
            # A chunk of one token is a row: this tells a chunk's fixed part from its tokens'.
            one_token = (1.0, 1.0, 0.0, 0.0), fixed + row
            chunk, token, pair, beside = self._chunks.solve(one_token if fixed else None)
            if not self._decode.samples:
                fixed = chunk
            if not self._chunks.samples:
                chunk, token = fixed, (fixed + row) * UNKNOWN_TOKEN
            steps = tuple(sorted(self._decode.means()))
            self._cost = StageCost(fixed, row, chunk, token, pair, self.mixes, steps, beside)
        return self._cost
