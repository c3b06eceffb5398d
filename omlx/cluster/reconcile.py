"""Keeps loaded models where they should run, as machines come and go and turn out faster or slower.

`rebalance.propose` and `worth` decide; here that is looked at now and then, and carried out.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf

import structlog

from omlx.cluster.cluster_site import ClusterSite, Unfurnished
from omlx.cluster.coordinator import Coordinator, Served
from omlx.cluster.measure import LinkSample, StageTimes
from omlx.cluster.rebalance import Move, Proposal, worth
from omlx.cluster.site import span_of
from omlx.cluster.standby import Standby
from omlx.errors import DoesNotFit, NodesAway, OmlxError, Refused
from omlx.ids import ModelId
from omlx.node.layout import Layout
from omlx.observe import watched

log = structlog.get_logger()

LOOK_EVERY_S = 5.0
"""At what stages were measured to take; or at once, where machines came or went."""
PLAN_EVERY_S = 60.0
"""Where nothing seems to have changed."""
QUIET_S = 10.0
"""So long after the last news of how fast stages are."""
REST_S, MOST_REST_S = 30.0, 600.0
"""Between two moves of one model that pay and do not have to be: at first, and where layers go to and fro."""
PROBE_EVERY_S, PROBED_WITHIN_S = 20.0, 1.0
"""Of each link. An answer that is later says nothing."""
LEAST_BALLAST, MOST_BALLAST = 64 << 10, 1 << 20


def ballast(bytes_per_s: float) -> int:
    """Bytes that such a link carries in 5 ms: more than a round trip varies, and nobody waits for them."""
    return round(min(MOST_BALLAST, max(LEAST_BALLAST, bytes_per_s * 0.005)))


@dataclass(frozen=True, slots=True)
class Rest:
    """After a move. Layers that come back where they were taken from were moved by figures that depend on
    where they are (heat, a share of a core): each time, the next move is waited for twice as long."""

    until: float
    """On time.monotonic."""
    seconds: float = REST_S
    gained: frozenset[str] = frozenset()
    """Nodes that got layers."""
    gave: frozenset[str] = frozenset()
    recoveries: int = 0
    """Of the engine, by then. After one more, layers are where they are for another reason."""

    def after(self, moves: Iterable[Move], recoveries: int, now: float) -> "Rest":
        moves = list(moves)
        gained = frozenset(move.node for move in moves if move.gained > move.given)
        gave = frozenset(move.node for move in moves if move.given > move.gained)
        to_and_fro = bool(gained & self.gave or gave & self.gained)
        seconds = min(MOST_REST_S, 2 * self.seconds) if to_and_fro else REST_S
        return Rest(now + seconds, seconds, gained, gave, recoveries)


AWAKE = Rest(0.0)


@dataclass(slots=True)
class Reconciler:
    """One per server of a cluster; `run` is its task."""

    coordinator: Coordinator
    site: ClusterSite
    standby: Standby
    _rests: dict[ModelId, Rest] = field(default_factory=dict)
    _away: set[ModelId] = field(default_factory=set)
    """Models that the machines there were could not hold."""
    _why: dict[ModelId, str] = field(default_factory=dict)
    """Why a model cannot be where it should; told once."""
    _planned_at: float = -PLAN_EVERY_S
    _news_at: float = 0.0
    _probed: dict[str, float] = field(default_factory=dict)
    """When a node's link was, on time.monotonic."""
    _again_at: float = inf
    """When a move that pays was put off to."""
    _unplanned: bool = False
    """Whether there were news since the last plan."""

    async def run(self) -> None:
        """Until it is cancelled."""
        changed = self.site.rays.changed
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await changed.wait()
            served = self.coordinator.loaded()
            self._away |= {one.engine.model for one in served if isinstance(one.engine.failure, NodesAway)}
            news = [self.measure(one) for one in served if one.engine.failure is None]
            news += self._hear(served)
            if rests(served):  # else the answer waits for a core there or here
                await self._probe(served)
            if self._is_due(any(news)) or changed.is_set():
                changed.clear()
                self._planned_at, self._unplanned, self._again_at = time.monotonic(), False, inf
                for one in served:
                    await self._look(one)
            await self.come_back()
            if rests(served):
                sound = [one for one in served if one.engine.failure is None]
                self.standby.look([(self.coordinator.need(one), one.engine.layout) for one in sound])

    def _is_due(self, news: bool) -> bool:
        """While figures still change, a plan would soon be followed by another one."""
        now = time.monotonic()
        if news:
            self._news_at, self._unplanned = now, True
        quiet = self._unplanned and now - self._news_at >= QUIET_S
        return quiet or now >= min(self._again_at, self._planned_at + PLAN_EVERY_S)

    async def propose(self, served: Served) -> tuple[Proposal, Layout]:
        """Where it should run by today's figures. Raises DoesNotFit."""
        engine = served.engine
        need = self.coordinator.need(served)
        return await asyncio.to_thread(self.site.propose, need, engine.layout, engine.tokens_at_stake)

    async def move(self, served: Served, proposal: Proposal, layout: Layout) -> None:
        """Its engine goes there with the next plan, once the nodes have the weights. Raises Unfurnished."""
        model = served.engine.model
        self._rests[model] = self._rest(served).after(
            proposal.moves, served.engine.recoveries, time.monotonic()
        )
        for line in proposal.lines():
            log.info("moving", model=model, what=line)
        served.engine.move(await self.site.furnish(self.coordinator.need(served), layout))

    async def _look(self, served: Served) -> None:
        engine = served.engine
        model = engine.model
        if engine.failure is not None or engine.recovering:
            return
        try:
            proposal, layout = await self.propose(served)
            rested_at = self._rest(served).until
            if proposal.moves and (proposal.needed is not None or worth(proposal)):
                if proposal.needed is None and time.monotonic() < rested_at:
                    self._again_at = min(self._again_at, rested_at)
                else:
                    await self.move(served, proposal, layout)
        except DoesNotFit as error:
            self._complain(model, str(error))
        except Unfurnished as error:
            self.site.rays.doubt(error.node)
            self._complain(model, str(error))
        else:
            self._why.pop(model, None)

    def _rest(self, served: Served) -> Rest:
        rest = self._rests.get(served.engine.model, AWAKE)
        return rest if rest.recoveries == served.engine.recoveries else AWAKE

    def measure(self, served: Served) -> bool:
        """What its stages were seen to take, for all plans; whether that is news."""
        engine = served.engine
        figures, news = engine.figures(), False
        for part, stage in zip(engine.layout.parts, figures.stages, strict=False):
            if stage.cost is not None:
                span = span_of(part, served.manifest)
                times = StageTimes(served.manifest, span, stage.cost, figures.plans)
                news |= self.site.measures.add(self.site.name(part.node), times)
        return news

    def _hear(self, served: Sequence[Served]) -> list[bool]:
        """What nodes say of their memory; whether one gives more or less from now on."""
        held, free = Counter[str](), dict[str, int]()
        for one in served:
            for stage in one.engine.pipeline.stages:
                if stage.pong is not None and stage.lost is None:
                    held[stage.seat] += stage.pong.held_bytes
                    free[stage.seat] = stage.pong.free_bytes
        return [self.site.heard(node, held[node], free[node]) for node in free]

    async def _probe(self, served: Sequence[Served]) -> None:
        """How far nodes are away, and what their links carry."""
        fleet, now = self.site.fleet(), time.monotonic()
        links, here = self.site.measures.links(fleet.links()), self.site.here.name
        for stage in (stage for one in served for stage in one.engine.pipeline.stages):
            machine, due = fleet.find(stage.seat), self._probed.get(stage.seat, 0.0) + PROBE_EVERY_S
            if machine is None or machine.link is None or stage.round_trip_s is None or now < due:
                continue
            self._probed[stage.seat] = now
            size = ballast(links.between(here, machine.name).bytes_per_s)
            if (bytes_per_s := await stage.carries(size, PROBED_WITHIN_S)) is not None:
                self.site.measures.add_link(here, machine.name, LinkSample(stage.round_trip_s, bytes_per_s))

    async def come_back(self) -> None:
        """With machines that returned, models may fit again that did not; but not who was deactivated."""
        idle = {one.id for one in self.coordinator.health() if one.state == "idle"}
        for model in list(self._away):
            if model in idle:
                self._away.discard(model)
                self._why.pop(model, None)
            else:
                await self._come_back(model)

    async def _come_back(self, model: ModelId) -> None:
        failed = [one for one in self.coordinator.loaded() if one.engine.model == model]
        if failed and failed[0].engine.failure is not None:
            await self.coordinator.unload(model, 0.0)
        try:
            await self.coordinator.chat_model(model)
        except Refused as error:
            self._complain(model, str(error))
        except OmlxError as error:
            log.warning("a model does not come back", model=model, why=str(error))
        else:
            self._away.discard(model)
            self._why.pop(model, None)
            log.info("a model is back", model=model)

    def why(self, model: ModelId) -> str | None:
        """What keeps it from where it should be."""
        return self._why.get(model)

    def _complain(self, model: ModelId, why: str) -> None:
        if self._why.get(model) != why:
            self._why[model] = why
            log.warning("a model cannot be where it should", model=model, why=why)


def rests(served: Sequence[Served]) -> bool:
    """Whether nobody waits for tokens."""
    return not any(one.engine.busy or one.engine.recovering for one in served)


@asynccontextmanager
async def reconciling(coordinator: Coordinator, site: ClusterSite) -> AsyncIterator[Reconciler]:
    """It runs meanwhile."""
    standby = Standby(site)
    reconciler = Reconciler(coordinator, site, standby)
    task = watched(asyncio.create_task(reconciler.run(), name="reconciler"))
    try:
        yield reconciler
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await standby.close()
