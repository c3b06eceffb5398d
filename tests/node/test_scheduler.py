"""The scheduler alone, in tables of literals."""

from dataclasses import replace

import pytest

from omlx.errors import Full, OutOfStep
from omlx.ids import BlockId, SeqId
from omlx.node.costs import StageCost
from omlx.node.limits import Limits
from omlx.node.pacing import Pace
from omlx.node.prefixes import Prefixes
from omlx.node.scheduler import WAITED_S, Scheduler
from omlx.node.sequence import Finish, Request
from omlx.node.step import Sampled, SamplingParams, StepPlan, StepResult

STOP = 2


COST = StageCost(fixed=0.02, row=0.001, chunk=0.02, token=0.0003, pair=2e-8, mixes=False)


def limits(
    places: int = 4,
    stages: int = 1,
    step_tokens: int = 16,
    capacity_tokens: int = 1000,
    mixes: bool = False,
    *,
    queue: int = 8,
) -> Limits:
    return Limits(places, queue, stages, step_tokens, 3.0, capacity_tokens, mixes)


def pace(stages: int, mixes: bool = False) -> Pace:
    return Pace((replace(COST, mixes=mixes),) * stages, frozenset(range(1, 33)))


def request(prompt: int = 5, max_tokens: int = 3, sampling: SamplingParams | None = None) -> Request:
    return Request(tuple(range(10, 10 + prompt)), sampling or SamplingParams(), max_tokens, frozenset({STOP}))


def result(plan: StepPlan, token: int = 7) -> StepResult:
    drawn = tuple(Sampled(piece.seq, token) for piece in plan.slices if piece.sample)
    return StepResult(plan.id, plan.epoch, drawn)


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(piece.seq, piece.start, len(piece.tokens), piece.sample) for piece in plan.slices]


def test_where_stages_mix_a_short_prompt_is_drawn_from_in_its_first_step() -> None:
    scheduler = Scheduler(limits(mixes=True))
    scheduler.add(request(prompt=5))
    assert shape(scheduler.next_plan()) == [(0, 0, 5, True)]
    assert shape(scheduler.next_plan()) == [(0, 5, 0, True)]


def test_where_they_do_not_a_prompts_last_token_is_drawn_from_in_the_step_after_it() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(prompt=5))
    assert shape(scheduler.next_plan()) == [(0, 0, 4, False)]
    assert shape(scheduler.next_plan()) == [(0, 4, 1, True)]


@pytest.mark.parametrize("mixes", [True, False])
def test_a_prompt_of_one_token_is_drawn_from_at_once(mixes: bool) -> None:
    scheduler = Scheduler(limits(mixes=mixes))
    scheduler.add(request(prompt=1))
    assert shape(scheduler.next_plan()) == [(0, 0, 1, True)]


def test_a_long_prompt_is_cut_by_the_step_budget_and_the_answers_go_on_beside_it() -> None:
    scheduler = Scheduler(limits(step_tokens=16))
    scheduler.add(request(prompt=1, max_tokens=9))
    first = scheduler.next_plan()
    assert first is not None
    scheduler.add(request(prompt=40))
    scheduler.commit(result(first))
    assert shape(scheduler.next_plan()) == [(1, 0, 4, False), (0, 1, 1, True)]


def test_measured_stages_give_chunks_the_time_that_the_slowdown_leaves() -> None:
    scheduler = Scheduler(limits(step_tokens=512), pace=pace(1))
    scheduler.add(request(prompt=1, max_tokens=9))
    scheduler.next_plan()
    scheduler.add(request(prompt=900))
    plan = scheduler.next_plan()
    assert plan is not None
    chunk, single = plan.slices
    spare_s = 3.0 * scheduler.pace.round_s(1, 1) - COST.decode(1) - COST.chunk
    assert COST.chunk_part(len(chunk.tokens), len(chunk.tokens) ** 2 / 2) == pytest.approx(spare_s, rel=0.02)
    assert single.seq == 0


def test_with_two_groups_two_plans_of_different_sequences_are_in_flight() -> None:
    scheduler = Scheduler(limits(stages=2))
    for _ in range(4):
        scheduler.add(request(prompt=1, max_tokens=5))
    scheduler.ahead = 1
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first is not None and second is not None
    assert scheduler.next_plan() is None
    rows = [{piece.seq for piece in plan.slices} for plan in (first, second)]
    assert rows == [{0, 1}, {2, 3}]


def test_groups_come_strictly_in_turn_whatever_was_committed_first() -> None:
    """Two plans of one group side by side would wait for its draw while the other group's is there."""
    scheduler = Scheduler(limits(stages=2), ahead=3)
    for _ in range(2):
        scheduler.add(request(prompt=1, max_tokens=30))
    turns: list[int] = []
    for _ in range(100):
        while (plan := scheduler.next_plan()) is not None:
            turns += [piece.seq for piece in plan.slices[:1]]  # none: it only drops
        if not scheduler.in_flight:
            break
        scheduler.commit(result(scheduler.in_flight[0]))
        scheduler.ahead = 1 + len(turns) % 3
    assert turns == [0, 1] * 30


def test_with_fewer_groups_than_stages_chunks_have_plans_to_themselves() -> None:
    scheduler = Scheduler(limits(stages=2, step_tokens=512), ahead=2, pace=pace(2))
    scheduler.add(request(prompt=1, max_tokens=30))
    scheduler.next_plan()
    scheduler.add(request(prompt=900))
    plans = [plan for plan in (scheduler.next_plan() for _ in range(4)) if plan is not None]
    assert [[piece.seq for piece in plan.slices] for plan in plans[:2]] in ([[1], [0]], [[0], [1]])


def test_looking_ahead_the_next_steps_ask_for_tokens_that_nobody_knows_yet() -> None:
    scheduler = Scheduler(limits(), ahead=3)
    scheduler.add(request(prompt=2, max_tokens=9))
    first = scheduler.next_plan()
    plans = [scheduler.next_plan() for _ in range(3)]
    assert first is not None and not first.slices[-1].sample
    assert scheduler.next_plan() is None
    draws = [plan.slices[-1] for plan in plans if plan is not None]
    assert [(piece.tokens, piece.start) for piece in draws] == [((11,), 1), ((), 2), ((), 3)]
    scheduler.check()


def test_looking_ahead_never_passes_the_last_token_of_an_answer() -> None:
    scheduler = Scheduler(limits(mixes=True), ahead=4)
    scheduler.add(request(prompt=2, max_tokens=2))
    plans = [plan for plan in (scheduler.next_plan() for _ in range(4)) if plan is not None]
    assert len(plans) == 2
    tokens = [token for plan in plans for _, token in scheduler.commit(result(plan))]
    assert [token.finish for token in tokens] == [None, Finish.LENGTH]


def test_a_stop_found_late_throws_away_what_was_drawn_behind_it() -> None:
    scheduler = Scheduler(limits(), ahead=3)
    scheduler.add(request(prompt=1, max_tokens=9))
    scheduler.add(request(prompt=1, max_tokens=9))
    plans = [scheduler.next_plan() for _ in range(3)]
    first = plans[0]
    assert first is not None
    stopped = StepResult(first.id, first.epoch, (Sampled(SeqId(0), STOP), Sampled(SeqId(1), 7)))
    assert [token.finish for _, token in scheduler.commit(stopped)] == [Finish.STOP, None]
    dropping = scheduler.next_plan()
    assert dropping is not None and dropping.drops == (0,)
    assert [piece.seq for piece in dropping.slices] == [1]
    for plan in plans[1:]:
        assert plan is not None
        assert [seq for seq, _ in scheduler.commit(result(plan))] == [1]
    scheduler.check()


def test_a_newcomer_joins_its_group_while_the_groups_draws_are_on_their_way() -> None:
    scheduler = Scheduler(limits(), ahead=2)
    scheduler.add(request(prompt=1, max_tokens=9))
    scheduler.next_plan()
    scheduler.add(request(prompt=1, max_tokens=9))
    joined = scheduler.next_plan()
    assert joined is not None
    assert [(piece.seq, piece.tokens) for piece in joined.slices] == [(0, ()), (1, (10,))]


def test_chunks_of_one_prompt_follow_each_other_without_waiting_for_results() -> None:
    scheduler = Scheduler(limits(stages=3, step_tokens=4, mixes=True))
    scheduler.add(request(prompt=10))
    shapes = [shape(scheduler.next_plan()) for _ in range(3)]
    assert shapes == [[(0, 0, 4, False)], [(0, 4, 4, False)], [(0, 8, 2, True)]]


def test_a_stop_token_and_the_token_limit_end_a_sequence_and_its_place_is_free() -> None:
    scheduler = Scheduler(limits(places=1))
    scheduler.add(request(prompt=1, max_tokens=2))
    scheduler.add(request(prompt=1, max_tokens=2))
    plan = scheduler.next_plan()
    assert plan is not None
    [(_, token)] = scheduler.commit(result(plan, STOP))
    assert token.finish is Finish.STOP
    for expected in (None, Finish.LENGTH):
        plan = scheduler.next_plan()
        assert plan is not None
        [(seq, token)] = scheduler.commit(result(plan))
        assert (seq, token.finish) == (1, expected)
    assert not scheduler.running


def test_a_cancelled_sequence_is_dropped_by_the_next_plan_and_its_token_thrown_away() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request())
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.cancel(SeqId(0))
    assert scheduler.commit(result(plan)) == []
    dropping = scheduler.next_plan()
    assert dropping is not None
    assert (dropping.drops, dropping.slices) == ((0,), ())


def test_beyond_the_queue_a_request_is_refused_and_nothing_else_changes() -> None:
    scheduler = Scheduler(limits(places=1, queue=1))
    scheduler.add(request())
    scheduler.add(request())
    with pytest.raises(Full):
        scheduler.add(request())
    assert len(scheduler.waiting) == 2


def test_a_result_out_of_order_is_an_error() -> None:
    scheduler = Scheduler(limits(stages=2))
    scheduler.add(request(prompt=1))
    scheduler.add(request(prompt=1))
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first is not None and second is not None
    with pytest.raises(OutOfStep):
        scheduler.commit(result(second))


def answering(scheduler: Scheduler, prompts: list[int]) -> None:
    """Each has a few tokens of its answer."""
    for prompt in prompts:
        scheduler.add(request(prompt, max_tokens=500))
    while not all(len(s.answer) > 2 for s in scheduler.running.values()) or scheduler.waiting:
        plan = scheduler.next_plan()
        assert plan is not None
        scheduler.commit(result(plan))


def drawn_before_all_are_computed(scheduler: Scheduler, cut_off: list[int]) -> list[int]:
    """After a loss: whose next tokens but one are asked for before each of these is computed again."""
    early = []
    while not all(scheduler.running[SeqId(seq)].decodes for seq in cut_off):
        plan = scheduler.next_plan()
        assert plan is not None
        early += [piece.seq for piece in plan.slices if piece.sample and len(piece.tokens) < 2]
        scheduler.commit(result(plan))
    return early


@pytest.mark.parametrize("stages", [1, 3])
def test_after_a_loss_nobody_goes_on_while_another_short_answer_stands_still(stages: int) -> None:
    """Half of twenty streams stood still twice as long as the others, whose tokens took the time."""
    scheduler = Scheduler(limits(places=8, stages=stages, mixes=True))
    answering(scheduler, [9] * 8)
    scheduler.rewind()
    assert drawn_before_all_are_computed(scheduler, list(range(8))) == []
    plan = scheduler.next_plan()
    assert plan is not None and len(plan.slices) > 1


@pytest.mark.parametrize(("prompts", "late"), [([9, 9, 200], [2]), ([9] * 160, [*range(150, 160)])])
def test_for_a_long_answer_and_for_too_many_nobody_waits(prompts: list[int], late: list[int]) -> None:
    scheduler = Scheduler(limits(160, step_tokens=64, capacity_tokens=10**6, mixes=True, queue=160))
    answering(scheduler, prompts)
    scheduler.rewind()
    assert drawn_before_all_are_computed(scheduler, late)


def test_an_answer_that_a_slow_disk_holds_up_is_not_waited_for_longer_than_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Prefixes, "restore", lambda prefixes, sequence, alone: None)
    scheduler = Scheduler(limits(places=2, mixes=True))
    answering(scheduler, [9, 9])
    scheduler.rewind()
    fast, slow = scheduler.running.values()
    slow.begun = True
    slow.restoring.append(BlockId(b"x" * 16))  # whatever comes of it, it has not come
    for now, drawn in ((0.0, [fast.id]), (WAITED_S, []), (WAITED_S + 0.1, [fast.id])):
        scheduler.prefixes.now = now
        plan = scheduler.next_plan()
        assert ([piece.seq for piece in plan.slices if piece.sample] if plan else []) == drawn
        if plan is not None:
            scheduler.commit(result(plan))


def test_nobody_waits_for_an_answer_that_gave_way_to_others() -> None:
    scheduler = Scheduler(limits(places=2, mixes=True, capacity_tokens=40))
    answering(scheduler, [15, 15])
    scheduler.rewind()
    scheduler.limits = replace(scheduler.limits, capacity_tokens=36)
    while not scheduler.waiting:
        plan = scheduler.next_plan()
        assert plan is not None
        scheduler.commit(result(plan))
    (gave_way,) = scheduler.waiting
    assert not gave_way.cut_off


@pytest.mark.parametrize("mixes", [True, False])
def test_after_a_rewind_everything_known_is_computed_again_and_penalties_get_their_history(
    mixes: bool,
) -> None:
    scheduler = Scheduler(limits(mixes=mixes))
    scheduler.add(request(prompt=3, sampling=SamplingParams(presence_penalty=1.0)))
    while not scheduler.running or not scheduler.running[SeqId(0)].answer:
        plan = scheduler.next_plan()
        scheduler.commit(result(plan or scheduler.in_flight[0], token=7))
    scheduler.next_plan()
    scheduler.rewind()
    again = scheduler.next_plan()
    assert again is not None
    assert (again.id, again.epoch) == (0, 1)
    assert shape(again) == [(0, 0, 4, True) if mixes else (0, 0, 3, False)]
    assert (again.admits[0].prompt, again.admits[0].answer) == ((10, 11, 12), (7,))


def test_a_drop_rides_along_with_the_next_plan_of_others() -> None:
    scheduler = Scheduler(limits(mixes=True))
    for _ in range(2):
        scheduler.add(request(prompt=3, max_tokens=9))
    scheduler.next_plan()
    scheduler.cancel(SeqId(0))
    plan = scheduler.next_plan()
    assert plan is not None
    assert (plan.drops, [piece.seq for piece in plan.slices]) == ((0,), [1])


def test_when_memory_is_full_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = Scheduler(limits(capacity_tokens=12))
    scheduler.add(request(prompt=5, max_tokens=4))
    scheduler.add(request(prompt=5, max_tokens=4))
    answers: dict[int, int] = {0: 0, 1: 0}
    sizes = []
    while scheduler.running or scheduler.waiting:
        plan = scheduler.next_plan()
        assert plan is not None
        scheduler.check()
        sizes.append(len(scheduler.running))
        for seq, _ in scheduler.commit(result(plan)):
            answers[seq] += 1
    assert answers == {0: 4, 1: 4}
    assert sizes[0] == 2 and 1 in sizes


@pytest.mark.parametrize("mixes", [True, False])
def test_an_answer_whose_last_token_is_on_its_way_slows_no_prompt_down(mixes: bool) -> None:
    scheduler = Scheduler(limits(step_tokens=64, mixes=mixes))
    scheduler.add(request(prompt=1, max_tokens=1))
    scheduler.next_plan()
    scheduler.add(request(prompt=60))
    assert sum(len(piece.tokens) for piece in scheduler.in_flight[-1].slices) == 1
    plan = scheduler.next_plan()
    assert plan is not None
    assert len(plan.slices[0].tokens) == (60 if mixes else 59)
