"""A stage as a child process on this machine; the head keeps the other end of its socket.

The child sees the socket close when the head dies, however it dies, and ends itself: no orphans.
"""

import asyncio
import ctypes.util
import os
import platform
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from omlx.node.client import StageProcess


@dataclass(slots=True)
class LocalActor:
    """A started child. Implements StageProcess."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: asyncio.subprocess.Process
    host: str = "127.0.0.1"

    @property
    def pid(self) -> int:
        return self.process.pid

    async def end(self, within_s: float) -> None:
        """Wait for its end for so long, then kill it."""
        try:
            async with asyncio.timeout(within_s):
                await self.process.wait()
        except TimeoutError:
            # Not process.kill(): it would reap a child that is dead already, behind asyncio's back; whose
            # own thread may have reaped it a moment ago.
            with suppress(ProcessLookupError):
                if self.process.returncode is None:
                    os.kill(self.pid, signal.SIGKILL)
            await self.process.wait()


STAGE = (sys.executable, "-m", "omlx.node.process")
"""The command of a stage; `--fd N` follows."""


async def place_local(index: int, command: tuple[str, ...] = STAGE) -> StageProcess:
    """Start stage `index` as a child of this process."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--fd", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # what a library prints must not mix with the command line's own output
            env=os.environ | compute_environment(),
            # Ctrl-C is for the head, which then closes its stages in order.
            start_new_session=True,
        )
    finally:
        theirs.close()
    try:
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()  # the child sees it and ends
        raise
    return LocalActor(reader, writer, process)


def free_ring(stages: int) -> tuple[str, ...]:
    """An address of this machine for each stage of a new mx.distributed group."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(stages)]
        return tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)


def compute_environment() -> dict[str, str]:
    """What makes a stage compute well on this machine.

    MLX's wheel for Linux links the reference BLAS, which is some 20 times slower on float32 than
    OpenBLAS. One thread each: stages share the machine, and two threads gained nothing.
    """
    if platform.system() != "Linux":
        return {}
    library = ctypes.util.find_library("openblas")
    if library is None:
        return {}
    preload = " ".join(part for part in (library, os.environ.get("LD_PRELOAD")) if part)
    return {"LD_PRELOAD": preload, "OPENBLAS_NUM_THREADS": "1"}
