"""The node's agent: announces this machine until it is told to end, and says so anew when it joins or leaves.

It listens on no port, and whoever it announces itself to gets nothing but what is announced. Beside that it
keeps Ray going once this machine is a node of a cluster (`ray_keeper.py`).
"""

import asyncio
import errno
import fcntl
import logging
import os
import platform
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from omlx.cluster.discovery import Addresses, Announcer, announcing, multicast
from omlx.cluster.node_identity import HOST_KEY, host_key_fingerprint, node_id, own_addresses, this_node
from omlx.cluster.nodes import Node, NodeId, cluster_mark
from omlx.cluster.ray_keeper import keep_ray
from omlx.cluster.rules import LOCAL_NETWORK
from omlx.errors import Refused

log = structlog.get_logger()

LOOK_EVERY_S = 2.0
"""Above a second: an announcement replaces no records that are younger (RFC 6762, section 10.2)."""
LOCK_WITHIN_S = 0.5
"""Who looks at the lock holds it for a moment."""
LOCK_AGAIN_S = 0.05

_HOLDER = re.compile(rb"([1-9][0-9]{0,9})( announced)?\n")


# ------------------------------------------------------------------ one at a time


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the lock; `pid` is None for a moment after it was taken."""

    pid: int | None
    announced: bool
    """It is past its start."""


class Lock:
    """Ours until the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, *, announced: bool) -> None:
        line = f"{os.getpid()} announced\n" if announced else f"{os.getpid()}\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, line.encode(), 0)


@contextmanager
def only_one(file: Path) -> Iterator[Lock]:
    """Raises Refused when another agent of this user runs, with its pid."""
    file = file.expanduser()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Refused(f"lock file {file}: {error.strerror}; let this user read and write it") from error
    try:
        _take(descriptor, file)
        lock = Lock(descriptor)
        lock.write(announced=False)
        yield lock
    finally:
        os.close(descriptor)


def _take(descriptor: int, file: Path) -> None:
    end = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                who = _read_holder(descriptor).pid
                raise Refused(
                    f"already running, pid {who or 'not known'} (it holds {file}): one agent a user is enough"
                ) from None
            time.sleep(LOCK_AGAIN_S)
        except OSError as error:
            raise Refused(
                f"lock file {file}: {error.strerror}; a home folder on a local disk helps"
            ) from error


def holder(file: Path) -> Holder | None:
    """The agent that runs; None when none does. Raises Refused for a file that may not be read."""
    try:
        descriptor = os.open(file.expanduser(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"lock file {file}: {error.strerror}; let this user read it") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read_holder(descriptor: int) -> Holder:
    found = _HOLDER.fullmatch(os.pread(descriptor, 32, 0))
    return Holder(int(found[1]) if found else None, bool(found and found[2]))


# ------------------------------------------------------------------ what is announced


class Membership:
    """The cluster that the folder says this machine is in, read again whenever the folder changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()
        self._stamp: tuple[str, int] | None = None
        self._mark: str | None = None
        self._problem: str | None = None

    def look(self) -> str | None:
        """Its mark, None for none. What cannot be read is said once, and counts as what it was before."""
        stamp = self._read_stamp()
        if stamp is None:
            self._stamp = self._mark = self._problem = None
        elif stamp != self._stamp or self._problem is not None:
            self._stamp = stamp
            try:
                self._mark, problem = _mark_in(self._folder), None
            except (Refused, OSError, ImportError) as error:
                problem = str(error)
            if problem is not None and problem != self._problem:
                log.warning("which cluster is ours is not known", why=problem)
            self._problem = problem
        return self._mark

    def _read_stamp(self) -> tuple[str, int] | None:
        """Joining and renewing give the link another end, leaving removes it."""
        try:
            return str((self._folder / "node").readlink()), self._folder.stat().st_mtime_ns
        except OSError:
            return None


def _mark_in(folder: Path) -> str:
    # Takes cryptography along, some 15 MB: a machine in no cluster goes without.
    from omlx.cluster.membership import open_member

    return cluster_mark(open_member(folder).cluster_id)


class Likeness:
    """This machine as it is to be announced."""

    def __init__(self, home: Path, ssh_port: int, host_key: Path) -> None:
        self._id: NodeId = node_id(home / "node.json")
        self._membership = Membership(home / "cluster")
        self._ssh_port = ssh_port
        self._host_key = host_key

    def stamp(self) -> tuple[str, str | None, str | None]:
        """All that may change while the agent runs; addresses are followed elsewhere. Takes microseconds."""
        return socket.gethostname(), host_key_fingerprint(self._host_key), self._membership.look()

    def node(self, cluster: str | None) -> Node:
        return this_node(
            self._id,
            (),
            at=time.time(),
            ssh_port=self._ssh_port,
            cluster=cluster,
            host_key=self._host_key,
        )


def among(given: tuple[str, ...]) -> Addresses:
    """Those of the IPv4 addresses `given` that this machine has at the moment; all its own for none."""
    if not given:
        return own_addresses

    def had() -> tuple[str, ...]:
        here = {one.address for several in psutil.net_if_addrs().values() for one in several}
        return tuple(address for address in given if address in here)

    return had


# ------------------------------------------------------------------ the agent


async def run_agent(  # noqa: PLR0913 (a test's machine differs in each)
    home: Path,
    ended: asyncio.Event,
    told: Callable[[Node, tuple[str, ...]], None],
    *,
    addresses: Addresses = own_addresses,
    ssh_port: int = 22,
    host_key: Path = HOST_KEY,
    look_every_s: float = LOOK_EVERY_S,
) -> None:
    """Announce this machine until `ended`, then say goodbye: that takes two seconds at most, or as long as
    Ray takes to end.

    home: the folder with `node.json` and `cluster/`, usually ~/.omlx; without a `~`.
    told: called once, with the node and its addresses, when the first announcement is out.

    Raises Refused where the id cannot be kept or mDNS cannot be had.
    """
    with _network_failures_said():
        likeness = Likeness(home, ssh_port, host_key)
        stamp = likeness.stamp()
        node = await asyncio.to_thread(likeness.node, stamp[-1])
        async with multicast(addresses) as sockets, _beside(keep_ray(home, ended), ended):
            first = True
            while not ended.is_set():
                async with announcing(sockets, node) as announcer:
                    if first:
                        told(node, sockets.addresses)
                    first = False
                    node, stamp = await _follow(announcer, likeness, (node, stamp), ended, look_every_s)


@asynccontextmanager
async def _beside(keeping: Coroutine[None, None, None], ended: asyncio.Event) -> AsyncIterator[None]:
    """It ends by itself at `ended`; before that it may end as it likes, and the announcing goes on."""
    task = asyncio.create_task(keeping, name="ray-keeper")
    task.add_done_callback(_say_why_it_ended)
    try:
        yield
    finally:
        if not ended.is_set():
            task.cancel()
        await asyncio.wait({task})  # its end has a deadline


def _say_why_it_ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        fix = "restart `omlx node run`, and report this"
        log.error("no Ray runs here any more, but this machine is announced", fix=fix, exc_info=error)


_State = tuple[Node, tuple[str, str | None, str | None]]


async def _follow(
    announcer: Announcer, likeness: Likeness, state: _State, ended: asyncio.Event, every_s: float
) -> _State:
    """Returns at the end, or with what goes by another name from now on: the host key is part of it."""
    node, stamp = state
    while not await _passed(ended, every_s):
        now = likeness.stamp()
        if now == stamp:
            continue
        before, node, stamp = node, await asyncio.to_thread(likeness.node, now[-1]), now
        log.info("announced anew", name=node.name, in_a_cluster=node.cluster is not None)
        if node.host_key_fingerprint != before.host_key_fingerprint:
            break
        await announcer.update(node)
    return node, stamp


async def _passed(event: asyncio.Event, seconds: float) -> bool:
    """Whether it came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class _SendFailures(logging.Handler):
    """zeroconf keeps errors of its sockets to its own log; one of them a person can do something about."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        refused = any(isinstance(one, OSError) and one.errno == errno.EHOSTUNREACH for one in arguments)
        if refused and not self._said and platform.system() == "Darwin":
            self._said = True
            log.warning(
                "macOS lets nothing out to the local network (errno 65)",
                fix=f"allow it in {LOCAL_NETWORK}, or install with sudo: the system's services need no leave",
            )


@contextmanager
def _network_failures_said() -> Iterator[None]:
    handler, logger = _SendFailures(), logging.getLogger("zeroconf")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
