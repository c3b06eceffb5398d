"""What a model that could not stay asks for, and what a person asked for meanwhile."""

import asyncio
from typing import cast

from omlx.cluster.cluster_site import ClusterSite
from omlx.cluster.coordinator import Coordinator
from omlx.cluster.rebalance import Move
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
        rest = rest.after(BACK if number % 2 else THERE, now=100.0)
        rests.append(rest.seconds)
    assert rests[0] == REST_S
    assert rests == sorted(rests) and rests[-1] == MOST_REST_S
    assert rest.until == 100.0 + MOST_REST_S


def test_layers_that_go_further_the_same_way_do_not_wait_longer() -> None:
    once = AWAKE.after(THERE, now=0.0)
    again = once.after([moved("a", 0, 2), moved("c", 2, 0)], now=40.0)
    assert again.seconds == REST_S and again.until == 40.0 + REST_S


def test_a_slow_link_is_not_filled_by_asking_what_it_carries() -> None:
    assert ballast(110e6) == 550_000
    assert ballast(1e3) == LEAST_BALLAST
    assert ballast(5e9) == MOST_BALLAST
