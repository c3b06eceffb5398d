"""Against the loss of a node: what others would have to read then is brought to them before, in idle moments.

A copy of gigabytes, or a look over SSH at what a node has, would else be a part of the pause.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from omlx.cluster.cluster_site import ClusterSite, Unfurnished
from omlx.cluster.site import Need
from omlx.errors import DoesNotFit
from omlx.ids import ModelId
from omlx.node.layout import Layout
from omlx.observe import watched

log = structlog.get_logger()

AGAIN_S = 300.0
"""After a node could not be given anything."""


@dataclass(frozen=True, slots=True)
class _Provided:
    """For what a model is prepared."""

    layout: Layout
    usable: frozenset[str]

    def is_like(self, layout: Layout, usable: frozenset[str]) -> bool:
        return self.usable == usable and self.layout.runs_like(layout)


@dataclass(slots=True)
class Standby:
    """Owned by the reconciler, which calls `look` where nobody waits for tokens."""

    site: ClusterSite
    _provided: dict[ModelId, _Provided] = field(default_factory=dict)
    _due: dict[ModelId, float] = field(default_factory=dict)
    """On time.monotonic."""
    _task: asyncio.Task[None] | None = None

    def look(self, loaded: Sequence[tuple[Need, Layout]]) -> None:
        """Begin with one model that lies otherwise than it was provided for; one at a time."""
        if self._task is not None and not self._task.done():
            return
        now, usable = time.monotonic(), self.site.usable()
        for need, layout in loaded:
            provided = self._provided.get(need.model)
            like = provided is not None and provided.is_like(layout, usable)
            if like and now < self._due[need.model]:
                continue
            self._provided[need.model] = _Provided(layout, usable)
            self._due[need.model] = float("inf")
            self._task = watched(asyncio.create_task(self._provide(need, layout), name="standby"))
            return

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _provide(self, need: Need, layout: Layout) -> None:
        started = time.monotonic()
        without: list[str] = []
        for node in sorted(layout.nodes - {self.site.here.node_id}):
            try:
                await self.site.provide_against(need, layout, node)
                without.append(self.site.name(node))
            except DoesNotFit:
                continue  # the model would wait for that node
            except Unfurnished as error:
                self._due[need.model] = time.monotonic() + AGAIN_S
                log.warning("no provision against a loss", model=need.model, why=str(error))
        seconds = round(time.monotonic() - started, 2)
        log.info("provided against a loss", model=need.model, of=without, seconds=seconds)
