"""The levers of a running server: what it shows of itself, and what it can be told to do."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlx.cluster.coordinator import Coordinator, Served
from omlx.cluster.fleet import Fleet, this_machine
from omlx.cluster.liveness import who_answers
from omlx.cluster.machine import memory_available_bytes
from omlx.cluster.offer import SILENT, Offer, Terms, offer_of
from omlx.cluster.shard_map import ModelView, ShardMap, StageState, StageView
from omlx.cluster.site import Site, span_of
from omlx.errors import BadSetting, Refused
from omlx.ids import ModelId
from omlx.node.health import ModelHealth

if TYPE_CHECKING:
    from omlx.cluster.reconcile import Reconciler

DRAIN_WITHIN_S = 120.0
LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class Levers:
    """Implements `api.control.Control`. `reconciler`: None on one machine."""

    coordinator: Coordinator
    site: Site
    terms: Terms
    reconciler: "Reconciler | None" = None
    cluster_id: str | None = None
    _busy: dict[tuple[ModelId, int], tuple[float, float]] = field(default_factory=dict)
    """By model and stage, when its share of time was asked for last, and its busy seconds then."""

    async def shard_map(self) -> ShardMap:
        loaded = {served.engine.model: served for served in self.coordinator.loaded()}
        models = tuple(self._model(health, loaded.get(health.id)) for health in self.coordinator.health())
        return ShardMap(self.cluster_id, self.site.nodes(), models)

    async def offer(self, model: str | None) -> Offer:
        """What a plan is made of: for the model that is loaded by that id or from that folder, else for one
        that is loaded beside all of them."""
        loaded = self.coordinator.loaded()
        served = next((one for one in loaded if model in (one.engine.model, _folder_of(one))), None)
        if self.reconciler is None:
            return await self._offer_alone(served)
        return await self._offer_of_all(served, model)

    async def activate(self, model_id: ModelId) -> None:
        """Raises as `Coordinator.chat_model`."""
        await self.coordinator.chat_model(model_id)

    async def deactivate(self, model_id: ModelId, within_s: float) -> None:
        await self.coordinator.unload(model_id, within_s)

    async def rebalance(self, model_id: ModelId, dry_run: bool) -> Mapping[str, Any]:
        """Raises Refused where the model is not loaded, or there is one machine; DoesNotFit."""
        reconciler = self._cluster()
        served = self._served(model_id)
        reconciler.measure(served)
        proposal, layout = await reconciler.propose(served)
        moves = bool(proposal.moves) and not dry_run
        if moves:
            await reconciler.move(served, proposal, layout)
        return {**proposal.as_json(), "lines": proposal.lines(), "moved": moves}

    async def drain(self, node_id: str) -> None:
        """Raises Refused where what it runs finds no other place within two minutes. Whatever else ends this,
        its caller's going away too, the node is in use again."""
        rays = self._cluster().site.rays
        if node_id == rays.member.node_id:
            raise BadSetting("this machine runs the server: it cannot be drained, only the others")
        rays.drain(node_id, on=True)
        drained = False
        try:
            await self._emptied(node_id)
            drained = True
        finally:
            if not drained:
                rays.drain(node_id, on=False)

    async def undrain(self, node_id: str) -> None:
        self._cluster().site.rays.drain(node_id, on=False)

    # ---------------------------------------------------------------- parts

    def _cluster(self) -> "Reconciler":
        if self.reconciler is None:
            raise Refused("this server runs on one machine: no other has joined its cluster")
        return self.reconciler

    def _served(self, model_id: ModelId) -> Served:
        for served in self.coordinator.loaded():
            if served.engine.model == model_id:
                return served
        raise Refused(f"{model_id} is not loaded: `omlx cluster activate {model_id}` loads it")

    async def _offer_alone(self, served: Served | None) -> Offer:
        taken, held = self._taken_and_held(served)
        (view,) = self.site.nodes()
        here = await asyncio.to_thread(this_machine, "", view.budget_bytes, busy=True)
        offer = offer_of(
            Fleet((here,)),
            self.terms,
            models=len(self.coordinator.cards()),
            taken={here.node_id: sum(taken.values())},
            free_bytes={here.node_id: memory_available_bytes() + sum(held.values())},
        )
        return replace(offer, folder=None if served is None else _folder_of(served))

    async def _offer_of_all(self, served: Served | None, model: str | None) -> Offer:
        folder = model if served is None else _folder_of(served)
        site = self._cluster().site
        answering = await who_answers(site.rays.members) | {site.here.node_id}
        there = site.usable() & answering
        if served is not None:
            there = (there | served.engine.layout.nodes) - site.rays.draining
        idle = {
            node.node_id: node.why or (f"it is {node.state}" if node.node_id in answering else SILENT)
            for node in site.nodes()
            if node.node_id is not None and node.node_id not in there
        }
        models, place = len(self.coordinator.cards()), None if folder is None else Path(folder)
        offer = site.offer(place, models, *self._taken_and_held(served), idle)
        return replace(offer, folder=folder if served is not None else None)

    def _taken_and_held(self, served: Served | None) -> tuple[dict[str, int], dict[str, int]]:
        return self.coordinator.taken_and_held(None if served is None else served.engine.model)

    async def _emptied(self, node_id: str) -> None:
        end = time.monotonic() + DRAIN_WITHIN_S
        while held := self._held_by(node_id):
            why = self._cluster().why(held)
            if why is not None or time.monotonic() > end:
                late = f"it still runs there after {DRAIN_WITHIN_S:.0f} s"
                raise Refused(f"{held} cannot do without that node, which stays in use: {why or late}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _held_by(self, node_id: str) -> ModelId | None:
        for served in self.coordinator.loaded():
            if served.engine.failure is None and any(
                stage.process.node == node_id for stage in served.engine.pipeline.stages
            ):
                return served.engine.model
        return None

    def _model(self, health: ModelHealth, served: Served | None) -> ModelView:
        engine = served.engine if served is not None else None
        return ModelView(
            id=health.id,
            state=health.state,
            epoch=engine.epoch if engine is not None else 0,
            recoveries=engine.recoveries if engine is not None else 0,
            running=health.running,
            waiting=health.waiting,
            layers=self.coordinator.layers(health.id),
            stages=self._stages(served) if served is not None else (),
            why=str(engine.failure) if engine is not None and engine.failure is not None else None,
        )

    def _stages(self, served: Served) -> tuple[StageView, ...]:
        engine, manifest = served.engine, served.manifest
        figures, views = engine.figures().stages, []
        for index, (part, stage) in enumerate(zip(engine.layout.parts, engine.pipeline.stages, strict=False)):
            state: StageState = "ready" if stage.loaded is not None else "loading"
            span = span_of(part, manifest)
            views.append(
                StageView(
                    node=self.site.name(part.node),
                    node_id=part.node or None,
                    start=span.start,
                    end=span.end,
                    weight_bytes=manifest.span_bytes(span.start, span.end),
                    state="lost" if stage.lost is not None else state,
                    rss_bytes=stage.pong.peak_rss_bytes if stage.pong is not None else None,
                    busy=self._share((engine.model, index), figures[index].busy_s if figures else 0.0),
                )
            )
        return tuple(views)

    def _share(self, stage: tuple[ModelId, int], busy_s: float) -> float | None:
        """Of the time since somebody asked last."""
        now = time.monotonic()
        before = self._busy.get(stage)
        self._busy[stage] = (now, busy_s)
        if before is None or not before[1] <= busy_s or now <= before[0]:
            return None
        return min(1.0, (busy_s - before[1]) / (now - before[0]))


def _folder_of(served: Served) -> str:
    return str(served.manifest.folder.resolve())
