"""How much of a model may be kept, and what became of it in numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omlx.ids import SeqId
from omlx.node.step import Cut, Slice

LEAST_TOKENS = 16
"""A shorter rest or hit is not worth a message."""


@dataclass(slots=True)
class Counters:
    """Since the model was loaded; tokens are prompt tokens."""

    lookups: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    restored_blocks: int = 0
    fetched_blocks: int = 0
    spilled_blocks: int = 0
    evicted_blocks: int = 0
    dropped_writes: int = 0
    given_up_fetches: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """What may be held of one model."""

    hot_bytes: tuple[int, ...]
    """The budget of each stage."""
    cold: bool
    """Whether there is a cold tier."""
    block_tokens: int
    """0: nothing is kept."""
    snapshot_tokens: int
    """Recurrent states are kept where a multiple of so many tokens ends, and at the end of a prompt."""
    trimmable: bool = True
    recurrent: bool = False

    @property
    def step_tokens(self) -> int:
        """Restore points that can be counted on lie so far apart; 0: there are none."""
        return self.snapshot_tokens if self.block_tokens and self.recurrent else self.block_tokens

    def cuts(self, slices: Iterable[Slice], prompt_tokens: Callable[[SeqId], int]) -> tuple[Cut, ...]:
        """What has to be set aside right after these slices."""
        if self.trimmable or not self.block_tokens:
            return ()
        size, stride = self.block_tokens, self.snapshot_tokens
        cuts = []
        for piece in slices:
            prompt = prompt_tokens(piece.seq)
            ends = [*range((piece.start // size + 1) * size, piece.end + 1, size)]
            if piece.end == prompt and piece.end % size >= LEAST_TOKENS:
                ends.append(piece.end)
            for end in ends:
                at_end = end == piece.end and (end % stride == 0 or end == prompt)
                cuts.append(Cut(piece.seq, (end - 1) // size * size, end, at_end))
        return tuple(cuts)

    def chunk_end(self, start: int, end: int) -> int:
        """Where a chunk has to end at the latest, so that a state can be kept."""
        if not self.recurrent:
            return end
        return min(end, (start // self.snapshot_tokens + 1) * self.snapshot_tokens)
