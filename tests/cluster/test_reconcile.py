"""What a model that could not stay asks for, and what a person asked for meanwhile."""

import asyncio
from typing import cast

from omlx.cluster.cluster_site import ClusterSite
from omlx.cluster.coordinator import Coordinator
from omlx.cluster.reconcile import Reconciler
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
