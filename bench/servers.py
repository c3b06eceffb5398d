"""HTTP servers as process trees of their own: started, asked until they answer, weighed, ended.

It knows a server by its command and its URL. Linux: it reads /proc.
"""

import asyncio
import os
import socket
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from omlx.bench import LoadClient, Timing
from omlx.errors import OmlxError

CACHE_FOLDER = "OMLX_PAGED_SSD_CACHE_DIR"
"""Where our server keeps prefixes, in its environment."""
READY_WITHIN_S = 180.0
ANSWER_WITHIN_S = 300.0
END_WITHIN_S = 10.0
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started; `{port}` in a part of the command becomes its port."""

    name: str
    command: tuple[str, ...]
    model: str
    """What its clients call the model."""
    environment: Mapping[str, str]
    """On top of the bench's own."""


def fresh(prompt: str) -> str:
    """A system message that begins with a number of the prompt's own: nothing that a server has kept of
    others is of use. Else the template's own, most of a short prompt, would come from prefix caches."""
    return f"{zlib.crc32(prompt.encode())} is the number of this talk. You tell stories."


@dataclass(frozen=True, slots=True)
class Server:
    """A started one."""

    launch: Launch
    client: LoadClient
    process: asyncio.subprocess.Process
    started: float
    """Just before its process was, on time.perf_counter."""
    log: Path

    async def ask(self, prompt: str, max_tokens: int) -> Timing:
        """One greedy answer. Ends the bench where it fails or takes too long."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await self.client.ask(self.launch.model, prompt, max_tokens, fresh(prompt))
        except (OmlxError, TimeoutError) as error:
            raise SystemExit(self._complaint(f"did not answer ({error})")) from error

    async def first_answer(self, prompt: str) -> float:
        """Seconds from the start of its process to the end of an answer of one token; asks until it comes."""
        said = "it was silent"
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_WITHIN_S):
                while self.process.returncode is None:
                    try:
                        given = await self.client.ask(self.launch.model, prompt, 1, fresh(prompt))
                        return given.ended - self.started
                    except OmlxError as error:  # nobody listens yet, or no model is loaded yet
                        said = str(error)
                    await asyncio.sleep(RETRY_S)
        ended = self.process.returncode
        what = f"was not ready within {READY_WITHIN_S:.0f} s" if ended is None else f"ended with {ended}"
        raise SystemExit(self._complaint(f"{what} ({said})"))

    def tree(self) -> list[psutil.Process]:
        """Its process and all below; nothing once it has ended."""
        if self.process.returncode is not None:
            return []  # its number may belong to somebody else by now
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def peak_rss_bytes(self) -> int:
        """Of all its processes that live, each at its own peak."""
        return sum(_peak_rss_bytes(process.pid) for process in self.tree())

    def cpu_s(self) -> float:
        """Seconds that its processes have computed so far."""
        times = [process.cpu_times() for process in self.tree()]
        return sum(time.user + time.system for time in times)

    async def kill(self) -> None:
        """`kill -9`, of all its processes."""
        _kill(self.tree())
        await self.process.wait()

    def _complaint(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return f"bench: {self.launch.name} {what}; the last it said: {lines[-1]}"


def _peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0  # it has ended, but nobody has waited for it yet


@asynccontextmanager
async def running_server(launch: Launch) -> AsyncIterator[Server]:
    """Its HOME is a new folder: no settings, and no prefix cache that an earlier run left there, unless the
    launch names one."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix=f"bench-{launch.name}-") as home:
        log = Path(home) / "bench.log"
        own = {CACHE_FOLDER: str(Path(home) / "kept")}
        quiet = {"HOME": home, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        async with LoadClient(f"http://127.0.0.1:{port}/v1") as client:
            with log.open("wb") as said:
                started = time.perf_counter()
                process = await asyncio.create_subprocess_exec(
                    *(part.format(port=port) for part in launch.command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    cwd=home,
                    env=os.environ | {**own, **launch.environment, **quiet},
                    # Ctrl-C is for the bench, which then ends its servers.
                    start_new_session=True,
                )
            server = Server(launch, client, process, started, log)
            try:
                yield server
            finally:
                await _end(server)


async def _end(server: Server) -> None:
    """Ask the first process to end, and kill what is left of the tree."""
    tree = server.tree()
    with suppress(ProcessLookupError):
        server.process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_WITHIN_S):
            await server.process.wait()
    _kill(tree)
    await server.process.wait()


def _kill(tree: list[psutil.Process]) -> None:
    """The first one first."""
    # psutil knows each by when it began, too: the number alone may belong to somebody else by now.
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
