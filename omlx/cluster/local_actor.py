"""A stage as a child process on this machine; the head keeps the other end of its socket.

The child sees the socket close when the head dies, however it dies, and ends itself: no orphans.
Little is imported here, so that a server may start its first stage before it does anything else.
"""

import asyncio
import ctypes.util
import os
import platform
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlx.node.client import Placement, StageProcess

STAGE = (sys.executable, "-m", "omlx.node.process")
"""The command of a stage; `--fd N` follows."""
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1048576"
"""Huge pages: a step reads every weight, and most of what loading takes is page faults. One heap, and large
arrays outside it: what is freed goes back."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A started child that nobody has taken into use: it imports what it needs, then waits."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket

    def discard(self) -> None:
        """End it; returns when it is gone."""
        self.control.close()
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class LocalActor:
    """A child in use. Implements StageProcess."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: "subprocess.Popen[bytes]"
    host: str = "127.0.0.1"
    node: str | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    async def end(self, within_s: float) -> None:
        """Wait for its end for so long, then kill it."""
        try:
            await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


async def place_local(index: int, node: str = "", command: tuple[str, ...] = STAGE) -> LocalActor:
    """Start a stage as a child of this process."""
    return await _take(start_child(command))


def discard_all(spares: list[Spare]) -> None:
    """End those that are left."""
    while spares:
        spares.pop().discard()


def place_from(spares: list[Spare]) -> "Placement":
    """Like `place_local`, but the children in `spares` are taken first, and out of it."""

    async def place(index: int, node: str) -> "StageProcess":
        return await _take(spares.pop()) if spares else await place_local(index, node)

    return place


def start_child(command: tuple[str, ...] = STAGE) -> Spare:
    """Start a stage's process; which stage it will be is told later, through its socket."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints must not mix with the command line's own output
            env=os.environ | compute_environment(),
            # Ctrl-C is for the head, which then closes its stages in order.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Spare(process, ours)


async def _take(spare: Spare) -> LocalActor:
    try:
        reader, writer = await asyncio.open_connection(sock=spare.control)
    except BaseException:
        spare.discard()
        raise
    return LocalActor(reader, writer, spare.process)


def free_ring(stages: int) -> tuple[str, ...]:
    """An address of this machine for each stage of a new mx.distributed group."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(stages)]
        return tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)


def compute_environment() -> dict[str, str]:
    """What makes a stage compute well on this machine.

    MLX's wheel for Linux links the reference BLAS, which is some 20 times slower on float32 than
    OpenBLAS. One thread each: stages share the machine, and two threads gained nothing. Kernels for AVX2
    whatever the processor: what OpenBLAS takes for AVX-512 is slower on rows (docs/LOG.md) and rounds
    otherwise, and so do machines that differ.
    """
    if platform.system() != "Linux":
        return {}
    found = {"GLIBC_TUNABLES": _joined(":", MALLOC, os.environ.get("GLIBC_TUNABLES"))}
    if (library := ctypes.util.find_library("openblas")) is not None:
        found["LD_PRELOAD"] = _joined(" ", library, os.environ.get("LD_PRELOAD"))
        found["OPENBLAS_NUM_THREADS"] = "1"
        if "OPENBLAS_CORETYPE" not in os.environ and {"avx2", "fma"} <= _processor_flags():
            found["OPENBLAS_CORETYPE"] = "Haswell"
    return found


def _processor_flags() -> set[str]:
    """What Linux says that every core of an x86 can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _joined(by: str, ours: str, theirs: str | None) -> str:
    return f"{ours}{by}{theirs}" if theirs else ours
