"""Which sequences' caches lie together: a stage's running state, regrouped as plans ask.

Rows of like length that decode together share one batch cache, padded to the longest; a row alone has the
plain cache of its family. Both are mlx-lm's own classes. Every stage sees the same plans, so the rows of all
stages lie alike.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from omlx.errors import OutOfStep
from omlx.ids import SeqId
from omlx.node import mixing
from omlx.node.slicing import Cut
from omlx.node.step import Slice

SHORT_TOKENS = 1024
LONG_TOKENS = 4096
"""Padding a row by a thousand positions costs about what a block more does (docs/LOG.md). Rows shorter than
the first share a batch whatever their lengths, up to the second those within a factor of two, beyond it those
within so many tokens."""


def can_share(caches: Sequence[Any]) -> bool:
    """Whether rows with such caches can lie in one batch; some of mlx-lm's kinds cannot be merged."""
    return all(
        can_share(cache.caches) if isinstance(cache, CacheList) else getattr(cache, "merge", None) is not None
        for cache in caches
    )


def like_lengths(slices: Sequence[Slice], shares: bool) -> list[tuple[Slice, ...]]:
    """Which slices share caches in one plan: chunks each for themselves, single tokens by length, or each
    for itself where no rows can share."""
    blocks: dict[tuple[int, int], list[Slice]] = {}
    for place, piece in enumerate(slices):
        alone = not shares or not piece.sample or len(piece.tokens) > 1
        blocks.setdefault((0, place) if alone else (1, _length_class(piece.start)), []).append(piece)
    return [tuple(block) for block in blocks.values()]


def _length_class(tokens: int) -> int:
    if tokens < LONG_TOKENS:
        return max(tokens, SHORT_TOKENS - 1).bit_length()
    return LONG_TOKENS.bit_length() + tokens // LONG_TOKENS


@dataclass(frozen=True, slots=True)
class Block(mixing.Block):
    """One whose rows are slices of a plan."""

    slices: tuple[Slice, ...]


@dataclass(slots=True)
class Batch:
    """Rows in order, and one cache per layer that holds them all."""

    rows: list[SeqId]
    caches: list[Any]


@dataclass(slots=True)
class Rows:
    """Owned by the stage's compute thread."""

    cut: Cut
    _shares: bool = field(init=False)
    """By the caches of the whole model: all stages must say the same, for they must lay rows alike."""
    _batch_of: dict[SeqId, Batch] = field(default_factory=dict)
    _tokens: dict[SeqId, int] = field(default_factory=dict)
    """How many of a row's tokens its caches have, those of forwards that are not computed yet included."""

    def __post_init__(self) -> None:
        self._shares = can_share(self.cut.prototypes)

    def clear(self) -> None:
        self._batch_of.clear()
        self._tokens.clear()

    def admit(self, seq: SeqId) -> None:
        self.put(seq, self.cut.make_caches(), 0)

    def put(self, seq: SeqId, caches: list[Any], tokens: int) -> None:
        """A row alone, with what `caches` have of it."""
        self._batch_of[seq] = Batch([seq], caches)
        self._tokens[seq] = tokens

    def where(self, seq: SeqId) -> tuple[list[Any], int, int]:
        """The caches that a row lies in, its number there, and how many tokens they have of it.

        Raises OutOfStep for an unknown sequence.
        """
        batch = self._find(seq)
        return batch.caches, batch.rows.index(seq), self._tokens[seq]

    def drop(self, seqs: Iterable[SeqId]) -> None:
        """Forget rows, all at once: who leaves costs those that shared a batch with it a copy of theirs.

        Raises OutOfStep for an unknown sequence.
        """
        leaving: dict[int, tuple[Batch, set[SeqId]]] = {}
        for seq in seqs:
            batch = self._find(seq)
            leaving.setdefault(id(batch), (batch, set()))[1].add(seq)
        for batch, gone in leaving.values():
            self._keep(batch, [i for i, row in enumerate(batch.rows) if row not in gone])
            for seq in gone:
                del self._batch_of[seq], self._tokens[seq]

    def blocks(self, slices: Sequence[Slice]) -> list[Block]:
        """The slices of one plan as they lie together. Raises OutOfStep for an unknown sequence."""
        blocks = [
            Block(len(own), own[0].end - own[0].start, self.together([piece.seq for piece in own]), own)
            for own in like_lengths(slices, self._shares)
        ]
        self._tokens.update((piece.seq, piece.end) for piece in slices)
        return blocks

    def together(self, wanted: Sequence[SeqId]) -> list[Any]:
        """The caches, one per layer, whose rows are exactly `wanted`, in this order.

        Costs nothing while the membership stays the same. Raises OutOfStep for an unknown sequence.
        """
        rows = list(wanted)
        if self._find(rows[0]).rows == rows:
            return self._batch_of[rows[0]].caches
        runs = [list(run) for _, run in groupby(rows, key=lambda seq: id(self._find(seq)))]
        joined = _join([self._take(run) for run in runs])
        for seq in rows:
            self._batch_of[seq] = joined
        return joined.caches

    def _find(self, seq: SeqId) -> Batch:
        try:
            return self._batch_of[seq]
        except KeyError:
            raise OutOfStep(f"the plan names sequence {seq}, which is not here") from None

    def _take(self, seqs: list[SeqId]) -> Batch:
        """Rows of one batch in a batch of their own, taken out of what they shared."""
        batch = self._find(seqs[0])
        if batch.rows == seqs:
            return batch
        places = [batch.rows.index(seq) for seq in seqs]
        taken = Batch(seqs, [_pick(cache, places) for cache in batch.caches])
        for seq in seqs:
            self._batch_of[seq] = taken
        self._keep(batch, [i for i in range(len(batch.rows)) if i not in places])
        return taken

    def _keep(self, batch: Batch, places: list[int]) -> None:
        """Cut a batch down to the rows at `places`. A last row goes back to its family's plain cache,
        which is faster and computes bit for bit what it would alone."""
        batch.rows = [batch.rows[i] for i in places]
        batch.caches = [_pick(cache, places) for cache in batch.caches] if places else []


def _pick(cache: Any, places: list[int]) -> Any:
    """The rows of one layer's batch cache at `places`, as a cache of their own."""
    if len(places) == 1:
        return cache.extract(places[0])
    picked = copy(cache)
    if isinstance(cache, CacheList):
        picked.caches = tuple(_pick(inner, places) for inner in cache.caches)
    else:
        picked.filter(mx.array(places))  # every kind makes new arrays
    return picked


def _join(parts: list[Batch]) -> Batch:
    """One batch of all their rows in order; the parts are used up."""
    if len(parts) == 1:
        return parts[0]
    shared: list[list[Any]] = []
    for single, run in groupby(parts, key=lambda part: len(part.rows) == 1):
        layers = zip(*(part.caches for part in run), strict=True)
        if single:
            shared.append([caches[0].merge(list(caches)) for caches in layers])
        else:
            shared += map(list, zip(*layers, strict=True))
    first, *others = shared
    for other in others:
        for own, more in zip(first, other, strict=True):
            own.extend(more)
    return Batch([seq for part in parts for seq in part.rows], first)
