"""The coordinator's end of Ray's driver process: asks it, and starts it again when Ray has aborted it.

Ray is not imported here, and nothing that Ray does can end this process. A driver that is gone or silent is
an error of the calls that waited for it, never of a running stage.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from omlx.cluster.ray_access import ray_environment
from omlx.cluster.ray_messages import (
    LONGEST_LINE,
    Alive,
    Ask,
    End,
    Ended,
    Failed,
    FromDriver,
    Place,
    Placed,
    RayNode,
    Ready,
    ToDriver,
    from_driver,
    line,
)
from omlx.cluster.ray_processes import RaySession, last_lines
from omlx.cluster.recorded_process import RecordedProcess
from omlx.errors import Closed, RayFailed

DRIVER = (sys.executable, "-m", "omlx.cluster.ray_actor")
START_WITHIN_S = 30.0
"""To join Ray; a wrong token is tried for some 20 s."""
BEYOND_S = 5.0
"""What the driver may take on top of what it was asked to wait for; then it hangs inside Ray."""
NODES_WITHIN_S = 5.0
AT_ONCE = 16

Answer = TypeVar("Answer", bound=FromDriver)


@dataclass(slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    log: Path
    waiting: dict[int, "asyncio.Future[FromDriver]"] = field(default_factory=dict)
    over: str | None = None
    """Why it answers no more."""

    async def listen(self) -> None:
        """Until its end."""
        why = "ended"
        try:
            while data := await self.reader.readline():
                message = from_driver(data)
                future = self.waiting.pop(message.number, None)
                if future is not None and not future.done():
                    future.set_result(message)
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # ValueError: a line without an end
            why = f"answered nonsense: {error}"
        finally:
            code = await asyncio.shield(asyncio.to_thread(self.kill))
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            self.over = f"Ray's driver process {why} {how}: {last_lines(self.log)}"
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(RayFailed(self.over))
            self.waiting.clear()

    def kill(self) -> int:
        """Returns its exit code; blocks for a moment."""
        self.writer.transport.abort()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


class RayDriver:
    """One per coordinator. Its child is started by the first call, and again by the first after its end."""

    def __init__(self, session: RaySession, command: tuple[str, ...] = DRIVER) -> None:
        self._session = session
        self._command = command
        self._child: _Child | None = None
        self._listening: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._number = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of its process, while there is one."""
        return self._child.process.pid if self._child is not None and self._child.over is None else None

    async def place(self, node_id: str, head: str, within_s: float) -> Placed:
        """Start a stage on a node, which waits for node `head` to connect. Raises RayFailed."""
        return await self._ask(lambda number: Place(number, node_id, head, within_s), Placed, within_s)

    async def end(self, node_id: str, process: RecordedProcess, within_s: float) -> None:
        """Wait for a stage's end for so long, then kill it. Raises RayFailed where that is not known to have
        happened. A caller that is cancelled stops nothing."""
        await self._ask(lambda number: End(number, node_id, process, within_s), Ended, within_s)

    async def nodes(self) -> tuple[RayNode, ...]:
        """Those that Ray takes for alive; it is seconds behind. Raises RayFailed."""
        return (await self._ask(Ask, Alive, NODES_WITHIN_S)).nodes

    async def follow(self, start: Callable[[], Awaitable[RaySession]]) -> RaySession:
        """Of the head that `start` starts, from now on. Who waits for an answer hears that there is none,
        who asks meanwhile waits for the head. Raises as `start` does.

        The driver ends before its head does: without one, Ray's thread for errors takes a whole core.
        """
        async with self._starting:
            await self._let_go()
            self._session = await start()
            return self._session

    async def close(self) -> None:
        """End the driver; what it placed goes on."""
        self._closed = True
        async with self._starting:
            await self._let_go()

    async def _ask(self, make: Callable[[int], ToDriver], kind: type[Answer], within_s: float) -> Answer:
        async with self._places:
            child = await self._running()
            self._number += 1
            request = make(self._number)
            future: asyncio.Future[FromDriver] = asyncio.get_running_loop().create_future()
            child.waiting[request.number] = future
            child.writer.write(line(request))
            try:
                async with asyncio.timeout(within_s + BEYOND_S):
                    answer = await future
            except TimeoutError:
                await asyncio.to_thread(child.kill)
                raise RayFailed(f"Ray's driver did not answer within {within_s + BEYOND_S:.0f} s") from None
            finally:
                child.waiting.pop(request.number, None)
        if isinstance(answer, Failed):
            raise RayFailed(answer.message)
        if not isinstance(answer, kind):
            raise RayFailed(f"Ray's driver answered {type(answer).__name__}")
        return answer

    async def _running(self) -> _Child:
        async with self._starting:
            if self._closed:
                raise Closed("Ray's driver was closed")
            if self._child is not None and self._child.over is None:
                return self._child
            await self._let_go()
            child = await self._start()
            try:
                await self._joined(child)
            except BaseException:
                child.kill()
                raise
            self._child = child
            self._listening = asyncio.create_task(child.listen(), name="ray-driver")
            return child

    async def _joined(self, child: _Child) -> None:
        first: FromDriver
        try:
            async with asyncio.timeout(START_WITHIN_S):
                first = from_driver(await child.reader.readline())
        except TimeoutError:
            first = Failed(0, f"nothing within {START_WITHIN_S:.0f} s")
        except (OSError, ValueError, msgspec.MsgspecError):
            first = Failed(0, "it ended")
        if not isinstance(first, Ready):
            why = first.message if isinstance(first, Failed) else "it is out of order"
            said = f"{why} {last_lines(child.log)}".strip()
            raise RayFailed(f"Ray's driver cannot join Ray at {self._session.head}: {said}")

    async def _start(self) -> _Child:
        log = self._session.temp / "driver.log"
        where = ["--head", self._session.head, "--address", self._session.address]
        with ExitStack() as opened:
            try:
                output = opened.enter_context(log.open("ab"))
            except FileNotFoundError:
                raise RayFailed("Ray was stopped on this machine") from None
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 (a fork, not a wait)
                    [*self._command, "--fd", str(theirs.fileno()), *where],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=ray_environment(self._session.member),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        return _Child(process, reader, writer, log)

    async def _let_go(self) -> None:
        if self._child is not None and self._listening is not None:
            await asyncio.to_thread(self._child.kill)
            await self._listening
            self._child = self._listening = None
