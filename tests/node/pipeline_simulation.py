"""Stages that compute nothing and take exactly their costs: the real scheduler against a simulated clock.

A stage starts a plan when it has finished the one before it and the stage in front has handed it over; the
first one also waits for the draws that the plan looks ahead to. All of that is known when a plan is sent, so
results and arrivals are the only events, and a minute of a pipeline's life takes a second.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from omlx.errors import Full
from omlx.ids import SeqId
from omlx.node.costs import StageCost
from omlx.node.limits import Limits
from omlx.node.meters import Meters
from omlx.node.pacing import HOP_S, Pace
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.step import Sampled, SamplingParams, Slice, StepPlan, StepResult, Work
from omlx.node.wire import PlanTimes

HEAD_S = 0.0005
"""From the last stage to the head, or from the head to the first stage."""
AHEAD = 3
"""What the engine takes for steps of more than eight milliseconds."""
ALL_ROWS = frozenset(range(1, 129))


@dataclass(slots=True)
class Reply:
    """One request, and when each of its tokens came, in seconds since the simulation began."""

    prompt: int
    answer: int
    asked_s: float
    token_s: list[float] = field(default_factory=list)
    plans_waited: int = 0
    """Plans from its arrival to its first token."""

    @property
    def first_s(self) -> float:
        return self.token_s[0] - self.asked_s

    def gaps(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        """Seconds between tokens that both came in this time."""
        inside = [at for at in self.token_s if since_s <= at <= until_s]
        return [after - before for before, after in pairwise(inside)]


def simulated(
    costs: Sequence[StageCost], learned: bool = False, places: int = 64, step_tokens: int = 512
) -> "Simulation":
    """A pipeline of stages with these costs. learned: the scheduler knows what it has measured, else all."""
    limits = Limits(
        places=places,
        queue=1000,
        stages=len(costs),
        step_tokens=step_tokens,
        slowdown=2.7,
        capacity_tokens=10**9,
        mixes=costs[0].mixes,
    )
    scheduler = Scheduler(limits, ahead=AHEAD, pace=Pace() if learned else Pace(tuple(costs), ALL_ROWS))
    meters = Meters() if learned else None
    if meters is not None:
        meters.begin(len(costs), costs[0].mixes)
    return Simulation(tuple(costs), scheduler, meters)


@dataclass(slots=True)
class Simulation:
    """Ask, then run; the replies say when their tokens came."""

    costs: tuple[StageCost, ...]
    scheduler: Scheduler
    meters: Meters | None = None
    now: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)
    busy: list[list[tuple[float, float]]] = field(init=False)
    """Of each stage: from when to when it computed, plan by plan."""
    _asked: list[Reply] = field(default_factory=list)
    _running: dict[SeqId, Reply] = field(default_factory=dict)
    _drawn: dict[SeqId, float] = field(default_factory=dict)
    """When the latest draw of a sequence reaches the first stage."""
    _results: deque[tuple[float, StepPlan]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.busy = [[] for _ in self.costs]

    def ask(self, prompt: int, answer: int, at_s: float = 0.0) -> Reply:
        reply = Reply(prompt, answer, at_s)
        self._asked.append(reply)
        return reply

    def run(self) -> "Simulation":
        """Until every reply is complete."""
        arrivals = deque(sorted(self._asked, key=lambda reply: reply.asked_s))
        while arrivals or self._running:
            if arrivals and (not self._results or arrivals[0].asked_s <= self._results[0][0]):
                reply = arrivals.popleft()
                self.now = max(self.now, reply.asked_s)
                self._arrive(reply)
            else:
                self.now, plan = self._results.popleft()
                self._commit(plan)
            while (following := self.scheduler.next_plan()) is not None:
                self._send(following)
            assert self._results or not self._running, "requests run, and no plan is on its way"
        return self

    def busy_share(self, since_s: float, until_s: float) -> float:
        """Of this time, over all stages: how much they computed."""
        spans = [span for stage in self.busy for span in stage]
        inside = sum(max(0.0, min(end, until_s) - max(begin, since_s)) for begin, end in spans)
        return inside / (until_s - since_s) / len(self.costs)

    def _arrive(self, reply: Reply) -> None:
        request = Request(tuple([1] * reply.prompt), SamplingParams(), reply.answer, frozenset())
        try:
            seq = self.scheduler.add(request)
        except Full as full:
            raise AssertionError("the simulated queue is endless") from full
        self._running[seq] = reply
        reply.plans_waited = -len(self.plans)

    def _send(self, plan: StepPlan) -> None:
        at = self.now + HEAD_S
        if self.meters is not None:
            self.meters.sent(plan)
        looked_for = [self._drawn[piece.seq] for piece in plan.slices if not piece.tokens]
        at = max([at, *looked_for])
        for stage, cost in enumerate(self.costs):
            free = self.busy[stage][-1][1] if self.busy[stage] else 0.0
            begin = max(at, free)
            end = begin + seconds(cost, plan.slices)
            self.busy[stage].append((begin, end))
            at = end + (HOP_S if len(self.costs) > 1 else 0.0)
        for piece in plan.slices:
            if piece.sample:
                self._drawn[piece.seq] = at
        self.plans.append(plan)
        self._results.append((at + HEAD_S, plan))

    def _commit(self, plan: StepPlan) -> None:
        drawn = tuple(Sampled(piece.seq, 7) for piece in plan.slices if piece.sample)
        if self.meters is not None:
            for stage, spans in enumerate(self.busy):
                begin, end = spans[plan.id]
                self.meters.measured(stage, (PlanTimes(plan.id, end - begin, begin, begin, begin, end, end),))
            self.scheduler.pace = self.meters.pace()
        for seq, token in self.scheduler.commit(StepResult(plan.id, plan.epoch, drawn)):
            reply = self._running[seq]
            if not reply.token_s:
                reply.plans_waited += len(self.plans)
            reply.token_s.append(self.now)
            if token.finish is not None:
                del self._running[seq]


def seconds(cost: StageCost, slices: Sequence[Slice]) -> float:
    """A stage's time: one forward for all where it mixes, else one for the rows and one for each chunk."""
    rows = sum(len(piece.tokens) <= 1 and piece.sample for piece in slices)
    chunks = [piece for piece in slices if len(piece.tokens) > 1 or not piece.sample]
    sizes = [
        (len(piece.tokens), len(piece.tokens) * (piece.start + len(piece.tokens) / 2)) for piece in chunks
    ]
    if cost.mixes:
        return cost.seconds(Work(rows, sum(size for size, _ in sizes), sum(pairs for _, pairs in sizes)))
    return cost.decode(rows) + sum(cost.seconds(Work(0, size, pairs)) for size, pairs in sizes)
