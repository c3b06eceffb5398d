"""What the stages are told to keep, lay back, fetch, spill and give up: pure bookkeeping on the head.

Names and holdings are the index's; here is when something is worth doing. A block is kept as soon as it is
computed, written to the SSD a moment later, and evicted from RAM when that is full.
A sequence starts behind the longest prefix that every stage holds: hot blocks are laid back by its first
plans, cold ones are fetched first, and given up for computing where the disk is the slower of the two.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile

from omlx.cache.block import name, pack
from omlx.cache.prefix_index import Entry, Match, PrefixIndex, Tier
from omlx.cache.recency import HALF_LIFE_S
from omlx.ids import BlockId
from omlx.node.hold import LEAST_TOKENS, Counters, Hold
from omlx.node.reading import Reading
from omlx.node.sequence import Sequence
from omlx.node.step import Keep, Restore
from omlx.node.wire import BlockEntry, Catalogue, Holds

RESTORED_TOKENS = 4096
"""Laid back in one plan while others decode: they wait for the copying."""
FETCHES, SPILLS = 8, 4
"""Blocks that may be on their way from and to the SSD, for each stage."""
IDLE_S = 1.0
"""A block is written when it is so old: nobody waits for it, and what follows is computed already."""
FETCH_WITHIN_S = 10.0
"""A disk that gives nothing for so long is given up for computing."""
SPILL_WITHIN_S = 60.0
"""A disk that takes nothing for so long must not hold up the blocks behind."""
FULL = 0.8
"""Of the hot budget: from here on blocks are written and go; beyond all of it they go unwritten too."""


@dataclass(slots=True)
class Prefixes:
    """Owned by the scheduler."""

    index: PrefixIndex
    hold: Hold
    counters: Counters = field(default_factory=Counters)
    now: float = 0.0
    """On time.monotonic; the engine sets it as it goes."""
    kept: int = 0
    """Blocks that were named since the start: with each, a longer prefix may be known."""
    _dirty: OrderedDict[BlockId, float] = field(default_factory=OrderedDict)
    """Hot, and not yet cold on every stage: since when."""
    _fetching: dict[BlockId, tuple[set[int], float]] = field(default_factory=dict)
    """Stages that have not answered, and since when."""
    _spilling: dict[BlockId, tuple[set[int], float]] = field(default_factory=dict)
    """Stages that have not answered, and since when."""
    _distrusted: set[BlockId] = field(default_factory=set)
    """To be given up in RAM: nobody knows them any more, or an epoch ended while they were laid back."""
    _keeping: set[BlockId] = field(default_factory=set)
    """Named in plans of this epoch, and not yet held."""
    _purging: set[BlockId] = field(default_factory=set)
    """To be deleted by stages that have not all answered."""
    _evicting: dict[BlockId, set[int]] = field(default_factory=dict)
    """Given up in RAM by plans that not all stages have carried out: a fetch would overtake them."""
    reading: Reading = field(default_factory=Reading)

    @property
    def stages(self) -> int:
        return len(self.hold.hot_bytes)

    # ---------------------------------------------------------------- a sequence's way through

    def begin(self, sequence: Sequence, block_compute_s: float) -> None:
        """Look for what is held of a sequence that has nothing in the caches, and pin it.

        block_compute_s: what a block is thought to take the slowest stage to compute; 0: nobody knows.
        """
        self.leave(sequence)
        sequence.path.clear()
        sequence.restore_end = 0
        if sequence.distrusts or not self.hold.block_tokens:
            return
        sequence.looked_at = self.kept
        tokens = pack(sequence.tokens)
        match = self.index.longest(tokens, sequence.known - 1, self.now)
        if self._waits_too_long() or self.reading.too_slow(block_compute_s, self.now):
            match = self._hot_part(match)
        for id in match.blocks:
            self.index.pin(id)
        sequence.restoring.extend(match.blocks)
        sequence.restore_end = match.tokens
        sequence.path.extend(match.blocks[: match.tokens // self.hold.block_tokens])

    def _hot_part(self, match: Match) -> Match:
        """As much of it as needs no reading."""
        hot = self._ready(match.blocks)
        if hot == len(match.blocks):
            return match
        return (
            Match(match.blocks[:hot], hot * self.hold.block_tokens) if self.hold.trimmable else Match((), 0)
        )

    def _ready(self, blocks: Iterable[BlockId]) -> int:
        """How many of these, from the first on, are hot."""
        return sum(1 for _ in takewhile(self.index.is_hot, blocks))

    def leave(self, sequence: Sequence) -> None:
        """It will not lay back what it has not yet."""
        for id in sequence.restoring:
            self.index.unpin(id)
        sequence.restoring.clear()

    def restore(self, sequence: Sequence, alone: bool) -> Restore | None:
        """The next blocks that are hot, for the plan that is being made; None while there are none."""
        self._give_up(sequence)
        ready = self._ready(sequence.restoring)
        if ready < len(sequence.restoring) and not self.hold.trimmable:
            return None  # it could not go on from the middle
        if ready and not self.hold.trimmable and not self.index.is_restorable(sequence.restoring[-1]):
            self.leave(sequence)  # what was expected has not come
            sequence.path.clear()
            return None
        if not alone:
            ready = min(ready, max(1, RESTORED_TOKENS // self.hold.block_tokens))
        if not ready:
            return None
        blocks = tuple(sequence.restoring.popleft() for _ in range(ready))
        for id in blocks:
            self.index.unpin(id)
        start = sequence.issued
        sequence.issued = min(start + ready * self.hold.block_tokens, sequence.restore_end)
        self.counters.restored_blocks += ready
        self.counters.hit_tokens += sequence.issued - start
        return Restore(sequence.id, blocks, start, sequence.issued, sequence.known)

    def _give_up(self, sequence: Sequence) -> None:
        """Compute what does not come."""
        late = self._waits_too_long()
        for place, id in enumerate(sequence.restoring):
            if (late and not self.index.is_hot(id)) or self._is_gone(id):
                self.counters.given_up_fetches += 1
                good = place if self.hold.trimmable else 0
                while len(sequence.restoring) > good:
                    self.index.unpin(sequence.restoring.pop())
                del sequence.path[sequence.issued // self.hold.block_tokens + good :]
                return

    def _waits_too_long(self) -> bool:
        """Whether a disk gives nothing any more: what it owes takes the places of all other fetches."""
        oldest = min((since for _, since in self._fetching.values()), default=self.now)
        return self.now - oldest > FETCH_WITHIN_S

    def _is_gone(self, id: BlockId) -> bool:
        """Whether some stage has it neither in RAM nor on its SSD, nor will."""
        return id not in self._keeping and not set(self.index.missing(id, Tier.HOT)).isdisjoint(
            self.index.missing(id, Tier.COLD)
        )

    def keeps(self, sequence: Sequence, *, last: bool) -> list[Keep]:
        """What was computed of a sequence since the last call, by name; `last`: it leaves, keep its rest."""
        if not self.hold.block_tokens or sequence.restoring or sequence.issued == 0:
            return []
        size, found = self.hold.block_tokens, []
        computed = min(sequence.computed, sequence.known)
        while (len(sequence.path) + 1) * size <= computed:
            start = len(sequence.path) * size
            id, keeps = self._keep(sequence, start, start + size)
            sequence.path.append(id)
            found += keeps
        start, prompt = len(sequence.path) * size, len(sequence.request.prompt)
        if self.hold.trimmable:
            if last and computed - start >= LEAST_TOKENS:
                found += self._keep(sequence, start, computed)[1]
        elif start < prompt == computed and prompt - start >= LEAST_TOKENS and not sequence.prompt_kept:
            sequence.prompt_kept = True
            found += self._keep(sequence, start, prompt)[1]
        return found

    def _keep(self, sequence: Sequence, start: int, end: int) -> tuple[BlockId, list[Keep]]:
        parent = sequence.path[-1] if sequence.path else self.index.root
        tokens = pack(sequence.tokens[start:end])
        id = name(parent, tokens)
        if id in self._keeping or (self.hold.trimmable and self.index.is_hot(id)):
            return id, []
        self.index.add(Entry(id, parent, tokens, start))
        self.index.pin(id)
        self.index.expect(id, True, self._ends(sequence, end))
        self._keeping.add(id)
        self.kept += 1
        return id, [Keep(sequence.id, id, start, end)]

    # ---------------------------------------------------------------- what the stages say

    def held(self, stage: int, message: Holds) -> None:
        """A stage has, or has no more, something of blocks in a tier."""
        tier = Tier.HOT if message.tier == "hot" else Tier.COLD
        for block in message.blocks:
            id = block.id
            if message.evicted:
                self._evicted(stage, id)
            elif tier is Tier.HOT and stage in self._evicting.get(id, ()):
                continue  # said before it carried out the plan that gives it up
            if self.index.knows(id):
                self.index.hold(id, stage, tier, block.bytes, block.restorable)
            elif block.bytes and tier is Tier.HOT:
                self._distrusted.add(id)
            if tier is Tier.HOT:
                self._answered(stage, id, block.bytes, message.seconds / len(message.blocks))
                continue
            if id in self._spilling:
                self._spilled(stage, id, block.bytes)
            if len(self.index.missing(id, Tier.COLD)) == self.stages:
                self._purging.discard(id)

    def found(self, stage: int, message: Catalogue) -> None:
        """A stage found blocks on its SSD."""
        for entry, block in zip(message.entries, message.held, strict=True):
            # Blocks of another size are none here, and a damaged one is not known.
            whole = self.hold.block_tokens and entry.start % self.hold.block_tokens == 0
            if whole and self.index.add(Entry(entry.id, entry.parent, entry.tokens, entry.start)):
                self.index.hold(entry.id, stage, Tier.COLD, block.bytes, block.restorable)

    def lost(self, stage: int) -> None:
        """A stage is started anew: its RAM is empty; what its SSD has, it will say."""
        self.index.drop_stage(stage, Tier.HOT)
        self.index.drop_stage(stage, Tier.COLD)
        self._purging.clear()

    def distrust(self, blocks: Iterable[BlockId]) -> None:
        """The epoch ended while these were laid back; perhaps because of them."""
        self._distrusted.update(id for id in blocks if self.index.knows(id))

    def rewind(self) -> None:
        """Plans of the epoch that is over may not have been carried out."""
        for id in list(self._keeping):
            self._end_keep(id)
        for id in list(self._fetching):
            self._end_fetch(id)
        self._spilling.clear()
        self._distrusted.update(self._evicting)
        self._evicting.clear()

    def _answered(self, stage: int, id: BlockId, bytes: int, seconds: float) -> None:
        if id in self._fetching:
            waiting, _ = self._fetching[id]
            waiting.discard(stage)
            if bytes and seconds:
                self.reading.note(seconds)
            if not waiting:
                self._end_fetch(id)
                self.counters.fetched_blocks += self.index.is_hot(id)
        if id in self._keeping and self.index.is_hot(id):
            self._end_keep(id)
        if bytes and self.hold.cold and self.index.missing(id, Tier.COLD):
            self._dirty.setdefault(id, self.now)

    def _ends(self, sequence: Sequence, end: int) -> bool:
        """Whether there should be states and windows where this block ends."""
        snapshot = end % self.hold.snapshot_tokens == 0 or end == len(sequence.request.prompt)
        return snapshot or not self.hold.recurrent

    def _end_keep(self, id: BlockId) -> None:
        self._keeping.remove(id)
        self.index.expect(id, False)
        self.index.unpin(id)

    def _end_fetch(self, id: BlockId) -> None:
        del self._fetching[id]
        self.index.unpin(id)

    def _spilled(self, stage: int, id: BlockId, bytes: int) -> None:
        waiting, _ = self._spilling[id]
        waiting.discard(stage)
        if not waiting:
            self._end_spill(id)

    def _end_spill(self, id: BlockId) -> None:
        del self._spilling[id]
        self._dirty.pop(id, None)
        if self.index.missing(id, Tier.COLD):
            self.counters.dropped_writes += 1
        else:
            self.counters.spilled_blocks += 1

    # ---------------------------------------------------------------- what they are told

    def fetches(self, sequences: Iterable[Sequence]) -> tuple[BlockId, ...]:
        """To be read now, for these sequences, in this order."""
        wanted: list[BlockId] = []
        for sequence in sequences:
            for id in islice((id for id in sequence.restoring if not self.index.is_hot(id)), FETCHES):
                if len(self._fetching) >= FETCHES:
                    return tuple(wanted)
                coming = any(id in some for some in (self._fetching, self._keeping, self._evicting))
                if not coming and not self._is_gone(id):
                    self._fetching[id] = set(self.index.missing(id, Tier.HOT)), self.now
                    self.index.pin(id)
                    wanted.append(id)
        return tuple(wanted)

    def spills(self, *, all_of_them: bool = False) -> tuple[BlockEntry, ...]:
        """To be written now: what is old enough, a few at a time."""
        wanted = []
        for id in [id for id, (_, since) in self._spilling.items() if self.now - since > SPILL_WITHIN_S]:
            self._end_spill(id)
        for id, since in list(self._dirty.items()):
            if len(self._spilling) >= SPILLS or (not all_of_them and self.now - since < IDLE_S):
                break
            if id in self._spilling:
                continue
            missing = set(self.index.missing(id, Tier.COLD))
            if not missing or self.index.missing(id, Tier.HOT):
                del self._dirty[id]
                continue
            id = self._first_of(id)
            self._spilling[id] = set(self.index.missing(id, Tier.COLD)), self.now
            entry = self.index.entry(id)
            wanted.append(BlockEntry(id, entry.parent, entry.tokens, entry.start))
        return tuple(wanted)

    def _first_of(self, id: BlockId) -> BlockId:
        """What is to be written before it: on the SSD, too, a tail without its head is worthless."""
        while (parent := self.index.entry(id).parent) in self._dirty and self._can_spill(parent):
            id = parent
        return id

    def _can_spill(self, id: BlockId) -> bool:
        return id not in self._spilling and self.index.is_hot(id) and bool(self.index.missing(id, Tier.COLD))

    def evicts(self) -> tuple[BlockId, ...]:
        """To be dropped from RAM by the plan that is being made, whose restores are chosen already."""
        gone = list(self._distrusted)
        self._distrusted.clear()
        for id in gone:
            self._forget_hot(id)
        for stage, budget in enumerate(self.hold.hot_bytes):
            over = self.index.used_bytes(stage, Tier.HOT) - int(FULL * budget)
            if over <= 0:
                continue
            for id in self.index.victims(Tier.HOT, stage, over):
                if id in self._spilling or id in self._fetching:
                    continue
                if id in self._dirty:
                    bearable = self.index.used_bytes(stage, Tier.HOT) <= budget
                    if bearable or len(self._dirty) <= SPILLS:
                        self._dirty[id] = self.now - IDLE_S  # written next
                        self._dirty.move_to_end(id, last=False)
                        continue
                    self._dirty.pop(id)
                    self.counters.dropped_writes += 1
                self._forget_hot(id)
                gone.append(id)
        self.counters.evicted_blocks += len(gone)
        return tuple(gone)

    def _evicted(self, stage: int, id: BlockId) -> None:
        waiting = self._evicting.get(id, set())
        waiting.discard(stage)
        if not waiting:
            self._evicting.pop(id, None)

    def _forget_hot(self, id: BlockId) -> None:
        self._evicting[id] = set(range(self.stages))
        for stage in range(self.stages):
            if self.index.knows(id):
                self.index.hold(id, stage, Tier.HOT, 0, False)

    def purges(self, over_bytes: int) -> tuple[BlockId, ...]:
        """To be deleted from the SSD, so that it gets so many bytes back; the answers come as Holds."""
        if over_bytes <= 0:
            return ()
        used = [self.index.used_bytes(stage, Tier.COLD) for stage in range(self.stages)]
        largest = max(range(self.stages), key=used.__getitem__)
        part = -(-over_bytes * used[largest] // max(1, sum(used)))
        victims = self.index.victims(Tier.COLD, largest, part)
        gone = tuple(id for id in victims if id not in self._spilling and id not in self._purging)
        self._purging.update(gone)
        return gone

    def at_stake(self, running: Iterable[Sequence], now: float) -> int:
        """Tokens that would be computed again if nothing were kept: of requests that run, most of them in
        blocks, and of prefixes that were used within a half-life."""
        beside = sum(one.known - len(one.path) * self.hold.block_tokens for one in running)
        return beside + self.index.lively_tokens(now - HALF_LIFE_S)

    @property
    def dirty(self) -> int:
        """Blocks that are not on the SSD yet."""
        return len(self._dirty)

    @property
    def busy(self) -> bool:
        """Whether something is due by the clock alone."""
        return bool(self._dirty or self._fetching)


def nothing_kept(stages: int = 1) -> Prefixes:
    """Without a cache."""
    root = BlockId(bytes(16))
    return Prefixes(PrefixIndex(root, 1, stages, True), Hold((0,) * stages, False, 0, 0))
