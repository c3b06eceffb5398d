"""The children of one block, in an order in which the one that a prompt shares most with is found at once."""

from bisect import bisect_left
from dataclasses import dataclass, field

from omlx.cache.block import TOKEN_BYTES
from omlx.ids import BlockId


@dataclass(slots=True)
class Family:
    """The children of one block, or of the root."""

    size: int = 0
    """All that are known."""
    ends: list[tuple[bytes, BlockId]] = field(default_factory=list)
    """Tokens and ids of those at which, or within which, a match may end, in the order of their bytes.

    That order is what makes a family of any size cheap: whoever shares most with a prompt stands next to the
    prompt's own place.
    """

    def insert(self, tokens: bytes, id: BlockId) -> None:
        self.ends.insert(bisect_left(self.ends, (tokens, id)), (tokens, id))

    def remove(self, tokens: bytes, id: BlockId) -> None:
        del self.ends[bisect_left(self.ends, (tokens, id))]

    def closest(self, tokens: bytes) -> tuple[BlockId, int] | None:
        """The child that shares most first tokens with these, and how many they are."""
        place = bisect_left(self.ends, (tokens,))
        beside = self.ends[max(0, place - 1) : place + 1]
        shared = [(id, _shared_tokens(child, tokens)) for child, id in beside]
        return max(shared, key=lambda found: found[1], default=None)

    def longest_within(self, tokens: bytes) -> tuple[BlockId, int] | None:
        """The longest child that these tokens begin with, and how many it has."""
        while True:
            # Whatever stands between a prefix of `tokens` and `tokens` begins with that prefix as well: so
            # the one before our place is it, or has it in what it shares with us.
            place = bisect_left(self.ends, (tokens + b"\0",))
            if not place:
                return None
            child, id = self.ends[place - 1]
            if tokens.startswith(child):
                return id, len(child) // TOKEN_BYTES
            tokens = tokens[: _shared_tokens(child, tokens) * TOKEN_BYTES]


def _shared_tokens(one: bytes, other: bytes) -> int:
    """How many first tokens of two packed runs are the same."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    left, right = memoryview(one).cast("I"), memoryview(other).cast("I")
    return next((place for place in range(most) if left[place] != right[place]), most)
