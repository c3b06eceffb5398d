"""What an engine makes of its stages' times: sums of everything, fits of what is worth fitting."""

import pytest

from omlx.ids import Epoch, PlanId, SeqId
from omlx.node.costs import StageCost
from omlx.node.meters import WARM_UP, Meters
from omlx.node.pacing import Pace
from omlx.node.step import Slice, StepPlan
from omlx.node.wire import PlanTimes


def plan(number: int, *slices: Slice) -> StepPlan:
    return StepPlan(PlanId(number), Epoch(0), (), (), slices)


def decode(number: int, rows: int = 2) -> StepPlan:
    return plan(number, *(Slice(SeqId(row), (7,), 10, sample=True) for row in range(rows)))


def took(number: int, busy_s: float) -> tuple[PlanTimes, ...]:
    return (PlanTimes(PlanId(number), busy_s, 0.0, 0.0, 0.0, busy_s, busy_s),)


def measured(stages: int, plans: int, busy_s: float = 0.01) -> Meters:
    """Every stage took so long for each of so many decode steps of two rows."""
    meters = Meters()
    meters.begin(stages, mixes=False)
    for number in range(plans):
        meters.sent(decode(number))
        for stage in range(stages):
            meters.measured(stage, took(number, busy_s))
    return meters


def costs(meters: Meters) -> list[StageCost | None]:
    return [stage.cost for stage in meters.stages()]


def test_everything_that_was_sent_and_every_busy_second_is_counted() -> None:
    meters = Meters()
    meters.begin(2, mixes=False)
    meters.sent(decode(0))
    meters.sent(plan(1, Slice(SeqId(0), (1,) * 100, 0, sample=False)))
    meters.measured(0, took(0, 0.5) + took(1, 0.25))
    meters.measured(1, took(0, 1.0))
    assert (meters.plans, meters.prompt_tokens) == (2, 100)
    assert meters.busy_s == [0.75, 1.0]


def test_the_first_plans_of_an_epoch_are_not_fitted() -> None:
    assert costs(measured(stages=1, plans=WARM_UP)) == [None]
    cost = measured(stages=1, plans=WARM_UP + 1).stages()[0].cost
    assert cost is not None
    assert cost.decode(2) == pytest.approx(0.01, rel=0.01)


def test_stages_have_a_pace_once_each_of_them_was_measured() -> None:
    meters = Meters()
    meters.begin(2, mixes=True)
    for number in range(9):
        meters.sent(decode(number))
        meters.measured(0, took(number, 0.01))
    assert meters.pace() == Pace()
    for number in range(9):
        meters.measured(1, took(number, 0.02))
    slow = meters.pace().stages[1]
    assert slow.mixes and slow.decode(2) == pytest.approx(0.02, rel=0.01)
    assert meters.pace().known_rows == {2}


def test_times_of_a_plan_that_nobody_remembers_only_count_as_busy() -> None:
    meters = measured(stages=1, plans=9)
    before = costs(meters)
    meters.measured(0, took(500, 99.0))
    assert costs(meters) == before
    assert meters.busy_s == [pytest.approx(99.09)]


def test_an_epoch_of_as_many_stages_keeps_what_was_measured_and_another_number_starts_anew() -> None:
    meters = measured(stages=2, plans=9)
    known = costs(meters)
    meters.begin(2, mixes=False)
    assert costs(meters) == known
    meters.begin(3, mixes=False)
    assert costs(meters) == [None] * 3
    assert meters.busy_s == [0.0] * 3


def test_a_late_time_of_the_epoch_before_is_not_taken_for_a_plan_of_this_one() -> None:
    meters = measured(stages=1, plans=9)
    known = costs(meters)
    meters.begin(1, mixes=False)
    meters.measured(0, took(5, 77.0))
    assert costs(meters) == known
