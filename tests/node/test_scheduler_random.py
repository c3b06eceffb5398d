"""The scheduler under random operations, recounted after each, and under an endless stream of prompts."""

from collections import Counter
from dataclasses import replace
from math import ceil

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.errors import Full
from omlx.ids import SeqId
from omlx.node.costs import StageCost
from omlx.node.pacing import LEAST_CHUNK, Pace
from omlx.node.scheduler import Scheduler
from omlx.node.step import StepPlan
from tests.node.test_scheduler import STOP, limits, request, result

LEAST_SHARE = (512 // 4 - LEAST_CHUNK) // 2
"""Of a step of 512 tokens, beside answers on unmeasured stages: half of what the oldest prompt leaves."""


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(1, 4),
    mixes=st.booleans(),
    ahead=st.integers(1, 4),
    long=st.integers(600, 3000),
    short=st.integers(20, 300),
    before=st.integers(0, 4),
)
def test_a_stream_of_short_prompts_starves_neither_a_long_one_nor_the_answers(
    stages: int, mixes: bool, ahead: int, long: int, short: int, before: int
) -> None:
    """The long prompt is computed LEAST_SHARE tokens a round at least, and a round is at most 2 * stages
    plans: a group for each stage and one more, and a stage less of chunks alone."""
    scheduler = Scheduler(limits(8, stages, 512, 10**6, mixes, queue=16), ahead)
    for _ in range(before):
        scheduler.add(request(short, 4))
    wanted = scheduler.add(request(long, 4))
    round_plans = 2 * stages
    bound = (ceil(long / LEAST_SHARE) + 1 + ahead) * round_plans
    latest: dict[int, int] = {}
    for count in range(bound):
        while len(scheduler.waiting) < 2:
            scheduler.add(request(short, 4))
        while (plan := scheduler.next_plan()) is None:
            tokens = scheduler.commit(result(scheduler.in_flight[0]))
            if any(seq == wanted for seq, _ in tokens):
                return
        drawn = {piece.seq for piece in plan.slices if piece.sample}
        for seq, sequence in scheduler.running.items():
            if seq in drawn or not sequence.may_draw:
                latest[seq] = count
            assert count - latest.setdefault(seq, count) <= 2 * round_plans, "an answer waits"
    raise AssertionError(f"no token of the long prompt within {bound} plans")


COSTS = st.builds(
    StageCost,
    fixed=st.floats(0, 0.1),
    row=st.floats(0, 0.02),
    chunk=st.floats(0, 0.1),
    token=st.floats(0, 0.01),
    pair=st.sampled_from([0.0, 1e-8, 1e-6]),
    mixes=st.booleans(),
)


class RandomOperations(RuleBasedStateMachine):
    """Any order of adding, planning, committing, cancelling and rewinding keeps the books right."""

    @initialize(
        places=st.integers(1, 6),
        stages=st.integers(1, 4),
        step=st.integers(1, 9),
        capacity=st.integers(5, 60),
        mixes=st.booleans(),
    )
    def start(self, places: int, stages: int, step: int, capacity: int, mixes: bool) -> None:
        self.scheduler = Scheduler(limits(places, stages, step, capacity, mixes, queue=5))
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
        plan = self.scheduler.next_plan()
        if plan is not None:
            self._plan_is_sound(plan)

    def _plan_is_sound(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        seqs = [piece.seq for piece in plan.slices]
        assert len(seqs) == len(set(seqs)), "a sequence is twice in a plan"
        assert not set(plan.drops) & set(seqs)
        assert all(len(piece.tokens) <= 1 or limits.mixes for piece in plan.slices if piece.sample)
        chunks = [piece for piece in plan.slices if len(piece.tokens) > 1 or not piece.sample]
        assert sum(len(piece.tokens) for piece in chunks) <= limits.step_tokens
        fresh = {piece.seq for piece in chunks}
        dealt = [s for s in self.scheduler.running.values() if s.decodes and s.id not in fresh]
        if any(s.known < s.alone_until for s in self.scheduler.running.values()):
            assert len(seqs) <= 1, "a suspect shares its plan"
            return
        sizes = Counter(sequence.group for sequence in dealt)
        assert all(0 <= group < self.scheduler.groups for group in sizes)
        assert max(sizes.values(), default=0) <= ceil(len(dealt) / self.scheduler.groups)

    @rule(costs=st.lists(COSTS, min_size=4, max_size=4), known=st.frozensets(st.integers(1, 8)))
    def measure(self, costs: list[StageCost], known: frozenset[int]) -> None:
        limits = self.scheduler.limits
        stages = tuple(replace(cost, mixes=limits.mixes) for cost in costs[: limits.stages])
        self.scheduler.pace = Pace(stages, known)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        """A forward failed: whoever was in it too often is out, and the epoch is over."""
        running = sorted(self.scheduler.running)
        for seq in self.scheduler.suspect(data.draw(st.lists(st.sampled_from(running), unique=True))):
            self.scheduler.cancel(seq)
            self.ended.add(seq)
        self.scheduler.rewind()

    @rule()
    def forget(self) -> None:
        self.scheduler.pace = Pace()

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
            self.scheduler.check()
        assert not self.scheduler.running and not self.scheduler.waiting


TestRandomOperations = RandomOperations.TestCase
TestRandomOperations.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
