"""What an engine has measured of its stages: their times a plan, fitted, and the sums for whoever watches."""

import time
from collections import OrderedDict
from dataclasses import dataclass

from omlx.ids import PlanId
from omlx.node.cache_figures import CacheFigures
from omlx.node.costs import StageCost, StageMeter
from omlx.node.pacing import Pace, pace_of
from omlx.node.step import StepPlan, Work
from omlx.node.timeline import Timeline
from omlx.node.wire import PlanTimes

REMEMBERED = 4096
"""Plans whose times may still come in."""
WARM_UP = 2
"""A stage's first plans of an epoch are not measured: caches fill, kernels are compiled."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage, since its model was loaded."""

    busy_s: float
    """Its device."""
    cost: StageCost | None
    """As fitted to its latest plans."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model's counters, and what it decides by."""

    running: int
    waiting: int
    in_flight: int
    """Plans on their way."""
    groups: int
    """That decoding requests are dealt into."""
    ahead: int
    """Plans of one group that may be in flight."""
    recoveries: int
    plans: int
    drawn_tokens: int
    """Those that were thrown away behind a stop included."""
    prompt_tokens: int
    """Computed in chunks; after a lost stage they count again."""
    cache: CacheFigures
    stages: tuple[StageFigures, ...]
    rounds: tuple[tuple[int, float], ...]
    """(groups, predicted seconds from token to token) for the answers that run now; empty if unknown."""


class Meters:
    """Owned by the engine. Plan numbers are those of one epoch: `begin` starts another."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.plans = 0
        """That were sent."""
        self.drawn_tokens = 0
        self.prompt_tokens = 0
        self.busy_s: list[float] = []
        self._timeline = timeline
        self._stages: list[StageMeter] = []
        self._sent: OrderedDict[PlanId, Work] = OrderedDict()

    def begin(self, stages: int, mixes: bool) -> None:
        if len(self._stages) != stages:
            self._stages = [StageMeter(mixes) for _ in range(stages)]
            self.busy_s = [0.0] * stages
        self._sent.clear()

    def forget(self) -> None:
        """The stages hold other layers from now on."""
        self._stages = []

    def sent(self, plan: StepPlan) -> None:
        work = plan.work
        self.plans += 1
        self.drawn_tokens += sum(piece.sample for piece in plan.slices)
        self.prompt_tokens += work.tokens
        self._sent[plan.id] = work
        if len(self._sent) > REMEMBERED:
            self._sent.popitem(last=False)
        if self._timeline is not None:
            self._timeline.sent(plan, time.monotonic())

    def in_flight(self, plans: int) -> None:
        if self._timeline is not None:
            self._timeline.in_flight(plans, time.monotonic())

    def measured(self, stage: int, times: tuple[PlanTimes, ...]) -> None:
        """Of plans of this epoch."""
        for plan in times:
            self.busy_s[stage] += plan.busy_s
            work = self._sent.get(plan.plan)
            if work is None:
                continue
            if plan.plan >= WARM_UP:
                self._stages[stage].add(work, plan.busy_s)
            if self._timeline is not None:
                self._timeline.stage(stage, work, plan)

    def stages(self) -> tuple[StageFigures, ...]:
        return tuple(
            StageFigures(busy_s, meter.cost())
            for busy_s, meter in zip(self.busy_s, self._stages, strict=True)
        )

    def pace(self) -> Pace:
        return pace_of([meter.cost() for meter in self._stages], [meter.known_rows for meter in self._stages])

    def close(self) -> None:
        if self._timeline is not None:
            self._timeline.close()
