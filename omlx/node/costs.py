"""What a plan costs a stage, in seconds of its device: fitted to the plans that it has carried out.

A plan that only decodes takes a + b * rows: a for reading the weights, b for each row's own arithmetic and
keys. Prompt chunks add a term for each token and one for each pair of a token and a position before it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from omlx.node.step import Work

FORGET = 0.98
"""A sample's weight after the next one: the last fifty or so count."""
RIDGE = 0.0003
"""Pulls what the samples leave open towards zero: with one batch size, all of a step is `fixed`."""
OUTLIER = 4.0
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

    def decode(self, rows: int) -> float:
        return self.fixed + self.row * rows if rows else 0.0

    def seconds(self, work: Work) -> float:
        if not work.tokens:
            return self.decode(work.rows)
        rows = self.row * work.rows if self.mixes else self.decode(work.rows)
        return rows + self.chunk + self.chunk_part(work.tokens, work.pairs)

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


class Fit:
    """Least squares over samples that are forgotten exponentially; no coefficient is below zero."""

    def __init__(self, terms: int) -> None:
        self._squares = [[0.0] * terms for _ in range(terms)]
        self._products = [0.0] * terms
        self.samples = 0

    def add(self, x: Sequence[float], y: float, weight: float = 1.0) -> None:
        self.samples += 1
        for i, a in enumerate(x):
            self._products[i] = self._products[i] * FORGET + weight * a * y
            for j, b in enumerate(x):
                self._squares[i][j] = self._squares[i][j] * FORGET + weight * a * b

    def solve(self) -> list[float]:
        """Terms that come out negative are left out, the most negative first, and the others fitted anew."""
        kept = [i for i in range(len(self._products)) if self._squares[i][i] > 0]
        while kept:
            found = self._solve(kept)
            worst = min(range(len(kept)), key=found.__getitem__)
            if found[worst] >= 0:
                break
            del kept[worst]
        else:
            found = []
        whole = [0.0] * len(self._products)
        for i, value in zip(kept, found, strict=True):
            whole[i] = value
        return whole

    def _solve(self, kept: list[int]) -> list[float]:
        """Gauss-Jordan on the normal equations, scaled to a unit diagonal. The first term bears no ridge."""
        scale = [sqrt(self._squares[i][i]) for i in kept]
        rows = [
            [
                self._squares[i][j] / (scale[a] * scale[b]) + (RIDGE if i == j and i else 0.0)
                for b, j in enumerate(kept)
            ]
            + [self._products[i] / scale[a]]
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
    _decode: Fit = field(default_factory=lambda: Fit(2))
    _chunks: Fit = field(default_factory=lambda: Fit(3))
    _rows: Counter[int] = field(default_factory=Counter)
    _cost: StageCost | None = None
    _fresh: int = 0
    """Samples since it was fitted."""

    def add(self, work: Work, seconds: float) -> None:
        own = self.cost()
        if own is not None and (expected := own.seconds(work)) > 0:
            seconds = min(seconds, OUTLIER * expected)
        if work.tokens:
            if self._decode.samples and not self._chunks.samples:
                # A chunk of one token is a row: this tells the fixed part from the tokens'.
                self._chunks.add((1.0, 1.0, 0.0), sum(self._decode.solve()))
            rows = 0.0 if own is None else own.row * work.rows if self.mixes else own.decode(work.rows)
            self._chunks.add((1.0, work.tokens, work.pairs), max(0.0, seconds - rows))
        elif work.rows:
            self._decode.add((1.0, work.rows), seconds)
            self._rows[work.rows] += 1
        self._fresh += 1

    @property
    def known_rows(self) -> frozenset[int]:
        """The batch sizes that have been measured."""
        return frozenset(rows for rows, count in self._rows.items() if count >= TRUSTED)

    def cost(self) -> StageCost | None:
        """None before anything was measured."""
        samples = self._decode.samples + self._chunks.samples
        if samples and (self._cost is None or self._fresh >= min(FIT_EVERY, samples // 4)):
            self._fresh = 0
            fixed, row = self._decode.solve()
            chunk, token, pair = self._chunks.solve()
            if not self._decode.samples:
                fixed = chunk
            if not self._chunks.samples:
                chunk, token = fixed, (fixed + row) * UNKNOWN_TOKEN
            self._cost = StageCost(fixed, row, chunk, token, pair, self.mixes)
        return self._cost
