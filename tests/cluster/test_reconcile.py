"""What a model that could not stay asks for, and what a person asked for meanwhile."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from omlx.cluster import reconcile
from omlx.cluster.cluster_site import ClusterSite
from omlx.cluster.coordinator import Coordinator, Served
from omlx.cluster.rebalance import Move, Proposal
from omlx.cluster.reconcile import (
    AWAKE,
    LEAST_BALLAST,
    MOST_BALLAST,
    MOST_REST_S,
    REST_S,
    Reconciler,
    ballast,
)
from omlx.cluster.standby import Standby
from omlx.ids import ModelId
from omlx.node.health import ModelHealth, ModelState
from omlx.node.layout import Layout

MODEL = ModelId("m")


class Loads:
    """A coordinator as far as a model that is away is concerned."""

    def __init__(self, state: ModelState) -> None:
        self.state: ModelState = state
        self.loads = 0

    def health(self) -> tuple[ModelHealth, ...]:
        return (ModelHealth(MODEL, self.state, 0, 0, None),)

    def loaded(self) -> list[object]:
        return []

    async def chat_model(self, model: ModelId) -> None:
        self.loads += 1


def comes_back(state: ModelState) -> int:
    """How often a model is loaded that was away, in two looks."""
    loads = Loads(state)
    site = cast(ClusterSite, None)
    reconciler = Reconciler(cast(Coordinator, loads), site, Standby(site), _away={MODEL})

    async def look_twice() -> None:
        for _ in range(2):
            await reconciler.come_back()

    asyncio.run(look_twice())
    return loads.loads


def test_a_model_that_was_deactivated_while_its_machine_was_away_is_not_loaded_when_that_returns() -> None:
    assert comes_back("idle") == 0


def test_a_model_that_was_away_is_loaded_once() -> None:
    assert comes_back("failed") == 1


def moved(node: str, gained: int, given: int) -> Move:
    return Move(node, None, None, gained, given, 0, 0.0)


THERE = [moved("a", 0, 8), moved("b", 8, 0)]
BACK = [moved("a", 8, 0), moved("b", 0, 8)]


def test_layers_that_go_to_and_fro_rest_longer_each_time() -> None:
    rest, rests = AWAKE, []
    for number in range(8):
        rest = rest.after(BACK if number % 2 else THERE, 0, now=100.0)
        rests.append(rest.seconds)
    assert rests[0] == REST_S
    assert rests == sorted(rests) and rests[-1] == MOST_REST_S
    assert rest.until == 100.0 + MOST_REST_S


def test_layers_that_go_further_the_same_way_do_not_wait_longer() -> None:
    once = AWAKE.after(THERE, 0, now=0.0)
    again = once.after([moved("a", 0, 2), moved("c", 2, 0)], 0, now=40.0)
    assert again.seconds == REST_S and again.until == 40.0 + REST_S


@dataclass
class Scripted(Reconciler):
    """It always wants the same."""

    wants: Sequence[Move] = ()
    needs: str | None = None

    async def propose(self, served: Served) -> tuple[Proposal, Layout]:
        proposal = SimpleNamespace(moves=self.wants, needed=self.needs, lines=lambda: [])
        return cast(Proposal, proposal), cast(Layout, None)


def scripted(monkeypatch: pytest.MonkeyPatch, wants: Sequence[Move]) -> tuple[Scripted, SimpleNamespace]:
    """And a model that has moved `THERE` just now. What it wants pays."""
    monkeypatch.setattr(reconcile, "worth", lambda proposal: True)
    moves: list[object] = []
    engine = SimpleNamespace(model=MODEL, failure=None, recovering=False, recoveries=0, move=moves.append)

    async def furnish(need: object, layout: object) -> str:
        return "furnished"

    site = cast(ClusterSite, SimpleNamespace(furnish=furnish))
    coordinator = cast(Coordinator, SimpleNamespace(need=lambda served: None))
    rests = {MODEL: AWAKE.after(THERE, 0, time.monotonic())}
    one = Scripted(coordinator, site, Standby(site), _rests=rests, wants=wants)
    return one, SimpleNamespace(engine=engine, moves=moves)


def test_a_move_that_has_to_rest_is_looked_at_again_when_the_rest_ends_and_not_a_minute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, served = scripted(monkeypatch, BACK)
    asyncio.run(one._look(cast(Served, served)))
    assert not served.moves
    one._planned_at = time.monotonic()
    assert not one._is_due(news=False)
    monkeypatch.setattr(reconcile, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + REST_S))
    assert one._is_due(news=False)
    asyncio.run(one._look(cast(Served, served)))
    assert served.moves == ["furnished"]


def test_after_a_loss_layers_go_back_at_once_and_that_is_no_to_and_fro(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that was cut and came back stood idle for more than a minute."""
    one, served = scripted(monkeypatch, BACK)
    served.engine.recoveries = 1
    asyncio.run(one._look(cast(Served, served)))
    assert served.moves == ["furnished"]
    assert one._rests[MODEL].seconds == REST_S


def test_what_has_to_move_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    one, served = scripted(monkeypatch, BACK)
    one.needs = "a node gives less"
    asyncio.run(one._look(cast(Served, served)))
    assert served.moves == ["furnished"]


def test_a_slow_link_is_not_filled_by_asking_what_it_carries() -> None:
    assert ballast(110e6) == 550_000
    assert ballast(1e3) == LEAST_BALLAST
    assert ballast(5e9) == MOST_BALLAST
