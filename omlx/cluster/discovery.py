"""mDNS: announce this machine as `_omlx._tcp`, and hear of others. The only importer of zeroconf.

What is heard becomes Seen and Lost for the roster's fold. Whoever sent it may have lied, so nothing of it is
trusted; and a machine that dies says nothing at all (its records live on for over an hour), so no event here
is a report of death.
"""

import asyncio
import hashlib
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain, repeat

import structlog
from zeroconf import DNSQuestionType, Error, IPVersion, ServiceInfo, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from omlx.cluster.announcement import from_text, to_text
from omlx.cluster.complaints import Complaints
from omlx.cluster.inbox import MOST_WAITING, Inbox
from omlx.cluster.listed_hosts import check_hosts, look_up
from omlx.cluster.node_identity import own_addresses
from omlx.cluster.nodes import Node, NodeId, Source, listed_host
from omlx.cluster.roster import Lost, Seen
from omlx.errors import Refused

log = structlog.get_logger()

SERVICE = "_omlx._tcp.local."
POLL_S = 5.0
REGISTER_S = 5.0
"""Three repetitions take 0.5 s."""
CLOSE_S = 1.0
"""Each for the goodbye and for the sockets."""
RESOLVE_S = 1.5
SETTLE_S = 1.5
"""Records that an announcement replaces are forgotten a second later (RFC 6762, section 10.2)."""
ASK_AGAIN_S = (1.0, 1.0, 2.0, 4.0, 8.0, 16.0)
ASK_EVERY_S = 30.0
RESOLVERS = 8

Addresses = Callable[[], tuple[str, ...]]


class Multicast:
    """The mDNS sockets of this process, on every address of its own; they follow when those change."""

    def __init__(self, zeroconf: AsyncZeroconf) -> None:
        self.zeroconf = zeroconf
        self.addresses: tuple[str, ...] = ()
        self.announcers: list[Announcer] = []
        self._used: tuple[str, ...] = ()

    async def use(self, addresses: tuple[str, ...]) -> None:
        """Announce these, and have sockets on them as far as they bear multicast."""
        changed, self.addresses = addresses != self.addresses, addresses
        if changed:
            # Before there are new sockets: each of those repeats what is announced by then.
            for announcer in tuple(self.announcers):
                await announcer.repeat()
        self._used = await _use(self.zeroconf, self._used, addresses)

    async def follow(self, addresses: Addresses, poll_s: float) -> None:
        while True:
            await asyncio.sleep(poll_s)
            now = addresses()
            if now != self.addresses:
                log.info("addresses changed", before=self.addresses, now=now)
            if now != self.addresses or now != self._used:
                try:
                    await self.use(now)
                except (OSError, Error, Refused) as error:
                    log.warning("mDNS does not follow", why=str(error) or type(error).__name__)


@asynccontextmanager
async def multicast(
    addresses: Addresses = own_addresses, *, poll_s: float = POLL_S
) -> AsyncIterator[Multicast]:
    """`addresses` tells this machine's own IPv4 addresses; it is asked every `poll_s` seconds.

    Raises Refused where port 5353 cannot be shared.
    """
    async with _opened() as zeroconf:
        sockets = Multicast(zeroconf)
        await sockets.use(addresses())
        following = asyncio.create_task(sockets.follow(addresses, poll_s), name="discovery-addresses")
        try:
            yield sockets
        finally:
            await _end(following)


# ------------------------------------------------------------------ saying


class Announcer:
    """Says what this machine is for as long as `announcing` is open."""

    def __init__(self, sockets: Multicast, node: Node) -> None:
        self._sockets = sockets
        self._times = 0
        self._info = _service(node, sockets.addresses, self._times)
        self._node = node

    async def start(self) -> None:
        try:
            async with asyncio.timeout(REGISTER_S):
                # Not probing for another who has our name saves 1.2 s, and lets nobody keep us silent by
                # claiming every name. Ours has an id and a key in it; of a copy of both, copies are heard.
                said = await self._sockets.zeroconf.async_register_service(
                    self._info, cooperating_responders=True
                )
                await said
        except (TimeoutError, OSError, Error) as error:
            raise Refused(f"mDNS cannot announce this machine: {error or type(error).__name__}") from error
        self._sockets.announcers.append(self)

    async def update(self, node: Node) -> None:
        """Say something else of the same machine from now on."""
        self._node = node
        await self.repeat()

    async def repeat(self) -> None:
        self._times += 1
        self._info = _service(self._node, self._sockets.addresses, self._times)
        try:
            async with asyncio.timeout(REGISTER_S):
                await (await self._sockets.zeroconf.async_update_service(self._info))
        except (TimeoutError, OSError, Error) as error:
            raise Refused(f"mDNS cannot announce what changed: {error or type(error).__name__}") from error

    async def stop(self) -> None:
        """Say goodbye."""
        if self in self._sockets.announcers:
            self._sockets.announcers.remove(self)
        try:
            async with asyncio.timeout(CLOSE_S):
                await (await self._sockets.zeroconf.async_unregister_service(self._info))
        except (TimeoutError, OSError, Error) as error:
            log.info("mDNS: no goodbye said", why=str(error) or type(error).__name__)


@asynccontextmanager
async def announcing(sockets: Multicast, node: Node) -> AsyncIterator[Announcer]:
    """Opens when the announcement is out, half a second later. Raises Refused."""
    announcer = Announcer(sockets, node)
    try:
        await announcer.start()
        yield announcer
    finally:
        await announcer.stop()


def _service(node: Node, addresses: Iterable[str], times: int) -> ServiceInfo:
    # Counted: who hears A, B, A within ten seconds still holds the first A, and takes the last for no news.
    counted = f"u={times}".encode("ascii")
    # Who copies an id but not the host key gets a name of its own here, and so is heard beside the other.
    key = hashlib.sha256((node.host_key_fingerprint or "").encode()).hexdigest()[:8]
    return ServiceInfo(
        SERVICE,
        f"{node.id}-{key}.{SERVICE}",
        port=node.agent_port or 0,
        properties=to_text(node) + bytes([len(counted)]) + counted,
        server=f"omlx-{node.id}-{key}.local.",
        parsed_addresses=list(addresses),
    )


# ------------------------------------------------------------------ hearing


class Browser:
    """An async iterator of Seen and Lost. What waits is bounded: of each node only the newest is kept."""

    def __init__(self, sockets: Multicast, now: Callable[[], float]) -> None:
        self._sockets = sockets
        self._now = now
        self._inbox = Inbox()
        self._unresolved: asyncio.Queue[tuple[Zeroconf, Source, str]] = asyncio.Queue(MOST_WAITING)
        self._queued: set[tuple[Source, str]] = set()
        self._again: dict[str, asyncio.TimerHandle] = {}
        self._who: dict[str, tuple[NodeId, str | None]] = {}
        """By the announcement's name: whose goodbye it would be."""
        self._asked: dict[str, str] = {}
        """Listed hosts by address."""
        self._complaints = Complaints()
        self._tasks: list[asyncio.Task[None]] = []

    def __aiter__(self) -> "Browser":
        return self

    async def __anext__(self) -> Seen | Lost:
        return await self._inbox.get()

    def start(self, hosts: tuple[str, ...]) -> None:
        work = [self._resolve() for _ in range(RESOLVERS)]
        for task in (asyncio.create_task(one) for one in [*work, *([self._ask(hosts)] if hosts else [])]):
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def stop(self) -> None:
        try:
            await _end(*self._tasks)
        finally:
            for timer in self._again.values():
                timer.cancel()

    def change(
        self,
        zeroconf: Zeroconf,
        service_type: str,
        name: str,
        state_change: ServiceStateChange,
        *,
        source: Source,
    ) -> None:
        """Called by zeroconf, in our loop."""
        if state_change is not ServiceStateChange.Removed:
            self._look(zeroconf, source, name)
            if state_change is ServiceStateChange.Updated:
                self._look_again(zeroconf, source, name)
        elif source == "mdns" and name in self._who:  # a direct answer merely runs out
            id, key = self._who.pop(name)
            self._tell(Lost(id, key, self._now()))

    def _look(self, zeroconf: Zeroconf, source: Source, name: str) -> None:
        if (source, name) in self._queued:
            return
        # Most say all in one packet. They need not wait behind those who say too little to be resolved.
        info = AsyncServiceInfo(SERVICE, name)
        if info.load_from_cache(zeroconf):
            return self._heard(info, source)
        try:
            self._unresolved.put_nowait((zeroconf, source, name))
        except asyncio.QueueFull:
            self._complaints.tell("everybody", f"over {MOST_WAITING} announcements at once")
        else:
            self._queued.add((source, name))

    def _look_again(self, zeroconf: Zeroconf, source: Source, name: str) -> None:
        def look() -> None:
            self._again.pop(name, None)
            self._look(zeroconf, source, name)

        if name not in self._again and len(self._again) < MOST_WAITING:
            self._again[name] = asyncio.get_running_loop().call_later(SETTLE_S, look)

    async def _resolve(self) -> None:
        while True:
            zeroconf, source, name = await self._unresolved.get()
            self._queued.discard((source, name))
            if zeroconf.done:
                continue
            info = AsyncServiceInfo(SERVICE, name)
            try:
                known = await info.async_request(zeroconf, RESOLVE_S * 1000)
            except (OSError, Error):
                known = False
            if known:
                self._heard(info, source)

    def _heard(self, info: ServiceInfo, source: Source) -> None:
        addresses = [text for text in info.parsed_addresses(IPVersion.V4Only) if self._usable(text)]
        try:
            node = from_text(info.text or b"", addresses, info.port, at=self._now(), source=source)
        except Refused as error:
            self._complaints.tell(info.name, str(error))
            return
        if source == "static":
            host = next((self._asked[text] for text in addresses if text in self._asked), None)
            node = node if host is None else node.answering(host)
        if len(self._who) >= MOST_WAITING:
            self._who.pop(next(iter(self._who)))
        self._who[info.name] = (node.id, node.host_key_fingerprint)
        self._tell(Seen(node))

    def _usable(self, text: str) -> bool:
        """Nobody else is at a loopback address, unless that is all that we have ourselves."""
        address = ipaddress.ip_address(text)
        if address.is_loopback:
            return all(ipaddress.ip_address(own).is_loopback for own in self._sockets.addresses)
        return not (address.is_multicast or address.is_unspecified or address.is_reserved)

    async def _ask(self, hosts: tuple[str, ...]) -> None:
        """Listed hosts, each directly: that gets through where multicast does not.

        From other ports each time, at first soon again: where several programs of a host share port 5353, the
        sender's port decides which of them gets a question.
        """
        for pause in chain(ASK_AGAIN_S, repeat(ASK_EVERY_S)):
            try:
                async with AsyncExitStack() as stack:
                    zeroconf = await stack.enter_async_context(_opened(unicast=True))
                    await _use(zeroconf, (), self._sockets.addresses)
                    async with asyncio.TaskGroup() as group:
                        for host in hosts:
                            group.create_task(self._ask_one(host, zeroconf.zeroconf, stack))
                    await asyncio.sleep(pause)
            except Refused as error:
                self._complaints.tell("listed hosts", str(error))
                await asyncio.sleep(pause)

    async def _ask_one(self, host: str, zeroconf: Zeroconf, stack: AsyncExitStack) -> None:
        addresses = await look_up(host)
        if not addresses:
            self._complaints.tell(host, "no address is known of this listed host")
            return
        self._asked = {text: other for text, other in self._asked.items() if other != host}
        self._asked |= dict.fromkeys(addresses, host)
        self._tell(Seen(listed_host(host, addresses, self._now())))
        handler = partial(self.change, source="static")
        for text in addresses:
            if ipaddress.ip_address(text).version == 4:
                # It asks as soon as it is made.
                browser = AsyncServiceBrowser(
                    zeroconf, SERVICE, handlers=[handler], addr=text, question_type=DNSQuestionType.QU
                )
                await stack.enter_async_context(browser)

    def _tell(self, event: Seen | Lost) -> None:
        if not self._inbox.put(event):
            self._complaints.tell("everybody", "too many nodes at once")

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.fail(error)


@asynccontextmanager
async def browsing(
    sockets: Multicast, hosts: Iterable[str] = (), *, now: Callable[[], float] = time.time
) -> AsyncIterator[Browser]:
    """Hears of nodes, and asks the listed `hosts` directly. `now` stamps the events, in seconds since 1970.

    Raises BadSetting for a host that is neither a name nor an address.
    """
    listed = check_hosts(hosts)
    browser = Browser(sockets, now)
    browser.start(listed)
    try:
        handler = partial(browser.change, source="mdns")
        async with AsyncServiceBrowser(sockets.zeroconf.zeroconf, SERVICE, handlers=[handler]):
            yield browser
    finally:
        await browser.stop()


# ------------------------------------------------------------------ opening and closing


@asynccontextmanager
async def _opened(*, unicast: bool = False) -> AsyncIterator[AsyncZeroconf]:
    """On no address yet: see `_use`."""
    try:
        zeroconf = AsyncZeroconf(interfaces=[], unicast=unicast, ip_version=IPVersion.V4Only)
    except OSError as error:
        raise Refused(
            f"mDNS cannot share UDP port 5353 ({error.strerror}); another program holds it for itself alone"
        ) from error
    try:
        yield zeroconf
    finally:
        try:
            async with asyncio.timeout(CLOSE_S):
                await zeroconf.async_close()
        except (TimeoutError, Error) as error:
            log.info("mDNS sockets closed late", why=str(error) or type(error).__name__)


async def _use(zeroconf: AsyncZeroconf, used: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Explicit addresses, since on a machine with several networks all else depends on its default route. One
    by one, since an interface without multicast would take the others along. Returns those that work."""
    keep = tuple(address for address in used if address in wanted)
    if keep != used:
        await zeroconf.async_update_interfaces(list(keep))
    for address in wanted:
        if address not in keep:
            try:
                await zeroconf.async_update_interfaces([*keep, address])
            except OSError:
                continue
            keep = (*keep, address)
    return tuple(address for address in wanted if address in keep)


async def _end(*tasks: asyncio.Task[None]) -> None:
    """Cancel, wait, and raise what one of them ended with by itself."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
