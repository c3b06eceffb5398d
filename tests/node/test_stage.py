"""One stage alone: what it has in the air, and who is to blame when that cannot be computed."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import mlx.core as mx
import pytest

from bench.engines import model_folder
from omlx.errors import StepFailed
from omlx.ids import Epoch, PlanId, SeqId
from omlx.node.loader import load_span
from omlx.node.slicing import Cut
from omlx.node.stage import Finished, Launched, Stage
from omlx.node.step import Admit, SamplingParams, Slice, StepPlan

EPOCH = Epoch(1)
PROMPTS = ((11, 12, 13), (21, 22, 23, 24, 25), (31, 32))
STEPS = 12


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-gpt-oss", "tiny-qwen3-next"])
def cut(request: pytest.FixtureRequest) -> Cut:
    return load_span(model_folder(request.param), 0, None, lambda done, total: None)


class Driver:
    """Sends a stage its plans, one after the other."""

    def __init__(self, cut: Cut, make: type[Stage] = Stage) -> None:
        self.finished: list[Finished] = []
        self.told = threading.Event()
        self.stage = make(cut, self._tell)
        self.begin(EPOCH)

    def _tell(self, finished: Finished) -> None:
        self.finished.append(finished)
        self.told.set()

    def begin(self, epoch: Epoch) -> None:
        self.stage.begin(epoch, None, None)
        self.epoch, self.plans = epoch, 0

    def step(self, *slices: Slice, admits: tuple[Admit, ...] = ()) -> None:
        plan = PlanId(self.plans)
        self.plans += 1
        self.told.clear()
        self.stage.step(StepPlan(plan, self.epoch, (), admits, slices, plan))

    def admit(self, params: SamplingParams) -> None:
        """All prompts but their last tokens."""
        self.step(admits=tuple(Admit(SeqId(i), params, prompt, ()) for i, prompt in enumerate(PROMPTS)))
        for i, prompt in enumerate(PROMPTS):
            self.step(Slice(SeqId(i), prompt[:-1], 0, sample=False))

    def decode(self, number: int) -> None:
        """Step `number` of every sequence; behind the first the head knows no token."""
        self.step(
            *(
                Slice(SeqId(i), () if number else prompt[-1:], len(prompt) - 1 + number, sample=True)
                for i, prompt in enumerate(PROMPTS)
            )
        )

    def drawn(self) -> list[tuple[object, ...]]:
        return [finished.sampled for finished in self.finished]


@pytest.fixture(
    params=[SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=7, top_logprobs=2)]
)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    sampling: SamplingParams = request.param
    return sampling


def test_plans_in_the_air_draw_what_plans_one_by_one_draw(cut: Cut, params: SamplingParams) -> None:
    in_the_air, one_by_one = Driver(cut), Driver(cut)
    for driver in (in_the_air, one_by_one):
        driver.admit(params)
        for number in range(STEPS):
            driver.decode(number)
            if driver is one_by_one:
                driver.stage.settle()
        driver.stage.settle()
        driver.stage.close()
    assert in_the_air.drawn() == one_by_one.drawn()
    assert [finished.plan.id for finished in in_the_air.finished] == list(range(in_the_air.plans))


def test_a_plan_is_told_while_its_successor_is_still_to_come(cut: Cut) -> None:
    driver = Driver(cut)
    driver.admit(SamplingParams(temperature=0))
    driver.stage.settle()
    driver.decode(0)
    assert driver.told.wait(10), "nobody was told of a forward in the air until the next plan came"
    driver.stage.close()


def test_times_of_plans_in_the_air_lie_in_order(cut: Cut) -> None:
    driver = Driver(cut)
    driver.admit(SamplingParams(temperature=0))
    for number in range(STEPS):
        driver.decode(number)
    driver.stage.settle()
    times = [finished.times for finished in driver.finished]
    assert all(a.computed <= b.computed for a, b in pairwise(times))
    assert all(one.taken <= one.began <= one.computed <= one.given for one in times)
    assert all(0 <= one.busy_s <= one.computed - one.taken for one in times)
    driver.stage.close()


class Breaking(Stage):
    """Its device fails in the forward of plan 6, or in whatever comes after its launch."""

    def wait(self, launched: Launched) -> None:
        Stage.wait(self, launched)
        if launched.tag.plan == 6:
            raise RuntimeError("device lost")


def decode_until_it_fails(driver: Driver) -> StepFailed:
    driver.admit(SamplingParams(temperature=0))
    with pytest.raises(StepFailed) as caught:
        for number in range(STEPS):
            driver.decode(number)
        driver.stage.settle()
    return caught.value


def test_a_forward_that_fails_in_the_air_is_blamed_on_its_sequences(cut: Cut) -> None:
    driver = Driver(cut, Breaking)
    failed = decode_until_it_fails(driver)
    assert failed.seqs == (SeqId(0), SeqId(1), SeqId(2))
    assert "device lost" in str(failed)
    assert [finished.plan.id for finished in driver.finished] == list(range(6))
    driver.stage.close()


def test_a_stage_whose_forward_failed_begins_another_epoch(cut: Cut) -> None:
    driver, whole = Driver(cut, Breaking), Driver(cut)
    decode_until_it_fails(driver)
    driver.begin(Epoch(2))
    driver.finished.clear()
    for one in (driver, whole):
        one.admit(SamplingParams(temperature=0))
        one.decode(0)
        one.stage.settle()
        one.stage.close()
    assert driver.drawn() == whole.drawn()


@pytest.fixture
def launch_raises(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """While its only item is true, launches fail as after an error in a forward in front."""
    real, broken = mx.async_eval, [False]

    def launch(*arrays: object) -> None:
        if broken[0]:
            raise RuntimeError("LU factorization failed")
        real(*arrays)

    monkeypatch.setattr(mx, "async_eval", launch)
    yield broken


class Held(Stage):
    """Waits for leave to end what is in the air."""

    def wait(self, launched: Launched) -> None:
        Stage.wait(self, launched)
        if launched.draw is not None:
            assert LEAVE.wait(10)


LEAVE = threading.Event()


def test_a_launch_that_raises_is_blamed_on_what_was_in_the_air_too(
    cut: Cut, launch_raises: list[bool]
) -> None:
    LEAVE.clear()
    driver = Driver(cut, Held)
    driver.step(admits=tuple(Admit(SeqId(i), SamplingParams(temperature=0), (), ()) for i in (0, 1)))
    driver.step(Slice(SeqId(0), (11,), 0, sample=True))
    launch_raises[0] = True
    with pytest.raises(StepFailed) as caught:
        driver.step(Slice(SeqId(1), (21,), 0, sample=True))
    LEAVE.set()
    driver.stage.close()
    assert set(caught.value.seqs) == {SeqId(0), SeqId(1)}
    assert [finished.plan.id for finished in driver.finished] == [0], "spoilt tokens were told"


def test_to_close_waits_for_what_is_in_the_air(cut: Cut) -> None:
    LEAVE.clear()
    driver = Driver(cut, Held)
    driver.step(admits=(Admit(SeqId(0), SamplingParams(temperature=0), (), ()),))
    driver.step(Slice(SeqId(0), (11,), 0, sample=True))
    threading.Timer(0.1, LEAVE.set).start()
    driver.stage.close()
    assert [finished.plan.id for finished in driver.finished] == [0, 1]
