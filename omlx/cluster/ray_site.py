"""Ray on the coordinator, and which nodes are in it: those that are missing are called."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from omlx.cluster.doubt import Doubt
from omlx.cluster.members import Members, read_members
from omlx.cluster.membership import Member, install_bundle, open_member
from omlx.cluster.node_identity import own_address, own_addresses
from omlx.cluster.ray_driver import RayDriver
from omlx.cluster.ray_processes import RaySession, can_listen, reap_left_over, start_head
from omlx.cluster.summoning import head_of, hindrance, summon
from omlx.cluster.trust import Trust, issue
from omlx.errors import BadSetting, RayFailed
from omlx.observe import watched

log = structlog.get_logger()

LOOK_EVERY_S, SEARCH_EVERY_S = 5.0, 1.0
"""Where all members are there, and where one comes or goes: each look costs some milliseconds of a core."""
CALL_AGAIN_S, REMIND_S = 5.0, 60.0
"""A node that is not in Ray is called over SSH: one that did not hear it, and one that did."""
DISCARD_PORT = 9
"""Any would do: nothing is sent."""


@dataclass(slots=True)
class RaySite:
    """One per server of a cluster. `watch` is its one task; the rest reads what it found."""

    trust: Trust
    member: Member
    address: str
    """This machine's, as the nodes reach it."""
    port: int
    session: RaySession
    driver: RayDriver
    members: Members
    token: str
    alive: frozenset[str] = frozenset()
    """Node ids of members that are in Ray, which is seconds behind."""
    hindrances: dict[str, str] = field(default_factory=dict)
    """Why a member is not, by node id, for a person."""
    draining: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when other nodes than before may get stages; whoever looks clears it."""
    moved: Callable[[], None] = lambda: None
    """Called when this machine is reached at another address."""
    _seen: frozenset[str] = frozenset()
    """Those that were usable at the last look."""
    _doubted: dict[str, Doubt] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    """When a node is called next, on time.monotonic."""
    _calling: asyncio.Task[None] | None = None
    _looked: asyncio.Condition = field(default_factory=asyncio.Condition)
    _problem: str | None = None
    """Told once."""

    @property
    def usable(self) -> frozenset[str]:
        """Members that may get stages."""
        return frozenset(one for one in self.alive if one not in self.draining and not self.doubts(one))

    def doubt(self, node: str) -> None:
        """It was lost, or took no stage."""
        now, before = time.monotonic(), self._doubted.get(node)
        self._doubted[node] = Doubt(now) if before is None else before.again(now)

    def doubts(self, node: str) -> bool:
        return node in self._doubted and self._doubted[node].holds(time.monotonic())

    def drain(self, node: str, *, on: bool) -> None:
        """No stage on it from now on; or again."""
        (self.draining.add if on else self.draining.discard)(node)
        self.changed.set()

    async def gathered(self, within_s: float) -> None:
        """Wait for every member that can come, for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._looked:
                await self._looked.wait_for(
                    lambda: all(one.id in self.alive or one.id in self.hindrances for one in self.members)
                )

    async def watch(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                await self._look()
                rests = not self.draining and all(one.id in self.alive for one in self.members)
                await asyncio.sleep(LOOK_EVERY_S if rests else SEARCH_EVERY_S)
        finally:
            if self._calling is not None:
                self._calling.cancel()
                await asyncio.gather(self._calling, return_exceptions=True)

    async def _look(self) -> None:
        try:
            await self._read_members()
            token = await asyncio.to_thread(self.trust.token)
            if (why := await asyncio.to_thread(self._why_anew, token)) is not None:
                await self._follow_members_during(self._start_anew(token, why))
            self._call()  # at the start before Ray's driver is up: the nodes' Ray takes as long
            known = {one.id for one in self.members}
            self.draining &= known  # who left and comes back is as good as new
            self.alive = frozenset(one.node_id for one in await self.driver.nodes()) & known
            self._problem = None
        except (RayFailed, BadSetting) as error:
            self.alive = frozenset()
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("Ray", why=self._problem)
        for id in self.alive & self.hindrances.keys():
            del self.hindrances[id]
        if self.usable != self._seen:
            self._seen = self.usable
            self.changed.set()
        async with self._looked:
            self._looked.notify_all()

    async def _read_members(self) -> None:
        self.members = await asyncio.to_thread(read_members, self.trust.folder)
        self.draining &= {one.id for one in self.members}  # who leaves and comes back is as good as new

    async def _follow_members_during(self, start: Coroutine[Any, Any, None]) -> None:
        """Ray takes seconds, and whoever leaves loses the token before it is forgotten here."""
        starting = asyncio.create_task(start, name="ray-start")
        try:
            while not starting.done():
                await asyncio.wait([starting], timeout=SEARCH_EVERY_S)
                await self._read_members()
            await starting
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    def _why_anew(self, token: str) -> str | None:
        """Whether somebody was thrown out, it died, or nobody finds it any more where it listens."""
        if token != self.token:
            return "its token changed"
        if not can_listen(self.address):
            return f"{self.address} is this machine's address no more"
        return None if self.session.alive() else "it ended"

    async def _start_anew(self, token: str, why: str) -> None:
        """Stages go on: they are not Ray's. Raises BadSetting where there is no way to a node."""
        if not can_listen(self.address):
            self.address = await asyncio.to_thread(address_towards, self.members)
            self.member = await asyncio.to_thread(certified, self.trust, self.address)
            self.moved()
        log.warning("Ray starts anew", why=why)
        self.session = await self.driver.follow(self._start_head)
        self.token = token
        self._due.clear()

    async def _start_head(self) -> RaySession:
        await asyncio.to_thread(self.session.stop)
        folder = self.trust.folder / "ray"
        return await asyncio.to_thread(start_head, self.member, self.address, self.port, folder)

    def _call(self) -> None:
        """Over SSH, beside: an answer may take its time."""
        now = time.monotonic()
        absent = tuple(
            one for one in self.members if one.id not in self.alive and now >= self._due.get(one.id, now)
        )
        if absent and (self._calling is None or self._calling.done()):
            self._due |= {one.id: now + REMIND_S for one in absent}
            self._calling = asyncio.create_task(self._summon(Members(absent)), name="summon")

    async def _summon(self, absent: Members) -> None:
        answers = await summon(self.trust, absent, head_of(self.session))
        for one in absent:
            why = hindrance(one, answers[one.id])
            if why is not None:
                self._due[one.id] = time.monotonic() + CALL_AGAIN_S
            if why is None:
                self.hindrances.pop(one.id, None)
            elif self.hindrances.get(one.id) != why:
                self.hindrances[one.id] = why
                log.warning("a node is away", node=one.name, why=why)


@asynccontextmanager
async def open_ray_site(trust: Trust, port: int) -> AsyncIterator[RaySite]:
    """Starts Ray's head here, and ends it. Raises BadSetting, RayFailed."""
    folder = trust.folder / "ray"
    members = await asyncio.to_thread(read_members, trust.folder)
    address = address_towards(members)
    member = await asyncio.to_thread(certified, trust, address)
    await asyncio.to_thread(reap_left_over, folder)
    token = trust.token()
    session = await asyncio.to_thread(start_head, member, address, port, folder)
    driver = RayDriver(session)
    site = RaySite(trust, member, address, port, session, driver, members, token)
    watching = watched(asyncio.create_task(site.watch(), name="ray-site"))
    try:
        yield site
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await driver.close()
        await asyncio.to_thread(site.session.stop)


def address_towards(members: Members) -> str:
    """Of this machine, on the way to the first member that there is a way to. Raises BadSetting."""
    for one in members:
        with suppress(OSError):
            return own_address((one.addresses[0], DISCARD_PORT))
    raise BadSetting("no node of the cluster can be reached from this machine: is a network up?")


def certified(trust: Trust, address: str) -> Member:
    """This machine as a node, with a certificate that names that address."""
    issued = trust.ledger().newest(trust.node_id)
    if issued is None or address not in issued.addresses:
        addresses = tuple(dict.fromkeys([address, *own_addresses()]))
        return install_bundle(trust.folder, issue(trust, trust.node_id, (), addresses))
    return open_member(trust.folder)
