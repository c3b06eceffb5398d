"""The head's books of kept prefixes: what stages are told, and when."""

from collections.abc import Iterable, Sequence

import pytest

from omlx.cache.block import chain, name, pack, root_of
from omlx.cache.prefix_index import PrefixIndex, Tier
from omlx.ids import BlockId, SeqId
from omlx.node.hold import Hold
from omlx.node.prefixes import (
    FETCH_WITHIN_S,
    FETCHES,
    FULL,
    IDLE_S,
    RESTORED_TOKENS,
    SPILL_WITHIN_S,
    SPILLS,
    Prefixes,
)
from omlx.node.reading import RETRY_SLOW_S, SAMPLES
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.sequence import Sequence as Answer
from omlx.node.step import SamplingParams
from omlx.node.wire import BlockEntry, Catalogue, Held, Holds
from tests.node.test_scheduler import STOP, limits, request, result

SIZE = 32
ROOT = root_of({"weights": "none"})
BYTES = 100
"""Of a block, on each stage."""


def books(
    stages: int = 1, hot_bytes: int = 10**6, *, cold: bool = True, trimmable: bool = True, size: int = SIZE
) -> Prefixes:
    hold = Hold((hot_bytes,) * stages, cold, size, 2 * size, trimmable)
    return Prefixes(PrefixIndex(ROOT, size, stages, trimmable), hold)


def tokens(count: int, first: int = 100) -> list[int]:
    return list(range(first, first + count))


def sequence(known: Sequence[int], number: int = 0, computed: int = 0) -> Answer:
    asked = Request(tuple(known), SamplingParams(), 10, frozenset({STOP}))
    return Answer(SeqId(number), asked, tokens=list(known), issued=computed, computed=computed)


def entries(known: Sequence[int], size: int = SIZE) -> list[BlockEntry]:
    made, parent = [], ROOT
    for start in range(0, len(known), size):
        packed = pack(known[start : start + size])
        made.append(BlockEntry(name(parent, packed), parent, packed, start))
        parent = made[-1].id
    return made


def say(to: Prefixes, tier: str, ids: Iterable[BlockId], bytes: int = BYTES, seconds: float = 0.0) -> None:
    """Every stage has, or has not, these blocks."""
    held = tuple(Held(id, bytes, bytes > 0) for id in ids)
    for stage in range(to.stages):
        to.held(stage, Holds("hot" if tier == "hot" else "cold", held, seconds * len(held)))
    to.index.check()


def keep(to: Prefixes, known: Sequence[int]) -> list[BlockId]:
    """A sequence computes all of these and leaves; every stage keeps it."""
    ids = [one.block for one in to.keeps(sequence(known, 99, len(known)), last=True)]
    say(to, "hot", ids)
    return ids


def find(to: Prefixes, known: Sequence[int]) -> list[BlockId]:
    """Every stage finds all of these on its SSD."""
    found = entries(known, to.hold.block_tokens)
    held = tuple(Held(entry.id, BYTES, True) for entry in found)
    for stage in range(to.stages):
        to.found(stage, Catalogue(tuple(found), held))
    return [entry.id for entry in found]


def begun(to: Prefixes, known: Sequence[int], number: int = 0, block_compute_s: float = 0.0) -> Answer:
    one = sequence(known, number)
    to.begin(one, block_compute_s)
    return one


# What is kept


def test_whole_blocks_are_kept_as_soon_as_they_are_computed_and_the_rest_when_the_turn_ends() -> None:
    all_books, one = books(), sequence(tokens(3 * SIZE))
    one.issued = one.computed = 2 * SIZE + 20
    whole = all_books.keeps(one, last=False)
    assert [(made.start, made.end) for made in whole] == [(0, SIZE), (SIZE, 2 * SIZE)]
    assert [made.block for made in whole] == chain(ROOT, pack(one.tokens), SIZE)[:2]
    assert all_books.keeps(one, last=False) == []
    (rest,) = all_books.keeps(one, last=True)
    assert (rest.start, rest.end) == (2 * SIZE, 2 * SIZE + 20)


def test_a_rest_of_a_few_tokens_is_not_worth_a_block() -> None:
    all_books, one = books(), sequence(tokens(3 * SIZE), computed=SIZE + 15)
    assert [made.end for made in all_books.keeps(one, last=True)] == [SIZE]


def test_two_sequences_that_compute_the_same_keep_it_once() -> None:
    all_books = books(stages=2)
    first, second = (sequence(tokens(2 * SIZE), number, 2 * SIZE) for number in range(2))
    asked = all_books.keeps(first, last=False)
    assert all_books.keeps(second, last=False) == []
    assert second.path == first.path == [made.block for made in asked]
    say(all_books, "hot", first.path)
    assert all_books.keeps(sequence(tokens(2 * SIZE), 2, 2 * SIZE), last=False) == []
    assert all_books.index.counts().pinned == 0


def test_a_cancelled_prompt_keeps_its_whole_blocks() -> None:
    scheduler = Scheduler(limits(step_tokens=2 * SIZE + 8), prefixes=books())
    seq = scheduler.add(request(10 * SIZE))
    plan = scheduler.next_plan()
    assert plan is not None and plan.slices[0].end == 2 * SIZE + 8
    scheduler.commit(result(plan))
    scheduler.cancel(seq)
    plan = scheduler.next_plan()
    assert plan is not None and plan.drops == (seq,)
    assert [(made.start, made.end) for made in plan.keeps] == [(0, SIZE), (SIZE, 2 * SIZE)]


def test_what_a_stage_keeps_of_a_forgotten_block_leaves_its_memory() -> None:
    """An epoch ended between the keep and its answer, and nobody asks for that block again."""
    all_books = books()
    (asked,) = all_books.keeps(sequence(tokens(SIZE), computed=SIZE), last=False)
    all_books.rewind()
    say(all_books, "hot", [asked.block])
    assert all_books.evicts() == (asked.block,)
    assert all_books.evicts() == ()


# What is laid back


def test_restores_beside_running_answers_are_cut() -> None:
    all_books = books(size=256)
    known = tokens(2 * RESTORED_TOKENS + 300)
    keep(all_books, known)
    one = begun(all_books, known)
    cut = all_books.restore(one, alone=False)
    assert cut is not None and (cut.start, cut.end) == (0, RESTORED_TOKENS)
    rest = all_books.restore(one, alone=True)
    assert rest is not None and (rest.start, rest.end) == (RESTORED_TOKENS, len(known) - 1)
    assert all_books.index.counts().pinned == 0


def test_a_block_of_more_tokens_than_that_is_laid_back_beside_answers_too() -> None:
    all_books = books(size=2 * RESTORED_TOKENS)
    known = tokens(4 * RESTORED_TOKENS)
    keep(all_books, known)
    cut = all_books.restore(begun(all_books, known), alone=False)
    assert cut is not None and cut.end == 2 * RESTORED_TOKENS


def test_an_epoch_that_ends_while_something_is_laid_back_makes_its_sequence_compute() -> None:
    """Perhaps it ended because of that."""
    scheduler = Scheduler(limits(step_tokens=400), prefixes=books())
    known = request(4 * SIZE)
    blocks = keep(scheduler.prefixes, known.prompt)
    scheduler.add(known)
    plan = scheduler.next_plan()
    assert plan is not None and [restore.end for restore in plan.restores] == [4 * SIZE - 1]
    scheduler.rewind()
    again = scheduler.next_plan()
    assert again is not None and not again.restores and again.slices[0].start == 0
    assert set(again.evicts) == set(blocks)
    scheduler.check()
    scheduler.prefixes.index.check()


# The SSD


def test_of_a_model_that_cannot_be_cut_every_block_is_fetched_however_many() -> None:
    """It waited for ever: nothing is laid back before all of it is hot, and only the first were asked for."""
    all_books = books(trimmable=False)
    ids = find(all_books, tokens((2 * FETCHES + 1) * SIZE))
    one = begun(all_books, tokens(len(ids) * SIZE + 1))
    asked: list[BlockId] = []
    while fetches := all_books.fetches([one]):
        assert len(fetches) <= FETCHES
        asked += fetches
        say(all_books, "hot", fetches)
    assert asked == ids
    restore = all_books.restore(one, alone=True)
    assert restore is not None and restore.end == len(ids) * SIZE
    assert all_books.index.counts().pinned == 0


def test_a_sequence_that_leaves_while_its_blocks_are_fetched_leaves_no_pin() -> None:
    all_books = books(stages=2)
    find(all_books, tokens(3 * SIZE))
    one = begun(all_books, tokens(3 * SIZE))
    fetches = all_books.fetches([one])
    all_books.leave(one)
    assert all_books.index.counts().pinned == len(fetches) == 3
    say(all_books, "hot", fetches)
    assert all_books.index.counts().pinned == 0


@pytest.mark.parametrize("answers", [True, False])
def test_what_cannot_be_read_or_does_not_come_is_computed(answers: bool) -> None:
    all_books = books(stages=2)
    find(all_books, tokens(3 * SIZE))
    one = begun(all_books, tokens(3 * SIZE))
    fetches = all_books.fetches([one])
    assert all_books.restore(one, alone=True) is None and one.restoring
    if answers:
        all_books.held(1, Holds("cold", (Held(fetches[0], 0),)))
        all_books.held(1, Holds("hot", (Held(fetches[0], 0),)))
    else:
        all_books.now += FETCH_WITHIN_S + 0.1
    assert all_books.restore(one, alone=True) is None and not one.restoring
    assert one.computes and one.path == []
    assert all_books.counters.given_up_fetches == 1


def test_a_slow_disk_is_given_up_for_computing_and_tried_again_later() -> None:
    all_books = books()
    find(all_books, tokens((SAMPLES + 3) * SIZE))
    first = begun(all_books, tokens(SAMPLES * SIZE + 1), block_compute_s=0.1)
    say(all_books, "hot", all_books.fetches([first]), seconds=0.5)
    asked = tokens((SAMPLES + 3) * SIZE)
    hot = begun(all_books, asked, block_compute_s=0.1)
    assert len(hot.restoring) == SAMPLES, "what needs no reading is laid back"
    assert hot.restore_end == SAMPLES * SIZE
    assert len(begun(all_books, asked, block_compute_s=1.0).restoring) == SAMPLES + 3
    assert len(begun(all_books, asked, block_compute_s=0.1).restoring) == SAMPLES
    all_books.now += RETRY_SLOW_S + 1
    assert len(begun(all_books, asked, block_compute_s=0.1).restoring) == SAMPLES + 3


def test_blocks_are_written_when_they_are_a_moment_old_and_a_few_at_a_time() -> None:
    all_books = books(stages=2)
    ids = keep(all_books, tokens((SPILLS + 2) * SIZE))
    all_books.now += IDLE_S - 0.1
    assert all_books.spills() == ()
    all_books.now += 0.2
    assert [entry.id for entry in all_books.spills()] == ids[:SPILLS]
    assert all_books.spills() == ()
    say(all_books, "cold", ids[:SPILLS])
    assert [entry.id for entry in all_books.spills()] == ids[SPILLS:]
    say(all_books, "cold", ids[SPILLS:], bytes=0)
    assert all_books.dirty == 0 and not all_books.busy
    assert (all_books.counters.spilled_blocks, all_books.counters.dropped_writes) == (SPILLS, 2)


def test_at_the_end_everything_is_written_however_young() -> None:
    all_books = books()
    ids = keep(all_books, tokens(2 * SIZE))
    assert [entry.id for entry in all_books.spills(all_of_them=True)] == ids


def test_blocks_are_written_before_they_are_evicted_and_heads_before_tails() -> None:
    """On the SSD, too, a tail without its head is worthless; in memory the tail goes first."""
    all_books = books(hot_bytes=int(10 * BYTES / FULL))
    ids = keep(all_books, tokens(12 * SIZE))
    written: list[BlockId] = []
    for _ in range(12):
        assert all_books.evicts() == () or set(ids[-2:]) <= set(written)
        now = [entry.id for entry in all_books.spills()]
        say(all_books, "cold", now)
        written += now
        all_books.now += IDLE_S / 20
    assert written == ids, "at once, and none of them is old"
    assert all_books.index.used_bytes(0, Tier.HOT) == 10 * BYTES
    assert all_books.counters.dropped_writes == 0


def test_far_beyond_the_budget_blocks_go_unwritten_and_that_is_counted() -> None:
    all_books = books(hot_bytes=20 * BYTES)
    keep(all_books, tokens(40 * SIZE))
    gone = all_books.evicts()
    assert len(gone) == all_books.counters.dropped_writes == 40 - 20
    assert all_books.index.used_bytes(0, Tier.HOT) == 20 * BYTES
    all_books.index.check()


def test_without_an_ssd_nothing_is_written_and_the_budget_holds() -> None:
    all_books = books(hot_bytes=10 * BYTES, cold=False)
    keep(all_books, tokens(12 * SIZE))
    assert len(all_books.evicts()) == 12 - FULL * 10 and all_books.dirty == 0
    assert all_books.spills(all_of_them=True) == ()


def test_uneven_stages_give_up_no_more_of_the_ssd_than_is_over_the_budget() -> None:
    """The first stage has one layer of ten: what all stages had to give up was asked of it alone."""
    all_books = books(stages=2)
    found = entries(tokens(100 * SIZE))
    for stage, bytes in enumerate((1, 9)):
        all_books.found(stage, Catalogue(tuple(found), tuple(Held(entry.id, bytes) for entry in found)))
    assert all_books.purges(0) == ()
    assert len(all_books.purges(100)) == 10


def test_what_is_wanted_is_not_deleted() -> None:
    all_books = books()
    ids = find(all_books, tokens(4 * SIZE))
    one = begun(all_books, tokens(2 * SIZE + 1))
    assert all_books.purges(10**9) == tuple(reversed(ids[2:]))
    all_books.leave(one)
    say(all_books, "cold", ids[2:], bytes=0)
    assert all_books.purges(10**9) == tuple(reversed(ids[:2]))


def test_blocks_of_another_size_on_the_ssd_are_passed_over() -> None:
    all_books = books()
    found = entries(tokens(4 * SIZE), 2 * SIZE)
    all_books.found(0, Catalogue(tuple(found), tuple(Held(entry.id, BYTES) for entry in found)))
    assert all_books.index.counts().blocks == 0


# When stages or disks do not answer


def test_blocks_that_never_come_hold_up_nobody_who_wants_others() -> None:
    all_books = books()
    find(all_books, tokens(FETCHES * SIZE))
    find(all_books, tokens(2 * SIZE, first=900))
    first, second = begun(all_books, tokens(FETCHES * SIZE + 1)), begun(all_books, tokens(2 * SIZE, 900), 1)
    assert len(all_books.fetches([first, second])) == FETCHES
    all_books.now += FETCH_WITHIN_S + 1
    for one in (first, second):
        assert all_books.restore(one, alone=True) is None
        assert one.computes
    assert not begun(all_books, tokens(2 * SIZE, 900), 2).restoring, "the disk gives nothing any more"


def test_an_eviction_of_an_epoch_that_is_over_is_told_again() -> None:
    """Else a stage that had not come to it keeps a block that nobody knows of."""
    scheduler = Scheduler(limits(), prefixes=books(hot_bytes=0, cold=False))
    blocks = keep(scheduler.prefixes, tokens(2 * SIZE))
    plan = scheduler.next_plan()
    assert plan is not None and set(plan.evicts) == set(blocks)
    scheduler.rewind()
    again = scheduler.next_plan()
    assert again is not None and set(again.evicts) == set(blocks)


def test_what_is_being_deleted_is_not_asked_to_be_deleted_again() -> None:
    """A message for each answer, with all that are left: it grew with the square of the blocks."""
    all_books = books(stages=2)
    ids = find(all_books, tokens(4 * SIZE))
    assert len(all_books.purges(8 * BYTES)) == 4
    all_books.held(0, Holds("cold", (Held(ids[3], 0),)))
    assert all_books.purges(7 * BYTES) == ()


def test_without_any_room_in_memory_the_ssd_is_written_all_the_same() -> None:
    all_books = books(hot_bytes=0)
    ids = keep(all_books, tokens(2 * SIZE))
    assert all_books.evicts() == ()
    written = [entry.id for entry in all_books.spills()]
    assert set(written) == set(ids)
    say(all_books, "cold", written)
    assert set(all_books.evicts()) == set(ids)
    assert all_books.counters.spilled_blocks == 2


def test_a_writer_that_never_answers_does_not_hold_up_the_blocks_behind() -> None:
    all_books = books()
    ids = keep(all_books, tokens((SPILLS + 1) * SIZE))
    all_books.now += IDLE_S
    assert [entry.id for entry in all_books.spills()] == ids[:SPILLS]
    all_books.now += SPILL_WITHIN_S
    assert all_books.spills() == ()
    all_books.now += 1
    assert [entry.id for entry in all_books.spills()] == ids[SPILLS:]
    assert all_books.counters.dropped_writes == SPILLS
    say(all_books, "cold", ids[:1])  # late, and right all the same
    assert not all_books.index.missing(ids[0], Tier.COLD)
    all_books.index.check()
