"""The scheduler alone: tables of literals, and random operations with a recount after each."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.errors import Full, OutOfStep
from omlx.ids import SeqId
from omlx.node.scheduler import Limits, Scheduler
from omlx.node.sequence import Finish, Request
from omlx.node.step import Sampled, SamplingParams, StepPlan, StepResult

STOP = 2


def limits(
    places: int = 4,
    queue: int = 8,
    groups: int = 1,
    step_tokens: int = 16,
    mixed_step_tokens: int = 4,
    capacity_tokens: int = 1000,
) -> Limits:
    return Limits(places, queue, groups, step_tokens, mixed_step_tokens, capacity_tokens)


def request(prompt: int = 5, max_tokens: int = 3, sampling: SamplingParams | None = None) -> Request:
    return Request(tuple(range(10, 10 + prompt)), sampling or SamplingParams(), max_tokens, frozenset({STOP}))


def result(plan: StepPlan, token: int = 7) -> StepResult:
    drawn = tuple(Sampled(piece.seq, token) for piece in plan.slices if piece.sample)
    return StepResult(plan.id, plan.epoch, drawn)


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(piece.seq, piece.start, len(piece.tokens), piece.sample) for piece in plan.slices]


def test_a_short_prompt_is_drawn_from_in_its_first_step() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(prompt=5))
    assert shape(scheduler.next_plan()) == [(0, 0, 4, False), (0, 4, 1, True)]


def test_a_long_prompt_is_cut_by_the_step_budget_and_the_answers_go_on_beside_it() -> None:
    scheduler = Scheduler(limits(step_tokens=16, mixed_step_tokens=4))
    scheduler.add(request(prompt=2, max_tokens=9))
    first = scheduler.next_plan()
    assert first is not None
    scheduler.add(request(prompt=40))
    scheduler.commit(result(first))
    assert shape(scheduler.next_plan()) == [(1, 0, 4, False), (0, 2, 1, True)]


def test_with_two_groups_two_plans_of_different_sequences_are_in_flight() -> None:
    scheduler = Scheduler(limits(groups=2))
    for _ in range(4):
        scheduler.add(request(prompt=1, max_tokens=5))
    scheduler.ahead = 1
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first is not None and second is not None
    assert scheduler.next_plan() is None
    rows = [{piece.seq for piece in plan.slices} for plan in (first, second)]
    assert rows == [{0, 2}, {1, 3}]


def test_looking_ahead_the_next_steps_ask_for_tokens_that_nobody_knows_yet() -> None:
    scheduler = Scheduler(limits(), ahead=3)
    scheduler.add(request(prompt=2, max_tokens=9))
    plans = [scheduler.next_plan() for _ in range(3)]
    assert scheduler.next_plan() is None
    draws = [plan.slices[-1] for plan in plans if plan is not None]
    assert [(piece.tokens, piece.start) for piece in draws] == [((11,), 1), ((), 2), ((), 3)]
    scheduler.check()


def test_looking_ahead_never_passes_the_last_token_of_an_answer() -> None:
    scheduler = Scheduler(limits(), ahead=4)
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
    scheduler = Scheduler(limits(groups=3, step_tokens=4))
    scheduler.add(request(prompt=9))
    shapes = [shape(scheduler.next_plan()) for _ in range(2)]
    assert shapes == [[(0, 0, 4, False)], [(0, 4, 4, False), (0, 8, 1, True)]]


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
    scheduler = Scheduler(limits(groups=2))
    scheduler.add(request(prompt=1))
    scheduler.add(request(prompt=1))
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first is not None and second is not None
    with pytest.raises(OutOfStep):
        scheduler.commit(result(second))


def test_after_a_rewind_everything_known_is_computed_again_and_penalties_get_their_history() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(prompt=3, sampling=SamplingParams(presence_penalty=1.0)))
    plan = scheduler.next_plan()
    assert plan is not None
    scheduler.commit(result(plan, token=7))
    scheduler.next_plan()
    scheduler.rewind()
    again = scheduler.next_plan()
    assert again is not None
    assert (again.id, again.epoch) == (0, 1)
    assert shape(again) == [(0, 0, 3, False), (0, 3, 1, True)]
    assert (again.admits[0].prompt, again.admits[0].answer) == ((10, 11, 12), (7,))


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


class RandomOperations(RuleBasedStateMachine):
    """Any order of adding, planning, committing, cancelling and rewinding keeps the books right."""

    @initialize(
        places=st.integers(1, 4),
        groups=st.integers(1, 3),
        step=st.integers(1, 9),
        capacity=st.integers(5, 60),
        ahead=st.integers(1, 4),
    )
    def start(self, places: int, groups: int, step: int, capacity: int, ahead: int) -> None:
        self.scheduler = Scheduler(limits(places, 5, groups, step, max(1, step // 2), capacity), ahead)
        self.answers: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.ended: set[int] = set()

    @rule(prompt=st.integers(1, 20), max_tokens=st.integers(1, 6))
    def add(self, prompt: int, max_tokens: int) -> None:
        try:
            seq = self.scheduler.add(request(prompt, max_tokens))
        except Full:
            return
        self.wanted[seq], self.answers[seq] = max_tokens, 0

    @rule()
    def plan(self) -> None:
        self.scheduler.next_plan()

    @precondition(lambda self: self.scheduler.in_flight)
    @rule(token=st.sampled_from([STOP, 7, 8]))
    def commit(self, token: int) -> None:
        for seq, drawn in self.scheduler.commit(result(self.scheduler.in_flight[0], token)):
            assert seq not in self.ended
            self.answers[seq] += 1
            assert self.answers[seq] <= self.wanted[seq]
            if drawn.finish is not None:
                self.ended.add(seq)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq = SeqId(data.draw(st.sampled_from(sorted(self.wanted))))
        self.scheduler.cancel(seq)
        self.ended.add(seq)

    @rule(ahead=st.integers(1, 4))
    def look(self, ahead: int) -> None:
        self.scheduler.ahead = ahead

    @rule()
    def rewind(self) -> None:
        self.scheduler.rewind()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        """Whatever happened, everybody still there finishes: nothing starves, nothing is stuck."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            while self.scheduler.next_plan() is not None:
                pass
            if not self.scheduler.in_flight:
                break
            self.scheduler.commit(result(self.scheduler.in_flight[0]))
        assert not self.scheduler.running and not self.scheduler.waiting


TestRandomOperations = RandomOperations.TestCase
TestRandomOperations.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
