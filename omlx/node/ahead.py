"""Tokens that the head does not know yet: drawn by the last stage, embedded by the first.

On one stage they are the same process and the token never leaves the device. On several the last stage
sends each draw to the first, which takes them in the order of the plans.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from omlx.ids import PlanId, SeqId
from omlx.node.step import Slice
from omlx.node.wire import Tag

Take = Callable[[Tag], mx.array]
"""Waits for the draw with this tag, [B, 1, 1], from the last stage."""


@dataclass(slots=True)
class Ahead:
    """The first stage's memory of the latest draws."""

    _latest: dict[SeqId, tuple[mx.array, int]] = field(default_factory=dict)
    """The draw [B] and the row: to cut each draw into its rows would cost every step."""
    _column: tuple[tuple[SeqId, ...], mx.array] | None = None
    """The latest draw as a whole: asked for again as it is in nearly every step."""
    _due: deque[tuple[Tag, tuple[SeqId, ...]]] = field(default_factory=deque)

    def clear(self) -> None:
        self._latest.clear()
        self._due.clear()
        self._column = None

    def drop(self, seq: SeqId) -> None:
        self._latest.pop(seq, None)

    def note(self, seqs: tuple[SeqId, ...], tokens: mx.array) -> None:
        """tokens: [B], perhaps not computed yet."""
        self._column = seqs, tokens
        self._latest.update((seq, (tokens, row)) for row, seq in enumerate(seqs))

    def expect(self, tag: Tag, seqs: tuple[SeqId, ...]) -> None:
        """The last stage will send this draw."""
        self._due.append((tag, seqs))

    def clear_away(self, committed: PlanId, take: Take) -> None:
        """Take what was sent for plans that are over and that nobody asked for: nothing piles up."""
        while self._due and self._due[0][0].plan < committed:
            self._receive(take)

    def tokens(self, slices: Sequence[Slice], take: Take) -> mx.array:
        """[B, L] int32 for slices of one length. Raises StageLost when a draw does not come."""
        if all(piece.tokens for piece in slices):
            return mx.array([piece.tokens for piece in slices])
        unknown = {piece.seq for piece in slices if not piece.tokens}
        while any(unknown.intersection(seqs) for _, seqs in self._due):
            self._receive(take)
        if self._column is not None and self._column[0] == tuple(piece.seq for piece in slices):
            return self._column[1][:, None]
        return mx.stack([self._token(piece) for piece in slices])[:, None]

    def _token(self, piece: Slice) -> mx.array:
        if piece.tokens:
            return mx.array(piece.tokens[0])
        tokens, row = self._latest[piece.seq]
        return tokens[row]

    def _receive(self, take: Take) -> None:
        tag, seqs = self._due.popleft()
        self.note(seqs, take(tag)[:, 0, 0])
