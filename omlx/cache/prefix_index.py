"""What the head knows of all blocks: which stage holds them where, and how far a prompt is known.

Pure, and without a clock: moments are seconds that the caller hands in. Stages hold their parts of a block on
their own; a block is usable when every stage holds its part in some tier.
"""

from dataclasses import dataclass, field
from enum import Enum

from omlx.cache.block import TOKEN_BYTES, name
from omlx.cache.family import Family
from omlx.cache.recency import Ledger, Worth
from omlx.ids import BlockId

LEAST_PART = 16
"""A block is used in part for so many tokens at least; fewer are computed sooner than laid back."""


class Tier(Enum):
    HOT = 0
    """A stage's RAM: may be laid back at once."""
    COLD = 1
    """Its SSD: must be fetched first."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a block is, wherever it is held."""

    id: BlockId
    parent: BlockId
    tokens: bytes
    """Packed; fewer than a full block's only in a leaf."""
    start: int
    """Tokens of the sequence before it."""


@dataclass(frozen=True, slots=True)
class Match:
    """The known part of a prompt."""

    blocks: tuple[BlockId, ...]
    """In order. The last one may reach beyond `tokens`; it is used in part then."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Figures for stats; the tuples have one number for each stage."""

    blocks: int
    pinned: int
    hot_blocks: tuple[int, ...]
    hot_bytes: tuple[int, ...]
    cold_blocks: tuple[int, ...]
    cold_bytes: tuple[int, ...]


@dataclass(slots=True)
class Known:
    """An entry and its stages: bit i of a mask is stage i, masks are by tier."""

    entry: Entry
    worth: Worth
    held: list[int] = field(default_factory=lambda: [0, 0])
    restorable: list[int] = field(default_factory=lambda: [0, 0])
    coming: bool = False
    """Whether every stage is about to hold it in RAM."""
    ends: bool = False
    """Whether they will be able to go on from its end then."""

    def mark(self, tier: Tier, bit: int, holds: bool, restorable: bool) -> None:
        for mask, wanted in ((self.held, holds), (self.restorable, holds and restorable)):
            mask[tier.value] = mask[tier.value] | bit if wanted else mask[tier.value] & ~bit


class PrefixIndex:
    """All blocks of one model by id. One owner: the engine."""

    def __init__(self, root: BlockId, block_tokens: int, stages: int, trimmable: bool) -> None:
        """trimmable: all layers' keys and values can be cut at any token, so a block may be used in part."""
        self.root = root
        self.block_tokens = block_tokens
        self.stages = stages
        self.trimmable = trimmable
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._every_stage = (1 << stages) - 1
        self._known: dict[BlockId, Known] = {}
        self._families: dict[BlockId, Family] = {}
        self._ledgers = {tier: tuple(Ledger() for _ in range(stages)) for tier in Tier}
        self._pinned = 0
        self._added = 0
        self._now = 0.0
        """The latest moment that was handed in: a block is made then, as far as is known here."""

    def add(self, entry: Entry) -> bool:
        """Know of it; who holds it is told by `hold`. Its parent may become known later than itself.

        False: its tokens are too many for a block, or do not give its id, so it was damaged on its way; it
        stays unknown.
        """
        if entry.id in self._known:
            return True
        size = len(entry.tokens)
        whole = 0 < size <= self._block_bytes and size % TOKEN_BYTES == 0
        if not whole or name(entry.parent, entry.tokens) != entry.id:
            return False
        self._known[entry.id] = Known(entry, Worth(entry.parent, self._added, self._now))
        self._families.setdefault(entry.parent, Family()).size += 1
        self._added += 1
        return True

    def hold(self, id: BlockId, stage: int, tier: Tier, bytes: int, restorable: bool) -> None:
        """The stage's part takes so many bytes in this tier; 0: it is not there any more.

        A stage none of whose layers keeps anything of this block says 1. restorable: its part is all that the
        stage needs to go on from the block's end; where it is in both tiers, the hot one counts.
        Raises KeyError for a block that is not known (ask `knows`).
        """
        known = self._known[id]
        self._ledgers[tier][stage].hold(id, known.worth, bytes)
        self._mark(known, stage, tier, bytes > 0, restorable)
        if not bytes:
            self._forget(id)

    def expect(self, id: BlockId, coming: bool, restorable: bool = False) -> None:
        """Every stage is about to hold it in RAM, or is no more: a match counts on it, and its user waits.
        Raises KeyError."""
        known = self._known[id]
        before = self._may_end(known)
        known.coming, known.ends = coming, coming and restorable
        self._place(known, before)

    def drop_stage(self, stage: int, tier: Tier) -> None:
        """A stage that started anew holds nothing in this tier. O(blocks).

        Blocks that were added, but are neither held anywhere nor pinned, are forgotten with the others.
        """
        for id in self._ledgers[tier][stage].clear():
            self._mark(self._known[id], stage, tier, False, False)
        for id in list(self._known):
            self._forget(id)

    def longest(self, tokens: bytes, limit: int, now: float) -> Match:
        """The longest prefix of packed `tokens`, `limit` tokens at most, that is held, or is about to be.

        That is a use of each of its blocks.

        Trimmable: full blocks, and behind them the one that shares most with what follows, LEAST_PART tokens
        at least. Not trimmable: it ends with a block, full or not, that every stage can go on from, and of
        which all tokens are used.
        """
        self._now = max(self._now, now)
        tokens = tokens[: TOKEN_BYTES * max(0, limit)]
        path = self._full_blocks(tokens)
        match = self._with_a_part(path, tokens) if self.trimmable else self._up_to_an_end(path, tokens)
        for id in match.blocks:
            self._known[id].worth.use(now)
        return match

    def knows(self, id: BlockId) -> bool:
        return id in self._known

    def entry(self, id: BlockId) -> Entry:
        """Raises KeyError."""
        return self._known[id].entry

    def is_hot(self, id: BlockId) -> bool:
        """Whether every stage can lay it back at once."""
        return not self.missing(id, Tier.HOT)

    def is_restorable(self, id: BlockId) -> bool:
        """Whether every stage can go on from its end, by what it holds now."""
        return id in self._known and self._restorable(self._known[id])

    def missing(self, id: BlockId, tier: Tier) -> tuple[int, ...]:
        """The stages that do not hold it in this tier: all of them, if it is not known."""
        held = self._known[id].held[tier.value] if id in self._known else 0
        if held == self._every_stage:
            return ()
        return tuple(stage for stage in range(self.stages) if not held >> stage & 1)

    def pin(self, id: BlockId) -> None:
        """It is no victim and not forgotten until `unpin` was called as often. Raises KeyError."""
        worth = self._known[id].worth
        worth.pins += 1
        self._pinned += worth.pins == 1

    def unpin(self, id: BlockId) -> None:
        """Raises KeyError for an unknown block, ValueError for one that is not pinned."""
        worth = self._known[id].worth
        if not worth.pins:
            raise ValueError(f"block {id.hex()} is not pinned")
        worth.pins -= 1
        if worth.pins:
            return
        self._pinned -= 1
        for ledgers in self._ledgers.values():
            for ledger in ledgers:
                ledger.offer(id)
        self._forget(id)

    def used_bytes(self, stage: int, tier: Tier) -> int:
        return self._ledgers[tier][stage].used_bytes

    def victims(self, tier: Tier, stage: int, bytes: int) -> list[BlockId]:
        """Unpinned blocks to give up, in this order, so that `stage` has so many bytes back in this tier;
        fewer where there are not enough.

        Leaves of what it holds there first, among them by `Worth`. Chooses, changes nothing.
        """
        return self._ledgers[tier][stage].victims(bytes)

    def lively_tokens(self, since: float) -> int:
        """Of blocks in RAM that were used since that moment. O(hot blocks)."""
        hot = (self._known[id] for id in self._ledgers[Tier.HOT][0])
        return sum(len(known.entry.tokens) for known in hot if known.worth.score >= since) // TOKEN_BYTES

    def counts(self) -> Counts:
        hot, cold = self._ledgers[Tier.HOT], self._ledgers[Tier.COLD]
        return Counts(
            blocks=len(self._known),
            pinned=self._pinned,
            hot_blocks=tuple(len(ledger) for ledger in hot),
            hot_bytes=tuple(ledger.used_bytes for ledger in hot),
            cold_blocks=tuple(len(ledger) for ledger in cold),
            cold_bytes=tuple(ledger.used_bytes for ledger in cold),
        )

    def check(self) -> None:
        """Recount everything; AssertionError where the books do not agree. For tests."""
        families: dict[BlockId, Family] = {}
        for id, known in self._known.items():
            entry = known.entry
            assert id == entry.id == name(entry.parent, entry.tokens)
            family = families.setdefault(entry.parent, Family())
            family.size += 1
            if self._may_end(known):
                family.ends.append((entry.tokens, id))
            assert entry.parent != self.root or entry.start == 0
            parent = self._known.get(entry.parent)
            assert parent is None or entry.start == parent.entry.start + self.block_tokens
            assert not any(ours & ~held for ours, held in zip(known.restorable, known.held, strict=True))
        for family in families.values():
            family.ends.sort()
        assert families == self._families
        assert self._pinned == sum(known.worth.pins > 0 for known in self._known.values())
        for tier, ledgers in self._ledgers.items():
            for stage, ledger in enumerate(ledgers):
                ledger.check()
                held = [id for id, known in self._known.items() if known.held[tier.value] >> stage & 1]
                assert len(held) == len(ledger) and all(id in ledger for id in held)

    def _mark(self, known: Known, stage: int, tier: Tier, holds: bool, restorable: bool) -> None:
        before = self._may_end(known)
        known.mark(tier, 1 << stage, holds, restorable)
        self._place(known, before)

    def _place(self, known: Known, before: bool) -> None:
        """Among its parent's children, if it has become or ceased to be one at which a match may end."""
        after = self._may_end(known)
        if before != after:
            family = self._families[known.entry.parent]
            if after:
                family.insert(known.entry.tokens, known.entry.id)
            else:
                family.remove(known.entry.tokens, known.entry.id)

    def _usable(self, known: Known) -> bool:
        return known.coming or known.held[0] | known.held[1] == self._every_stage

    def _may_end(self, known: Known) -> bool:
        """Whether a match may end within it, or at its end."""
        if self.trimmable or not self._usable(known):
            return self._usable(known)
        return known.ends or self._restorable(known)

    def _restorable(self, known: Known) -> bool:
        hot, cold = known.restorable
        # What is hot is laid back as it is, though the cold copy may have more.
        return hot | (cold & ~known.held[Tier.HOT.value]) == self._every_stage

    def _full_blocks(self, tokens: bytes) -> list[BlockId]:
        path: list[BlockId] = []
        parent, size = self.root, self._block_bytes
        for end in range(size, len(tokens) + 1, size):
            id = name(parent, tokens[end - size : end])
            known = self._known.get(id)
            if known is None or not self._usable(known):
                break
            path.append(id)
            parent = id
        return path

    def _with_a_part(self, path: list[BlockId], tokens: bytes) -> Match:
        family, rest = self._behind(path, tokens)
        found = family.closest(rest) if family else None
        full = len(path) * self.block_tokens
        if found is None or found[1] < LEAST_PART:
            return Match(tuple(path), full)
        return Match((*path, found[0]), full + found[1])

    def _up_to_an_end(self, path: list[BlockId], tokens: bytes) -> Match:
        """Back from the last full block to the first place behind which a block ends that may be restored."""
        while True:
            family, rest = self._behind(path, tokens)
            found = family.longest_within(rest) if family else None
            if found is not None:
                return Match((*path, found[0]), len(path) * self.block_tokens + found[1])
            if not path:
                return Match((), 0)
            path = path[:-1]

    def _behind(self, path: list[BlockId], tokens: bytes) -> tuple[Family | None, bytes]:
        """The blocks that may follow the last one of `path`, and the block's length of tokens that do."""
        start = len(path) * self._block_bytes
        family = self._families.get(path[-1] if path else self.root)
        return family, tokens[start : start + self._block_bytes]

    def _forget(self, id: BlockId) -> None:
        """Unless it is held, pinned, or a known block's parent; with those before it that only it kept."""
        while (known := self._known.get(id)) is not None:
            if any(known.held) or known.worth.pins or id in self._families:
                return
            del self._known[id]
            parent = known.entry.parent
            self._families[parent].size -= 1
            if not self._families[parent].size:
                del self._families[parent]
            id = parent
