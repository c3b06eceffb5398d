"""The index of blocks: how far prompts are known, who goes first, and all of it under random operations."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log2
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.cache.block import chain, name, pack, root_of
from omlx.cache.prefix_index import LEAST_PART, Counts, Entry, Match, PrefixIndex, Tier
from omlx.cache.recency import HALF_LIFE_S, SLACK
from omlx.ids import BlockId

ROOT = root_of({"weights": "tiny"})
SIZE = 20
HOT, COLD = Tier.HOT, Tier.COLD
EVERYTHING = 10**9


def index(trimmable: bool = True, stages: int = 1) -> PrefixIndex:
    return PrefixIndex(ROOT, SIZE, stages, trimmable)


def entries(tokens: Sequence[int], size: int = SIZE) -> list[Entry]:
    """The blocks of a sequence, the last one perhaps not full."""
    made, parent = [], ROOT
    for start in range(0, len(tokens), size):
        packed = pack(tokens[start : start + size])
        made.append(Entry(name(parent, packed), parent, packed, start))
        parent = made[-1].id
    return made


def keep(
    into: PrefixIndex, tokens: Sequence[int], tier: Tier = HOT, ends: Sequence[int] | None = None
) -> list[BlockId]:
    """All blocks of a sequence, 10 bytes each on every stage; `ends`: which can be gone on from, else all."""
    ids = []
    for place, entry in enumerate(entries(tokens)):
        assert into.add(entry)
        for stage in range(into.stages):
            into.hold(entry.id, stage, tier, 10, ends is None or place in ends)
        ids.append(entry.id)
    into.check()
    return ids


def longest(of: PrefixIndex, tokens: Sequence[int], limit: int = EVERYTHING, now: float = 0.0) -> Match:
    match = of.longest(pack(tokens), limit, now)
    of.check()
    return match


def seq(*runs: tuple[int, int]) -> list[int]:
    """seq((7, 3), (8, 1)) is [7, 7, 7, 8]."""
    return [token for token, count in runs for _ in range(count)]


# Longest known prefix


@pytest.mark.parametrize("trimmable", [True, False])
def test_an_empty_index_knows_nothing(trimmable: bool) -> None:
    assert longest(index(trimmable), seq((1, 50))) == Match((), 0)
    assert longest(index(trimmable), []) == Match((), 0)


@pytest.mark.parametrize("trimmable", [True, False])
def test_full_blocks_and_a_part_at_the_end_are_found_again(trimmable: bool) -> None:
    known = index(trimmable)
    tokens = seq((1, 20), (2, 20), (3, 17))
    blocks = tuple(keep(known, tokens))
    assert longest(known, tokens + seq((9, 5))) == Match(blocks, 57)
    assert longest(known, tokens) == Match(blocks, 57)
    assert longest(known, tokens[:40]) == Match(blocks[:2], 40)


def test_the_last_block_is_used_up_to_the_first_other_token() -> None:
    known = index()
    blocks = tuple(keep(known, seq((1, 40))))
    assert longest(known, seq((1, 20 + LEAST_PART), (2, 30))) == Match(blocks, 20 + LEAST_PART)
    assert longest(known, seq((1, 20 + LEAST_PART - 1), (2, 30))) == Match(blocks[:1], 20)


def test_a_model_that_cannot_be_trimmed_uses_no_block_in_part() -> None:
    known = index(trimmable=False)
    blocks = tuple(keep(known, seq((1, 40))))
    assert longest(known, seq((1, 39), (2, 30))) == Match(blocks[:1], 20)


def test_of_all_children_the_one_that_shares_most_is_used() -> None:
    known = index()
    tails = [seq((2, count), (token, 20 - count)) for count in (15, 17, 19, 16, 18) for token in (1, 3)]
    first = [keep(known, seq((1, 20)) + tail) for tail in tails][4]
    match = longest(known, seq((1, 20), (2, 19), (4, 30)))
    assert match.tokens == 39 and match.blocks[0] == first[0]
    assert longest(known, seq((1, 20), (2, 20))).tokens == 39
    assert longest(known, seq((1, 20), (2, 17), (1, 9))).blocks == tuple(keep(known, seq((1, 20)) + tails[2]))


def test_of_all_parts_that_a_prompt_begins_with_the_longest_is_used() -> None:
    known = index(trimmable=False)
    for tail in (seq((2, 3)), seq((2, 7)), seq((2, 9), (1, 1)), seq((2, 8), (3, 4)), seq((1, 2))):
        keep(known, seq((1, 20)) + tail)
    assert longest(known, seq((1, 20), (2, 9), (9, 30))).tokens == 27
    assert longest(known, seq((1, 20), (2, 9), (1, 30))).tokens == 30
    assert longest(known, seq((1, 20), (2, 6), (1, 30))).tokens == 23
    assert longest(known, seq((1, 20), (3, 30))).tokens == 20


def test_children_of_the_root_are_looked_through_too() -> None:
    for trimmable, tokens in ((True, 18), (False, 5)):
        known = index(trimmable)
        keep(known, seq((1, 18), (2, 2)))
        keep(known, seq((1, 5)))
        assert longest(known, seq((1, 18), (3, 30))).tokens == tokens


def test_never_more_tokens_than_the_limit() -> None:
    known = index()
    blocks = tuple(keep(known, seq((1, 60))))
    assert longest(known, seq((1, 60)), 60) == Match(blocks, 60)
    assert longest(known, seq((1, 60)), 59) == Match(blocks, 59)
    assert longest(known, seq((1, 60)), 40) == Match(blocks[:2], 40)
    assert longest(known, seq((1, 60)), 40 + LEAST_PART - 1) == Match(blocks[:2], 40)
    assert longest(known, seq((1, 60)), 0) == longest(known, seq((1, 60)), -1) == Match((), 0)


def test_within_the_limit_it_ends_where_every_layer_can_go_on() -> None:
    known = index(trimmable=False)
    blocks = tuple(keep(known, seq((1, 77)), ends=(0, 2, 3)))
    assert longest(known, seq((1, 90))) == Match(blocks, 77)
    assert longest(known, seq((1, 90)), 76) == Match(blocks[:3], 60)
    assert longest(known, seq((1, 90)), 59) == Match(blocks[:1], 20)
    assert longest(known, seq((1, 90)), 19) == Match((), 0)


def test_the_end_of_an_earlier_turn_beats_a_full_block_before_it() -> None:
    """Hybrids: the blocks of a later turn have no snapshots, the part that ended an earlier turn has one."""
    known = index(trimmable=False)
    turn = tuple(keep(known, seq((1, 49)), ends=(0, 2)))
    keep(known, seq((1, 49), (2, 51)), ends=())
    keep(known, seq((1, 49)), ends=(0, 2))
    assert longest(known, seq((1, 49), (2, 51), (3, 5))) == Match(turn, 49)


def test_a_gap_ends_the_match_until_it_is_filled() -> None:
    known = index()
    blocks = entries(seq((1, 60)))
    for entry in (blocks[2], blocks[0]):
        known.add(entry)
        known.hold(entry.id, 0, HOT, 1, True)
    assert longest(known, seq((1, 60))).tokens == 20
    known.add(blocks[1])
    assert longest(known, seq((1, 60))).tokens == 20
    known.hold(blocks[1].id, 0, COLD, 1, True)
    assert longest(known, seq((1, 60))).tokens == 60


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_prefix_counts_as_far_as_all_stages_have_it(trimmable: bool) -> None:
    known = index(trimmable, stages=3)
    blocks = keep(known, seq((1, 60)))
    known.hold(blocks[1], 1, HOT, 0, False)
    assert longest(known, seq((1, 60))).tokens == 20
    assert known.missing(blocks[1], HOT) == (1,) and known.missing(blocks[1], COLD) == (0, 1, 2)
    known.hold(blocks[1], 1, COLD, 9, True)
    assert longest(known, seq((1, 60))).tokens == 60
    assert not known.is_hot(blocks[1]) and known.is_hot(blocks[0])


def test_every_stage_must_be_able_to_go_on_from_the_end() -> None:
    known = index(trimmable=False, stages=2)
    blocks = keep(known, seq((1, 40)))
    known.hold(blocks[1], 1, HOT, 9, False)
    assert longest(known, seq((1, 40))).tokens == 20
    known.hold(blocks[1], 1, COLD, 9, True)
    assert longest(known, seq((1, 40))).tokens == 20, "what is hot is laid back, and that is not all of it"
    known.hold(blocks[1], 1, HOT, 0, False)
    assert longest(known, seq((1, 40))).tokens == 40


def test_a_picture_s_placeholders_are_not_found_as_plain_tokens() -> None:
    """Same tokens, other picture: what is named with media is never a match of the bare tokens."""
    known = index()
    tokens = pack(seq((1, 20)))
    assert not known.add(Entry(name(ROOT, tokens, b"red.png"), ROOT, tokens, 0))
    assert longest(known, seq((1, 20))) == Match((), 0)


@pytest.mark.parametrize(
    "tokens",
    [pack(seq((1, 19), (2, 1))), pack(seq((1, 19))), pack(seq((1, 21))), b"", b"123"],
    ids=["flipped", "cut", "too long", "empty", "no tokens"],
)
def test_an_entry_whose_tokens_do_not_give_its_id_stays_unknown(tokens: bytes) -> None:
    known = index()
    own = name(ROOT, pack(seq((1, 20)))) if len(tokens) in (76, 80) else name(ROOT, tokens)
    assert not known.add(Entry(own, ROOT, tokens, 0))
    assert not known.knows(own)
    known.check()


# What is known, held, pinned


def test_a_block_that_nobody_holds_is_forgotten_with_what_only_it_kept() -> None:
    known = index(stages=2)
    blocks = keep(known, seq((1, 60)))
    other = keep(known, seq((1, 20), (2, 20)))[1]
    for stage in (0, 1):
        known.hold(blocks[0], stage, HOT, 0, False)
        known.hold(blocks[1], stage, HOT, 0, False)
    assert all(known.knows(id) for id in blocks), "the tail is held"
    known.hold(blocks[2], 0, HOT, 0, False)
    assert known.knows(blocks[2])
    known.hold(blocks[2], 1, HOT, 0, False)
    assert [known.knows(id) for id in blocks] == [True, False, False] and known.knows(other)
    known.check()


def test_a_pinned_block_is_not_forgotten_before_its_last_pin() -> None:
    known = index()
    (block,) = keep(known, seq((1, 20)))
    known.pin(block)
    known.pin(block)
    known.hold(block, 0, HOT, 0, False)
    known.unpin(block)
    assert known.knows(block) and known.counts().pinned == 1
    known.unpin(block)
    assert not known.knows(block) and known.counts() == Counts(0, 0, (0,), (0,), (0,), (0,))
    known.check()


def test_what_is_not_known_can_be_asked_for_but_neither_held_nor_pinned() -> None:
    known = index(stages=2)
    stranger = name(ROOT, b"0123")
    assert not known.knows(stranger) and not known.is_hot(stranger)
    assert known.missing(stranger, COLD) == (0, 1)
    for act in (lambda: known.hold(stranger, 0, HOT, 1, True), lambda: known.pin(stranger)):
        with pytest.raises(KeyError):
            act()
    known.add(entries(seq((1, 5)))[0])
    with pytest.raises(ValueError, match="is not pinned"):
        known.unpin(entries(seq((1, 5)))[0].id)


def test_a_stage_that_starts_anew_has_its_cold_blocks_left() -> None:
    known = index(stages=2)
    blocks = keep(known, seq((1, 40)))
    known.hold(blocks[0], 1, COLD, 7, True)
    known.drop_stage(1, HOT)
    known.check()
    assert longest(known, seq((1, 40))).tokens == 20
    assert [known.used_bytes(stage, tier) for tier in (HOT, COLD) for stage in (0, 1)] == [20, 0, 0, 7]
    known.drop_stage(0, HOT)
    assert known.knows(blocks[0]) and not known.knows(blocks[1])
    known.drop_stage(1, COLD)
    assert known.counts().blocks == 0
    known.check()


def test_counts_tell_blocks_and_bytes_of_each_stage() -> None:
    known = index(stages=2)
    blocks = keep(known, seq((1, 40)))
    known.hold(blocks[0], 1, COLD, 7, True)
    known.hold(blocks[1], 0, HOT, 4, True)
    known.add(entries(seq((1, 40)))[0])
    known.pin(blocks[0])
    assert known.counts() == Counts(2, 1, (2, 2), (14, 20), (0, 1), (0, 7))


def test_tokens_count_as_lively_while_they_are_in_ram_and_were_used_lately() -> None:
    known = index()
    chat, other = seq((1, 3 * SIZE)), seq((100, SIZE))
    assert longest(known, chat, now=100.0).tokens == 0
    keep(known, chat)
    assert longest(known, chat, now=150.0).tokens
    (old,) = keep(known, other)
    assert known.lively_tokens(since=0.0) == len(chat) + len(other)
    assert longest(known, chat, now=1000.0).tokens
    assert known.lively_tokens(since=900.0) == len(chat)
    known.hold(old, 0, COLD, 10, True)
    known.hold(old, 0, HOT, 0, False)
    assert known.lively_tokens(since=0.0) == len(chat)


# Who goes first


def test_the_tail_goes_before_the_head_and_the_least_used_chain_first() -> None:
    known = index()
    old, new = keep(known, seq((1, 60))), keep(known, seq((2, 60)))
    longest(known, seq((2, 60)), now=100.0)
    assert known.victims(HOT, 0, 1) == [old[2]]
    assert known.victims(HOT, 0, 30) == old[::-1], "chosen only, so the same once more"
    assert known.victims(HOT, 0, 41) == [*old[::-1], *new[:0:-1]]
    assert known.victims(HOT, 0, EVERYTHING) == old[::-1] + new[::-1]
    assert known.victims(COLD, 0, 1) == known.victims(HOT, 0, 0) == []


def test_a_head_with_a_tail_that_lives_goes_last_however_old_it_is() -> None:
    known = index()
    head, *_ = keep(known, seq((1, 40)))
    young = keep(known, seq((1, 20), (2, 20)))[1]
    alone = keep(known, seq((3, 20)))[0]
    longest(known, seq((3, 20)), now=900.0)
    longest(known, seq((1, 20), (2, 20)), now=1000.0)
    assert known.victims(HOT, 0, EVERYTHING)[1:] == [alone, young, head]


def test_tiers_and_stages_are_ordered_each_for_itself() -> None:
    known = index(stages=2)
    blocks = keep(known, seq((1, 60)))
    known.hold(blocks[0], 1, COLD, 5, True)
    known.hold(blocks[2], 1, HOT, 0, False)
    assert known.victims(HOT, 0, 1) == [blocks[2]]
    assert known.victims(HOT, 1, 1) == [blocks[1]]
    assert known.victims(COLD, 1, 1) == [blocks[0]], "its tail is hot alone"


def test_pinned_blocks_and_what_is_before_them_stay() -> None:
    known = index()
    blocks, other = keep(known, seq((1, 60))), keep(known, seq((2, 40)))
    known.pin(blocks[1])
    assert known.victims(HOT, 0, EVERYTHING) == [blocks[2], *other[::-1]]
    known.check()
    known.unpin(blocks[1])
    assert set(known.victims(HOT, 0, EVERYTHING)) == {*blocks, *other}


def test_a_block_used_often_outlives_one_used_later_but_not_for_ever() -> None:
    known = index()
    often, once = keep(known, seq((1, 20)))[0], keep(known, seq((2, 20)))[0]
    for _ in range(3):
        longest(known, seq((1, 20)), now=0.0)
    longest(known, seq((2, 20)), now=HALF_LIFE_S / 2)
    assert known.victims(HOT, 0, 1) == [once], "four uses in a moment lengthen life by two half-lives"
    longest(known, seq((2, 20)), now=2 * HALF_LIFE_S)
    assert known.victims(HOT, 0, 1) == [often]


def test_a_block_just_made_is_not_the_first_to_go() -> None:
    known = index()
    old = keep(known, seq((1, 20)))[0]
    longest(known, seq((9, 20)), now=50.0)
    keep(known, seq((2, 20)))
    assert known.victims(HOT, 0, 1) == [old]


def test_a_queue_does_not_grow_with_blocks_that_come_and_go() -> None:
    known = index()
    blocks = keep(known, seq((1, 60)))
    for _ in range(1000):
        known.hold(blocks[2], 0, HOT, 0, False)
        known.add(entries(seq((1, 60)))[2])
        known.hold(blocks[2], 0, HOT, 1, True)
    assert len(known._ledgers[HOT][0]._queue) <= SLACK + 2 * 3 + 1
    assert known.victims(HOT, 0, EVERYTHING) == blocks[::-1]


# Random operations

RUNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 17)), min_size=1, max_size=6)
PLACES = st.integers(0, 10**6)
SEEDS = st.integers(0, 2**32)
MANY = 12
"""Blocks; with fewer of them nothing is dropped at large."""


@dataclass
class Model:
    """What the index should know of one block, written down without any thought for speed."""

    entry: Entry
    order: int
    uses: list[float]
    held: dict[tuple[Tier, int], tuple[int, bool]] = field(default_factory=dict)
    pins: int = 0

    @property
    def score(self) -> float:
        last = max(self.uses)
        return last + HALF_LIFE_S * log2(sum(2 ** ((t - last) / HALF_LIFE_S) for t in self.uses))

    def usable(self, stages: int) -> bool:
        return all((HOT, stage) in self.held or (COLD, stage) in self.held for stage in range(stages))

    def restorable(self, stages: int) -> bool:
        parts = (self.held.get((HOT, stage), self.held.get((COLD, stage))) for stage in range(stages))
        return all(part is not None and part[1] for part in parts)


class Operations(RuleBasedStateMachine):
    @initialize(stages=st.integers(1, 3), trimmable=st.booleans())
    def begin(self, stages: int, trimmable: bool) -> None:
        self.stages, self.trimmable = stages, trimmable
        self.index = PrefixIndex(ROOT, SIZE, stages, trimmable)
        self.model: dict[BlockId, Model] = {}
        self.sequences: list[list[int]] = [seq((1, 50))]
        self.added = 0
        self.now = 0.0
        for seed in range(4):
            self.add(seed, [[(1, 17), (2, 17), (3, 17)], [(2, 9)]])

    def pick(self, place: int) -> BlockId | None:
        return list(self.model)[place % len(self.model)] if self.model else None

    def prompt(self, seed: float, runs: list[tuple[int, int]]) -> list[int]:
        """One that begins like an earlier one."""
        chance = random.Random(seed)
        earlier = chance.choice(self.sequences)
        return (earlier[: chance.randint(0, len(earlier))] + seq(*runs))[:130]

    @rule(seed=SEEDS, prompts=st.lists(RUNS, min_size=2, max_size=5))
    def add(self, seed: int, prompts: list[list[tuple[int, int]]]) -> None:
        """Most blocks of some prompts, held on most stages."""
        chance = random.Random(seed)
        added = [self.prompt(chance.random(), runs) for runs in prompts]
        self.sequences = [*self.sequences, *added][-8:]
        for entry in [entry for tokens in added for entry in entries(tokens)]:
            if chance.random() < 0.05:
                continue
            assert self.index.add(entry)
            if entry.id not in self.model:
                self.model[entry.id] = Model(entry, self.added, [self.now])
                self.added += 1
            for stage in range(self.stages):
                if chance.random() < 0.95:
                    tier = chance.choice((HOT, HOT, COLD))
                    self.set(entry.id, stage, tier, chance.randint(1, 5), chance.random() < 0.7)

    def set(self, id: BlockId, stage: int, tier: Tier, size: int, restorable: bool) -> None:
        self.index.hold(id, stage, tier, size, restorable)
        if size:
            self.model[id].held[tier, stage] = size, restorable
        else:
            self.model[id].held.pop((tier, stage), None)
            self.forget(id)

    def forget(self, id: BlockId) -> None:
        while id in self.model and not self.model[id].held and not self.model[id].pins:
            if any(each.entry.parent == id for each in self.model.values()):
                return
            id = self.model.pop(id).entry.parent

    @rule(
        place=PLACES,
        stage=st.integers(0, 2),
        tier=st.sampled_from(Tier),
        size=st.integers(0, 5),
        restorable=st.booleans(),
    )
    def hold(self, place: int, stage: int, tier: Tier, size: int, restorable: bool) -> None:
        if (id := self.pick(place)) is not None:
            self.set(id, stage % self.stages, tier, size, restorable)

    @precondition(lambda self: len(self.model) > MANY)
    @rule(stage=st.integers(0, 2), tier=st.sampled_from(Tier))
    def drop_stage(self, stage: int, tier: Tier) -> None:
        stage %= self.stages
        self.index.drop_stage(stage, tier)
        for model in self.model.values():
            model.held.pop((tier, stage), None)
        for id in list(self.model):
            self.forget(id)

    @rule(place=PLACES)
    def pin(self, place: int) -> None:
        if (id := self.pick(place)) is not None:
            self.index.pin(id)
            self.model[id].pins += 1

    @rule(place=PLACES)
    def unpin(self, place: int) -> None:
        pinned = [id for id, model in self.model.items() if model.pins]
        if pinned:
            id = pinned[place % len(pinned)]
            self.index.unpin(id)
            self.model[id].pins -= 1
            self.forget(id)

    @rule(seed=SEEDS, runs=RUNS, short=st.integers(-2, 30), later=st.floats(0, 1000))
    def longest(self, seed: int, runs: list[tuple[int, int]], short: int, later: float) -> None:
        self.now += later
        prompt = self.prompt(seed, runs)
        limit = len(prompt) - short
        match = self.index.longest(pack(prompt), limit, self.now)
        wanted = prompt[: max(0, limit)]
        assert match.tokens == max((self.reach(id, wanted) for id in self.model), default=0)
        if match.blocks:
            assert match.tokens == self.reach(match.blocks[-1], wanted)
            assert list(match.blocks) == self.path(match.blocks[-1])
        for id in match.blocks:
            self.model[id].uses.append(self.now)

    def path(self, id: BlockId) -> list[BlockId]:
        """The block and all before it, the first one first; empty where one of them is not known."""
        blocks = [id]
        while (parent := self.model[blocks[0]].entry.parent) != ROOT:
            if parent not in self.model:
                return []
            blocks.insert(0, parent)
        return blocks

    def reach(self, id: BlockId, wanted: list[int]) -> int:
        """How many of the wanted tokens are known if the match ends with this block; 0: it cannot."""
        path = [self.model[each] for each in self.path(id)]
        if not path or not all(model.usable(self.stages) for model in path):
            return 0
        packed = b"".join(model.entry.tokens for model in path)
        before, last = len(packed) // 4 - len(path[-1].entry.tokens) // 4, len(path[-1].entry.tokens) // 4
        shared = next(
            (n for n, t in enumerate(wanted) if packed[4 * n : 4 * n + 4] != pack([t])), len(wanted)
        )
        if before != (len(path) - 1) * SIZE:
            return 0
        if self.trimmable:
            return shared if shared >= before + LEAST_PART else 0
        whole = shared == before + last
        return shared if whole and path[-1].restorable(self.stages) else 0

    @precondition(lambda self: len(self.model) > MANY)
    @rule(stage=st.integers(0, 2), tier=st.sampled_from(Tier), size=st.integers(1, 40), give=st.booleans())
    def victims(self, stage: int, tier: Tier, size: int, give: bool) -> None:
        stage %= self.stages
        chosen = self.index.victims(tier, stage, size)
        held = {id: model for id, model in self.model.items() if (tier, stage) in model.held}
        freed = 0
        for id in [*chosen, None]:
            parents = {model.entry.parent for model in held.values()}
            leaves = {leaf: each for leaf, each in held.items() if leaf not in parents and not each.pins}
            if id is None:
                assert freed >= size or not leaves
                break
            assert freed < size, "more than was needed"
            assert leaves[id].score <= min(model.score for model in leaves.values()) + 1e-6
            freed += held.pop(id).held[tier, stage][0]
        if give:
            for id in chosen:
                self.set(id, stage, tier, 0, False)

    @invariant()
    def the_books_agree(self) -> None:
        self.index.check()
        for id, model in self.model.items():
            assert self.index.knows(id)
            for tier in Tier:
                missing = tuple(s for s in range(self.stages) if (tier, s) not in model.held)
                assert self.index.missing(id, tier) == missing
            assert self.index.is_hot(id) == (not self.index.missing(id, HOT))
        counts = self.index.counts()
        assert counts.blocks == len(self.model)
        assert counts.pinned == sum(model.pins > 0 for model in self.model.values())
        for tier, bytes in ((HOT, counts.hot_bytes), (COLD, counts.cold_bytes)):
            for stage in range(self.stages):
                parts = (model.held.get((tier, stage), (0, False))[0] for model in self.model.values())
                assert self.index.used_bytes(stage, tier) == bytes[stage] == sum(parts)


TestOperations = Operations.TestCase
TestOperations.settings = hypothesis_settings(max_examples=100, stateful_step_count=40, deadline=None)


@hypothesis_settings(deadline=None)
@given(kept=st.lists(RUNS, max_size=12), asked=RUNS, trimmable=st.booleans())
def test_a_block_s_children_are_told_apart_however_much_alike(
    kept: list[list[tuple[int, int]]], asked: list[tuple[int, int]], trimmable: bool
) -> None:
    known = index(trimmable)
    prompt = seq(*asked)[:SIZE]
    best = 0
    for runs in kept:
        child = seq(*runs)[:SIZE]
        keep(known, child)
        shared = next((n for n, (a, b) in enumerate(zip(child, prompt, strict=False)) if a != b), None)
        shared = min(len(child), len(prompt)) if shared is None else shared
        if (shared >= LEAST_PART) if trimmable else shared == len(child):
            best = max(best, shared)
    assert longest(known, prompt).tokens == best


# Speed

BLOCKS = 100_000
PROMPT = 100_000
LOOKUP_S = 0.005


def best_of_five(act: Callable[[], object]) -> float:
    """Seconds. The best, because other programs can only make it longer."""
    times = []
    for _ in range(5):
        begun = perf_counter()
        act()
        times.append(perf_counter() - begun)
    return min(times)


@pytest.fixture(scope="module")
def crowd() -> tuple[PrefixIndex, bytes]:
    """100,000 blocks of 256 tokens on two stages, and one of the 256 prompts whose blocks they are."""
    known = PrefixIndex(ROOT, 256, 2, True)
    chance = random.Random(4)
    prompt = b""
    while known.counts().blocks < BLOCKS:
        prompt = chance.randbytes(4 * PROMPT)
        parent = ROOT
        for place, id in enumerate(chain(ROOT, prompt, 256)):
            known.add(Entry(id, parent, prompt[1024 * place : 1024 * (place + 1)], 256 * place))
            for stage in (0, 1):
                known.hold(id, stage, HOT, 1, True)
            parent = id
    return known, prompt


def test_a_prompt_of_100k_tokens_is_looked_up_among_100k_blocks_within_5_ms(
    crowd: tuple[PrefixIndex, bytes],
) -> None:
    known, prompt = crowd
    assert known.longest(prompt, PROMPT, 1.0).tokens == PROMPT // 256 * 256
    seconds = best_of_five(lambda: known.longest(prompt, PROMPT, 2.0))
    assert seconds < LOOKUP_S


def test_victims_are_chosen_without_looking_at_all_blocks(crowd: tuple[PrefixIndex, bytes]) -> None:
    known, _ = crowd
    known.victims(HOT, 0, 1)
    seconds = best_of_five(lambda: known.victims(HOT, 0, 10))
    assert seconds < 0.001


def test_among_ten_thousand_children_the_closest_is_found_at_once() -> None:
    known = PrefixIndex(ROOT, 256, 1, True)
    chance = random.Random(4)
    same = pack(range(200))
    for _ in range(10_000):
        tokens = same + chance.randbytes(4 * 56)
        id = name(ROOT, tokens)
        known.add(Entry(id, ROOT, tokens, 0))
        known.hold(id, 0, HOT, 1, True)
    prompt = tokens[:-4] + b"\0\0\0\0"
    assert known.longest(prompt, 256, 1.0) == Match((id,), 255)
    seconds = best_of_five(lambda: known.longest(prompt, 256, 2.0))
    assert seconds < 0.001
