"""Which sequences' caches lie together: a stage's running state, regrouped as plans ask.

Rows of like length that decode together share one batch cache, padded to the longest; a row alone has the
plain cache of its family. Both are mlx-lm's own classes. Every stage sees the same plans, so the rows of all
stages lie alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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

    def drop(self, seq: SeqId) -> None:
        """Forget a row; those that shared its batch stay as they are."""
        batch = self._find(seq)
        del self._batch_of[seq], self._tokens[seq]
        self._keep(batch, [i for i, row in enumerate(batch.rows) if row != seq])

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
        batch = self._find(rows[0])
        if batch.rows == rows:
            return batch.caches
        if rows[: len(batch.rows)] == batch.rows:
            newcomers = rows[len(batch.rows) :]
        else:
            batch, newcomers = self._alone(rows[0]), rows[1:]
        joined = self._join(batch, [self._alone(seq) for seq in newcomers]) if newcomers else batch
        for seq in rows:
            self._batch_of[seq] = joined
        return joined.caches

    def _find(self, seq: SeqId) -> Batch:
        try:
            return self._batch_of[seq]
        except KeyError:
            raise OutOfStep(f"the plan names sequence {seq}, which is not here") from None

    def _alone(self, seq: SeqId) -> Batch:
        """The row in a batch of its own, taken out of the one it shared."""
        batch = self._find(seq)
        if len(batch.rows) == 1:
            return batch
        place = batch.rows.index(seq)
        single = Batch([seq], [cache.extract(place) for cache in batch.caches])
        self._batch_of[seq] = single
        self._keep(batch, [i for i in range(len(batch.rows)) if i != place])
        return single

    def _keep(self, batch: Batch, places: list[int]) -> None:
        """Cut a batch down to the rows at `places`. A last row goes back to its family's plain cache,
        which is faster and computes bit for bit what it would alone."""
        batch.rows = [batch.rows[i] for i in places]
        if len(places) == 1:
            batch.caches = [cache.extract(places[0]) for cache in batch.caches]
        elif places:
            index = mx.array(places)
            for cache in batch.caches:
                cache.filter(index)
        else:
            batch.caches = []

    @staticmethod
    def _join(batch: Batch, others: list[Batch]) -> Batch:
        rows = batch.rows + [other.rows[0] for other in others]
        singles = zip(*(other.caches for other in others), strict=True)
        if len(batch.rows) == 1:
            caches = [own.merge([own, *more]) for own, more in zip(batch.caches, singles, strict=True)]
            return Batch(rows, caches)
        for own, more in zip(batch.caches, singles, strict=True):
            own.extend(more[0].merge(list(more)))
        batch.rows = rows
        return batch
