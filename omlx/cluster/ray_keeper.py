"""Keeps this machine's Ray going while it is a node of a cluster and knows where the head is.

What should run is read from the cluster folder, what is to be done about it is decided by `decide`. Whatever
Ray does wrong is told in the log, once, and tried again.
"""

import asyncio
import hashlib
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import structlog

from omlx.cluster.head_address import HEAD_FILE, HeadAddress, read_head
from omlx.cluster.node_identity import own_address
from omlx.cluster.private_files import read_private
from omlx.errors import OmlxError, RayFailed
from omlx.node.tls import CERTIFICATE

if TYPE_CHECKING:
    from omlx.cluster.membership import Member
    from omlx.cluster.ray_processes import RaySession

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
"""Between tries to reach the head. News of it, or of us, ends a pause."""
LONGEST_REST_S = 300.0
"""Between starts of Ray that come to nothing, each of which takes seconds of a core."""
STEADY_S = 30.0
"""What has run for so long is started again without a pause."""
STOP_WITHIN_S = 8.0
"""Ray takes four at most; a service manager kills us after ten."""
CUT_AGAIN_S = 0.1
MOST_REASONS, MOST_SAID = 32, 300

_FAILURES = (OmlxError, OSError, ImportError, psutil.Error)
"""What starting and ending Ray may raise."""


# ------------------------------------------------------------------ what is wanted, against what runs


@dataclass(frozen=True, slots=True)
class Wanted:
    """All that a worker of Ray is started with: where one of them changes, it takes another worker."""

    head: HeadAddress
    identity: str
    """A digest of this node's certificate and Ray's token."""


@dataclass(frozen=True, slots=True)
class Step:
    """Stop what runs, then start what is wanted; either may be left out."""

    stop: bool = False
    start: Wanted | None = None


def decide(wanted: Wanted | None, running: Wanted | None, *, rested: bool) -> Step:
    """`running` is what the worker that lives was started with; `rested`: no pause is under way."""
    if wanted == running:
        return Step()
    return Step(stop=running is not None, start=wanted if rested else None)


def pause_s(tries: int, *, reached: bool) -> float:
    """After so many tries in a row, from 1 on. reached: the head was there, so Ray itself was started."""
    longest = LONGEST_REST_S if reached else LONGEST_PAUSE_S
    return min(FIRST_PAUSE_S * 2.0 ** min(tries - 1, 30), longest)


# ------------------------------------------------------------------ what the cluster folder says

Stamp = tuple[str, tuple[int, int], tuple[int, int] | None, bool]


def read_stamp(folder: Path) -> Stamp | None:
    """Another one whenever `read_wanted` may say something else; None on a machine in no cluster."""
    try:
        link = str((folder / "node").readlink())
        token = _change(folder / "node" / "ray_token")
    except OSError:
        return None
    try:
        head = _change(folder / HEAD_FILE)
    except OSError:
        head = None
    return link, token, head, (folder / "authority").exists()


def _change(file: Path) -> tuple[int, int]:
    seen = file.stat()
    return seen.st_ino, seen.st_ctime_ns  # of a changed mode too


def read_wanted(folder: Path) -> Wanted | None:
    """None where no worker is to run: no cluster, no head yet, or the coordinator, whose `omlx serve` has the
    head. Raises BadSetting, OSError."""
    if not (folder / "node").is_symlink() or (folder / "authority").exists():
        return None
    if (head := read_head(folder)) is None:
        return None
    here = (folder / "node").resolve()
    shown = (here / CERTIFICATE).read_bytes() + read_private(here / "ray_token")
    return Wanted(head, hashlib.sha256(shown).hexdigest())


# ------------------------------------------------------------------ one worker


@dataclass(frozen=True, slots=True)
class _Gone:
    """What became of a worker."""

    why: str
    reached: bool
    lived_s: float | None = None
    """None: it did not come to that."""


def _reach(home: Path, head: HeadAddress) -> "tuple[Member, str]":
    # Here and below: cryptography and more come along, and a machine that no head has called goes without.
    from omlx.cluster.membership import open_member
    from omlx.cluster.ray_access import check_head

    member = open_member(home / "cluster")
    try:
        address = own_address(head.place)
    except OSError as error:
        where = f"{head.address}:{head.port}"
        raise RayFailed(f"there is no way to Ray's head at {where}: {error.strerror}") from None
    check_head(member, head.place)
    return member, address


def _start(member: "Member", address: str, head: HeadAddress, home: Path) -> "RaySession":
    from omlx.cluster.ray_processes import start_worker

    return start_worker(member, address, head.place, home / "ray")


def _reap(home: Path) -> bool:
    from omlx.cluster.ray_processes import reap_left_over

    return reap_left_over(home / "ray")


def _cut_short() -> None:
    """End `ray start`, so that who waits for it in another thread clears up after it."""
    from omlx.cluster.ray_processes import MARK

    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if MARK in child.environ():
                child.kill()


async def _work(home: Path, wanted: Wanted, look_every_s: float) -> _Gone:
    """A worker from its start to its end; who cancels this ends it."""
    try:
        member, address = await asyncio.to_thread(_reach, home, wanted.head)
    except _FAILURES as error:
        return _Gone(str(error), reached=False)
    # No task of its own: a thread goes on when who waits for it is cancelled.
    starting = asyncio.get_running_loop().run_in_executor(None, _start, member, address, wanted.head, home)
    try:
        session = await asyncio.shield(starting)
        log.info("Ray runs here", head=session.head, address=address)
        born = time.monotonic()
        while session.alive():  # noqa: ASYNC110 (another process's end gives no event)
            await asyncio.sleep(look_every_s)
        return _Gone(f"Ray ended: {session.log_tail()[-MOST_SAID:]}", True, time.monotonic() - born)
    except _FAILURES as error:
        return _Gone(str(error), reached=True)
    finally:
        await _end(starting)


async def _end(starting: "asyncio.Future[RaySession]") -> None:
    try:
        async with asyncio.timeout(STOP_WITHIN_S):
            while not starting.done():
                await asyncio.to_thread(_cut_short)
                await asyncio.wait({starting}, timeout=CUT_AGAIN_S)
            if starting.exception() is None:
                await asyncio.to_thread(starting.result().stop)
    except _FAILURES as error:  # of which TimeoutError is one
        why = str(error) or f"not within {STOP_WITHIN_S:g} s"
        log.warning("Ray does not end here; the next start ends it", why=why)


# ------------------------------------------------------------------ all of them, one at a time


async def keep_ray(home: Path, ended: asyncio.Event, look_every_s: float = LOOK_EVERY_S) -> None:
    """Until `ended`, or until it is cancelled; Ray is stopped then, which takes STOP_WITHIN_S at most.

    home: the folder with `cluster/`, as `run_agent` takes it; Ray's record lies in `ray/` there.
    """
    keeper = _Keeper(home, look_every_s)
    try:
        await keeper.sweep()
        while not ended.is_set():
            await keeper.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(look_every_s):
                    await ended.wait()
    finally:
        await keeper.end()


class _Keeper:
    """Owns the worker that runs, and what is known of those before."""

    def __init__(self, home: Path, look_every_s: float) -> None:
        self._home = home
        self._folder = home / "cluster"
        self._look_every_s = look_every_s
        self._stamp: Stamp | None = None
        self._wanted: Wanted | None = None
        self._running: Wanted | None = None
        self._task: asyncio.Task[_Gone] | None = None
        self._tries = 0
        """In a row, of which none has lived for long."""
        self._rested_at = 0.0
        self._said: set[str] = set()

    async def sweep(self) -> None:
        """End what an agent that was killed has left."""
        if (self._folder / "authority").exists() or not (self._home / "ray" / "ray.json").exists():
            return
        try:
            if await asyncio.to_thread(_reap, self._home):
                log.info("ended the Ray that an agent before this one had left")
        except _FAILURES as error:
            self._complain(str(error))

    async def look(self) -> None:
        self._hear()
        self._read()
        step = decide(self._wanted, self._running, rested=time.monotonic() >= self._rested_at)
        if step.stop:
            await self.end()
        if step.start is not None:
            work = _work(self._home, step.start, self._look_every_s)
            self._running, self._task = step.start, asyncio.create_task(work, name="ray-worker")

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # its end has a deadline
            self._running = self._task = None

    def _hear(self) -> None:
        """What has become of the worker."""
        if self._task is None or not self._task.done():
            return
        gone = self._task.result()
        self._running = self._task = None
        if gone.lived_s is not None:
            self._said.clear()
        self._tries = 0 if gone.lived_s is not None and gone.lived_s >= STEADY_S else self._tries + 1
        pause = pause_s(self._tries, reached=gone.reached) if self._tries else 0.0
        self._rested_at = time.monotonic() + pause
        self._complain(gone.why)

    def _read(self) -> None:
        """What should run. What cannot be read counts as what it was before."""
        stamp = read_stamp(self._folder)
        if stamp is None:
            self._stamp = self._wanted = None
        elif stamp != self._stamp:
            try:
                self._wanted = read_wanted(self._folder)
            except _FAILURES as error:
                self._stamp = None
                self._complain(str(error))
            else:
                self._stamp, self._tries, self._rested_at = stamp, 0, time.monotonic()

    def _complain(self, why: str) -> None:
        """Once for a reason, until Ray has run again. What differs in numbers alone says the same."""
        reason = re.sub(r"\d+", "0", why)
        if reason not in self._said and len(self._said) < MOST_REASONS:
            self._said.add(reason)
            log.warning("Ray does not run here", why=why)
