"""Messages between the stages and the head's books, and what is written when a server ends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from omlx.cache.block import root_of
from omlx.cache.prefix_index import Tier
from omlx.errors import LinkLost, StageLost
from omlx.node import housekeeping
from omlx.node.client import Kept
from omlx.node.hold import Hold
from omlx.node.housekeeping import IDLE_TICK_S, TICK_S, Housekeeper
from omlx.node.pipeline import Pipeline
from omlx.node.scheduler import Scheduler
from omlx.node.wire import CacheSpec, Catalogue, Fetch, Held, Holds, Purge, Spill, ToStage
from tests.node.test_prefixes import BYTES, SIZE, begun, entries, keep, tokens
from tests.node.test_scheduler import limits, request

ROOT = root_of({"weights": "none"})
HOLD = Hold((10**6, 10**6), True, SIZE, 2 * SIZE)


@dataclass
class FakeStage:
    lost: StageLost | None = None


@dataclass
class FakeSpec:
    cache: CacheSpec | None = field(default_factory=lambda: CacheSpec(ROOT, SIZE, None, 0))
    folder: Path = Path("model")


@dataclass
class FakePipeline:
    """Two stages that do nothing by themselves."""

    spec: FakeSpec = field(default_factory=FakeSpec)
    stages: list[FakeStage] = field(default_factory=lambda: [FakeStage(), FakeStage()])
    stores: bool = True
    trims: bool = True
    recurs: bool = False
    kept: deque[Kept] = field(default_factory=deque)
    fresh: list[int] = field(default_factory=list)
    told: list[ToStage] = field(default_factory=list)
    events: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    answers: Callable[[ToStage], None] = lambda message: None

    def tell(self, message: ToStage) -> None:
        self.told.append(message)
        self.answers(message)

    def says(self, message: Holds | Catalogue, stages: tuple[int, ...] = (0, 1)) -> None:
        for stage in stages:
            self.kept.append(Kept(stage, message))
            self.events.put_nowait(None)

    def found(self, count: int, stages: tuple[int, ...] = (0, 1)) -> None:
        made = entries(tokens(count * SIZE))
        self.says(Catalogue(tuple(made), tuple(Held(entry.id, BYTES, True) for entry in made)), stages)

    def writes(self, message: ToStage) -> None:
        if isinstance(message, Spill):
            self.says(Holds("cold", tuple(Held(entry.id, BYTES, True) for entry in message.blocks)))


def house(pipeline: FakePipeline, hold: Hold | None = HOLD) -> Housekeeper:
    keeper = Housekeeper(cast(Pipeline, pipeline), Scheduler(limits(step_tokens=400)))
    keeper.open(hold)
    return keeper


def test_what_the_stages_can_do_decides_what_is_kept() -> None:
    keeper = house(FakePipeline(trims=False, recurs=True))
    hold, index = keeper.scheduler.prefixes.hold, keeper.scheduler.prefixes.index
    assert (hold.trimmable, hold.recurrent, hold.block_tokens) == (False, True, SIZE)
    assert (index.root, index.stages, index.trimmable) == (ROOT, 2, False)


@pytest.mark.parametrize(
    ("pipeline", "hold"),
    [(FakePipeline(stores=False), HOLD), (FakePipeline(spec=FakeSpec(None)), HOLD), (FakePipeline(), None)],
)
def test_where_nothing_can_be_kept_what_stages_found_is_passed_over(
    pipeline: FakePipeline, hold: Hold | None
) -> None:
    keeper = house(pipeline, hold)
    pipeline.found(2)
    keeper.look()
    keeper.scheduler.add(request(3 * SIZE))
    plan = keeper.scheduler.next_plan()
    assert plan is not None and plan.slices and not pipeline.told
    assert keeper.tick_s == IDLE_TICK_S and keeper.cold_bytes() == 0


def test_a_look_takes_in_what_stages_found_and_asks_for_what_is_wanted() -> None:
    pipeline = FakePipeline()
    keeper = house(pipeline)
    pipeline.found(2)
    keeper.scheduler.add(request(3 * SIZE))
    # Its tokens are others than those that were found.
    keeper.look()
    assert not pipeline.told and keeper.cold_bytes() == 4 * BYTES
    one = begun(keeper.scheduler.prefixes, tokens(3 * SIZE), 7)
    keeper.scheduler.running[one.id] = one
    one.begun = True
    keeper.look()
    assert pipeline.told == [Fetch(tuple(entry.id for entry in entries(tokens(2 * SIZE))))]
    assert keeper.tick_s == TICK_S


def test_a_stage_that_was_started_anew_holds_what_it_says_since_then() -> None:
    pipeline = FakePipeline()
    keeper = house(pipeline)
    pipeline.found(3)
    keeper.look()
    pipeline.fresh.append(1)
    pipeline.found(1, stages=(1,))
    keeper.look()
    index = keeper.scheduler.prefixes.index
    assert [index.used_bytes(stage, Tier.COLD) for stage in range(2)] == [3 * BYTES, BYTES]
    assert not pipeline.fresh and not pipeline.kept


def test_what_is_over_the_budget_is_given_up_as_soon_as_something_was_written() -> None:
    pipeline = FakePipeline()
    keeper = house(pipeline)
    keeper.over_budget = lambda: 2 * BYTES
    pipeline.found(3)
    keeper.look()
    assert pipeline.told == [Purge((entries(tokens(3 * SIZE))[2].id,))]


def test_at_the_end_everything_is_written(caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> float:
        pipeline = FakePipeline()
        pipeline.answers = pipeline.writes
        keeper = house(pipeline)
        keep(keeper.scheduler.prefixes, tokens(9 * SIZE))
        started = time.monotonic()
        await keeper.flush()
        assert keeper.scheduler.prefixes.counters.spilled_blocks == 9
        assert keeper.scheduler.prefixes.dirty == 0
        return time.monotonic() - started

    assert asyncio.run(end()) < 1


@pytest.mark.parametrize("gone", [[], [FakeStage(), FakeStage(LinkLost("gone"))]])
def test_stages_that_are_gone_are_not_waited_for(gone: list[FakeStage]) -> None:
    """A model that had failed kept a server from ending for five seconds."""

    async def end() -> float:
        pipeline = FakePipeline()
        keeper = house(pipeline)
        keep(keeper.scheduler.prefixes, tokens(2 * SIZE))
        pipeline.stages = gone
        started = time.monotonic()
        await keeper.flush()
        return time.monotonic() - started

    assert asyncio.run(end()) < 1


def test_what_is_in_no_stages_memory_any_more_is_not_waited_for() -> None:
    async def end() -> float:
        keeper = house(FakePipeline())
        keep(keeper.scheduler.prefixes, tokens(2 * SIZE))
        keeper.scheduler.prefixes.lost(1)
        started = time.monotonic()
        await keeper.flush()
        return time.monotonic() - started

    assert asyncio.run(end()) < 1


def test_a_disk_that_does_not_answer_holds_up_the_end_no_longer_than_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(housekeeping, "FLUSH_WITHIN_S", 0.1)

    async def end() -> int:
        pipeline = FakePipeline()
        keeper = house(pipeline)
        keep(keeper.scheduler.prefixes, tokens(2 * SIZE))
        await keeper.flush()
        assert len(pipeline.told) == 1
        return keeper.scheduler.prefixes.dirty

    assert asyncio.run(end()) == 2
