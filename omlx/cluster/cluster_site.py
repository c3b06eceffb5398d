"""Several machines: stages on the nodes that a plan chooses, and chooses again when one is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from omlx.cluster.choice import choose_of
from omlx.cluster.fleet import Fleet, Machine, fleet_of, names_of, this_machine
from omlx.cluster.headroom import Headroom, MemorySample, begin, follow
from omlx.cluster.liveness import who_answers
from omlx.cluster.machine import memory_available_bytes
from omlx.cluster.measure import Measures
from omlx.cluster.offer import Offer, Terms, offer_of
from omlx.cluster.placement import Demand, Placement, demand_of
from omlx.cluster.planner import Span
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.cluster.ray_site import RaySite, open_ray_site
from omlx.cluster.rebalance import MoveCosts, Proposal, propose
from omlx.cluster.remote_actor import RayPlacement
from omlx.cluster.remote_script import access_of
from omlx.cluster.shard_map import NodeState, NodeView
from omlx.cluster.site import Need, layout_of, span_of
from omlx.cluster.trust import open_trust
from omlx.cluster.weights import provide
from omlx.errors import BadSetting, DoesNotFit, NodesAway, OmlxError, SshFailed, StageLost
from omlx.node.client import StageProcess
from omlx.node.layout import Layout, Part
from omlx.settings import Settings

log = structlog.get_logger()

GATHER_WITHIN_S = 30.0
"""How long the first plan waits for nodes that answer and are not in Ray yet."""
CACHE_THERE = "~/.omlx/cache"
"""Of another machine's SSD."""
TELL_EVERY_S = 5.0


class Unfurnished(OmlxError):
    """A node cannot be given weights."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(slots=True)
class _Told:
    """Of a copy, every few seconds."""

    model: str
    node: str
    last: float = field(default_factory=time.monotonic)

    def progress(self, done: int, total: int) -> None:
        if (now := time.monotonic()) - self.last >= TELL_EVERY_S:
            self.last = now
            log.info("weights are copied", model=self.model, node=self.node, done=done, total=total)


@dataclass(slots=True)
class ClusterSite:
    """Implements Site. Owned by the server; `rays` says which nodes are there."""

    settings: Settings
    here: Machine
    """Its budget is what models may have of this machine at most."""
    rays: RaySite
    available_bytes: Callable[[], int]
    measures: Measures = field(default_factory=Measures)
    """By the machines' names."""
    _terms: Terms = field(init=False)
    _placement: RayPlacement = field(init=False)
    _headroom: dict[str, Headroom] = field(default_factory=dict)
    _folders: dict[tuple[str, Path, Span | None], Path] = field(default_factory=dict)
    """What nodes have, as seen since this server started: node, model and layers (None: all)."""

    def __post_init__(self) -> None:
        self._terms = Terms.of(self.settings)
        self._placement = RayPlacement(self.rays.driver, self.rays.member, self._address_of)
        self.rays.moved = self._placement.end_here

    # ---------------------------------------------------------------- Site

    async def place(self, index: int, node: str) -> StageProcess:
        try:
            return await self._placement(index, node)
        except StageLost:
            self.rays.doubt(node)
            raise

    async def layout(self, need: Need) -> Layout:
        """Raises DoesNotFit."""
        await self.rays.gathered(GATHER_WITHIN_S)
        answering = await who_answers(self.rays.members) | {self.here.node_id}
        return await self._planned(need, self.usable() & answering, None)

    async def again(self, need: Need, before: Layout, lost: frozenset[str]) -> Layout:
        """On the same nodes where all of them answer, else by another plan, in which those that are left keep
        what they can. Raises NodesAway."""
        answering = await who_answers(self.rays.members, doubted=lost)
        there = (self.usable() & answering) | (before.nodes - lost) | {self.here.node_id}
        there |= {node for node in lost if node in answering and not self.rays.doubts(node)}
        if before.nodes <= there:
            return before
        for node in before.nodes - there:
            self.rays.doubt(node)  # Ray lists it for some seconds more
        gone = sorted(self.name(node) for node in before.nodes - there)
        away = f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} away"
        try:
            return await self._planned(need, there, before)
        except DoesNotFit as error:
            raise NodesAway(
                f"{need.model}: {away}, and the other machines cannot hold the model; it comes back "
                f"by itself when one returns ({error})"
            ) from error

    def nodes(self) -> tuple[NodeView, ...]:
        return tuple(self._view(one) for one in self.fleet().machines)

    # ---------------------------------------------------------------- plans

    def usable(self) -> frozenset[str]:
        """Nodes that may get stages at this moment."""
        return self.rays.usable | {self.here.node_id}

    def fleet(self) -> Fleet:
        """With what each gives by its role, or less where others need it now."""
        fleet = fleet_of(self.here, self.rays.members, self.settings.nodes)
        return replace(fleet, machines=tuple(self._bearing(one) for one in fleet.machines))

    def _bearing(self, one: Machine) -> Machine:
        known = self._headroom.get(one.node_id)
        return one if known is None else replace(one, budget_bytes=min(one.budget_bytes, known.budget_bytes))

    def heard(self, node: str, held_bytes: int, free_bytes: int) -> bool:
        """How much memory of a node is free beside our stages; whether it gives more or less now."""
        given = fleet_of(self.here, self.rays.members, self.settings.nodes).find(node)
        if given is None:
            return False
        sample = MemorySample(time.monotonic(), free_bytes, held_bytes)
        before = self._headroom.get(node)
        if before is None or before.role_bytes != given.budget_bytes:
            self._headroom[node] = begin(given.budget_bytes, sample)
            return False
        self._headroom[node] = follow(before, sample)
        return self._headroom[node].budget_bytes != before.budget_bytes

    async def provide_against(self, need: Need, layout: Layout, lost: str) -> None:
        """Bring to the others what they would have to read if that node of the layout were lost now.

        Raises DoesNotFit where they cannot hold the model, Unfurnished.
        """
        await self.furnish(need, await self._nearest(need, self.usable() - {lost}, layout))

    async def _planned(self, need: Need, among: frozenset[str], before: Layout | None) -> Layout:
        """By a plan whose nodes have the weights; who cannot get them is left out of the next one."""
        while True:
            first = self._best(need, among) if before is None else self._nearest(need, among, before)
            layout = await first
            if not any(layout.hot_bytes) and self._terms.hot_bytes(self.here.budget_bytes, need.models):
                log.warning("no memory is left for the hot tier", model=need.model)
            try:
                return await self.furnish(need, layout)
            except Unfurnished as error:
                log.warning("a node has no weights", model=need.model, why=str(error))
                self.rays.doubt(error.node)
                among -= {error.node}

    async def _best(self, need: Need, among: frozenset[str]) -> Layout:
        offer = self._offer(need, among)
        plan = need.manifest, offer, offer.links(), self.demand(need)
        choice, with_hot = await asyncio.to_thread(choose_of, *plan)
        return self._as_layout(need, offer, choice.placement, with_hot=with_hot)

    async def _nearest(self, need: Need, among: frozenset[str], before: Layout) -> Layout:
        """Of plans that are nearly the best the one by which the least is read, with room for the hot tier
        where there is some. Nodes that are lost are not among those."""
        if any(before.hot_bytes) and self._offer(need, among).candidates():
            with suppress(DoesNotFit):
                _, layout = await asyncio.to_thread(self._proposed, need, before, among, with_hot=True)
                return layout
        _, layout = await asyncio.to_thread(self._proposed, need, before, among, with_hot=False)
        return layout

    async def furnish(self, need: Need, layout: Layout) -> Layout:
        """The same, with each node's own folder of the model once that has what its part reads.

        Raises Unfurnished.
        """
        parts = await asyncio.gather(*(self._furnished(need, part) for part in layout.parts))
        return replace(layout, parts=tuple(parts))

    async def _furnished(self, need: Need, part: Part) -> Part:
        node = next((one for one in self.rays.members if one.id == part.node), None)
        if node is None:  # this machine
            return part
        span = span_of(part, need.manifest)
        key, whole = (part.node, need.folder, span), (part.node, need.folder, None)
        if key not in self._folders and whole not in self._folders:
            memo = self.rays.trust.folder / "digests.json"
            access, told = access_of(self.rays.trust), _Told(need.model, node.name)
            try:
                provided = await provide(access, node, need.manifest, span, memo, told.progress)
            except (SshFailed, BadSetting) as error:
                raise Unfurnished(f"{node.name} cannot be given its layers: {error}", part.node) from error
            self._folders[whole if provided.whole else key] = provided.folder
        return replace(part, folder=self._folders.get(whole) or self._folders[key])

    def propose(self, need: Need, layout: Layout, at_stake: int) -> tuple[Proposal, Layout]:
        """Where a model that runs like this should run by today's figures, and that as a layout. `at_stake`:
        tokens that are computed again if it moves.

        Takes some hundredths of a second of a core. Raises DoesNotFit.
        """
        among, with_hot = (self.usable() | layout.nodes) - self.rays.draining, any(layout.hot_bytes)
        return self._proposed(need, layout, among, MoveCosts(at_stake), with_hot=with_hot)

    def _proposed(
        self,
        need: Need,
        layout: Layout,
        among: frozenset[str],
        costs: MoveCosts | None = None,
        *,
        with_hot: bool,
    ) -> tuple[Proposal, Layout]:
        offer = self._offer(need, among)
        stages = [(self.name(part.node), span_of(part, need.manifest)) for part in layout.parts]
        candidates = offer.candidates(with_hot=with_hot)
        proposal = propose(need.manifest, stages, candidates, offer.links(), self.demand(need), costs)
        return proposal, self._as_layout(need, offer, proposal.placement, with_hot=with_hot)

    def _offer(self, need: Need, among: frozenset[str]) -> Offer:
        """With layers for those nodes alone."""
        idle = {one.node_id: "" for one in self.fleet().machines if one.node_id not in among}
        return self.offer(need.folder, need.models, need.taken, need.held, idle)

    def offer(
        self,
        folder: Path | None,
        models: int,
        taken: Mapping[str, int],
        held: Mapping[str, int],
        idle: Mapping[str, str],
    ) -> Offer:
        """What plans of the model in that folder are made of, where so many can be loaded beside each other:
        bytes by node that the others have `taken` and that it has itself, and who gets no layers, and why."""
        return offer_of(
            self.fleet(),
            self._terms,
            self.measures,
            folder=folder,
            models=models,
            taken=taken,
            free_bytes={self.here.node_id: self.available_bytes() + held.get(self.here.node_id, 0)},
            idle=idle,
        )

    def demand(self, need: Need) -> Demand:
        """What plans are made for."""
        return demand_of(self._terms, need.least_tokens)

    def _as_layout(self, need: Need, offer: Offer, placement: Placement, *, with_hot: bool) -> Layout:
        by_name = {one.machine.name: one.machine for one in offer.machines}
        machines = [by_name[stage.node.name] for stage in placement.plan.stages]
        hot = offer.hot_bytes() if with_hot else {}
        layout = layout_of(
            need.manifest,
            placement.plan,
            nodes=[one.node_id for one in machines],
            memory_shares=[min(1.0, one.budget_bytes / one.memory_bytes) for one in machines],
            hot_bytes=[hot.get(one.node_id, 0) for one in machines],
            places=self.settings.max_concurrent_requests,
        )
        parts = tuple(
            part if part.node == self.here.node_id else replace(part, cache_folder=CACHE_THERE)
            for part in layout.parts
        )
        return replace(layout, parts=parts)

    # ---------------------------------------------------------------- names

    def _view(self, one: Machine) -> NodeView:
        id, rays = one.node_id, self.rays
        here = id == self.here.node_id
        state: NodeState = "up" if here or id in rays.alive else "joining"
        why = None if here else rays.hindrances.get(id)
        if why is not None:
            state = "away"
        elif id in rays.draining:
            state, why = "draining", "it gets no layers until it is taken back"
        elif rays.doubts(id):
            why = "a stage could not be placed there a moment ago"
        return NodeView(one.name, id, here, state, why, one.memory_bytes, one.budget_bytes)

    def _address_of(self, node: str) -> str:
        if node == self.here.node_id:
            return self.rays.address
        return next((one.addresses[0] for one in self.rays.members if one.id == node), node)

    def name(self, node: str) -> str:
        return names_of(self.here, self.rays.members).get(node, node[:8])


@asynccontextmanager
async def open_cluster_site(settings: Settings, ceiling_bytes: int) -> AsyncIterator[ClusterSite]:
    """The cluster that this machine made, giving so much to models itself. Raises BadSetting, RayFailed."""
    trust = await asyncio.to_thread(open_trust, CLUSTER_FOLDER)
    async with open_ray_site(trust, settings.ray_port) as rays:
        here = await asyncio.to_thread(this_machine, rays.member.node_id, ceiling_bytes)
        yield ClusterSite(settings, here, rays, memory_available_bytes)
