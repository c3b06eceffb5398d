"""In which order one stage gives up what it holds in one tier: leaves before roots, the least used first.

Pure, and without a clock: moments are seconds that the caller hands in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import log2

from omlx.ids import BlockId

HALF_LIFE_S = 600.0
"""After so long a use counts half as much."""
SLACK = 64
"""So many outdated places more than twice the blocks may stand in a queue before it is made anew."""


@dataclass(slots=True)
class Worth:
    """How long a block deserves to stay. Its owner is the index."""

    parent: BlockId
    order: int
    """Counts the blocks as they are added; decides between equal scores."""
    score: float
    """Seconds, on the caller's clock: H * log2(sum of 2 ** (t / H)) over the moments t of all uses, with H
    the half-life, the block's making being the first.

    That is the moment of a single use that would weigh as much as all of them. Twice as many uses in a short
    time lengthen life by one half-life; as all weights fade at one rate, two blocks never change places while
    neither is used, so a heap may keep them, and old fame ends by itself.
    """
    pins: int = 0

    def use(self, now: float) -> None:
        gap = abs(now - self.score)
        self.score = max(now, self.score) + HALF_LIFE_S * log2(1 + 2 ** (-gap / HALF_LIFE_S))


class Ledger:
    """What one stage holds in one tier, in bytes, and which of it goes first.

    The queue holds a place for every leaf that is not pinned, and outdated ones beside them: a score only
    grows, so a place comes up too early at worst, and is put right then. All is O(log n), amortised.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._held: dict[BlockId, tuple[Worth, int]] = {}
        self._children: dict[BlockId, int] = {}
        """How many children of a block are held here, be the block itself held or not."""
        self._queue: list[tuple[float, int, BlockId]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._held)

    def __contains__(self, id: BlockId) -> bool:
        return id in self._held

    def hold(self, id: BlockId, worth: Worth, size: int) -> None:
        """It takes `size` bytes from now on; 0: it is not held any more."""
        before = self._held.pop(id, None)
        self.used_bytes += size - (before[1] if before else 0)
        if size:
            self._held[id] = worth, size
        if size and not before:
            self._children[worth.parent] = self._children.get(worth.parent, 0) + 1
            self.offer(id)
        elif before and not size:
            self._children[worth.parent] -= 1
            if not self._children[worth.parent]:
                del self._children[worth.parent]
                self.offer(worth.parent)

    def clear(self) -> list[BlockId]:
        """What was held until now."""
        ids = list(self._held)
        self._held.clear()
        self._children.clear()
        self._queue.clear()
        self.used_bytes = 0
        return ids

    def offer(self, id: BlockId) -> None:
        """Give it a place in the queue if it may go: after it lost its last child, or its last pin."""
        if not self._may_go(id):
            return
        if len(self._queue) > SLACK + 2 * len(self._held):
            self._queue = [self._place(leaf) for leaf in self._held if self._may_go(leaf)]
            heapify(self._queue)
        else:
            heappush(self._queue, self._place(id))

    def victims(self, size: int) -> list[BlockId]:
        """Which to give up, in this order, to have `size` bytes back; all that may go where it is not enough.

        A block whose children all go is a leaf as well. Only chooses: what is chosen keeps its place.
        """
        chosen: dict[BlockId, None] = {}
        staying: dict[BlockId, int] = {}
        freed = 0
        while freed < size and self._queue:
            score, _, id = heappop(self._queue)
            if id in chosen or not self._may_go(id, staying):
                continue
            worth, bytes = self._held[id]
            if score < worth.score:
                heappush(self._queue, self._place(id))
                continue
            chosen[id] = None
            freed += bytes
            parent = worth.parent
            staying[parent] = staying.get(parent, self._children[parent]) - 1
            if self._may_go(parent, staying):
                heappush(self._queue, self._place(parent))
        for id in chosen:
            self.offer(id)
        return list(chosen)

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not agree. For tests."""
        children: dict[BlockId, int] = {}
        for worth, size in self._held.values():
            assert size > 0
            children[worth.parent] = children.get(worth.parent, 0) + 1
        assert children == self._children
        assert self.used_bytes == sum(size for _, size in self._held.values())
        places: dict[BlockId, float] = {}
        for score, _, id in self._queue:
            places[id] = min(score, places.get(id, score))
        for id, (worth, _) in self._held.items():
            assert not self._may_go(id) or places[id] <= worth.score

    def _place(self, id: BlockId) -> tuple[float, int, BlockId]:
        worth, _ = self._held[id]
        return worth.score, worth.order, id

    def _may_go(self, id: BlockId, staying: dict[BlockId, int] | None = None) -> bool:
        """staying: children, other than `_children` says, of some blocks."""
        if id not in self._held or self._held[id][0].pins:
            return False
        held = self._children.get(id, 0)
        return not (staying.get(id, held) if staying else held)
