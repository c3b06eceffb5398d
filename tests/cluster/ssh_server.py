"""A real SSH server on 127.0.0.1 with a shell behind it: asyncssh's, or one that answers as a test says."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from omlx.cluster.findings import Finding, Report
from omlx.cluster.known_hosts import HostKey, KnownHosts
from omlx.cluster.ssh import Access, Target
from omlx.cluster.validation import Asked, Wanted, check_hosts

QUICK = Wanted(bulk_s=0.02)
Process = asyncssh.SSHServerProcess[bytes]
Answer = Callable[[Process], Awaitable[None]]


@dataclass
class Machine:
    """The other machine: its home, its host key, and who may come in."""

    folder: Path
    host_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    client_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    port: int = 0
    commands: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        file = self.access.key_file
        self.client_key.write_private_key(file)
        file.chmod(0o600)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def known_hosts(self) -> KnownHosts:
        return KnownHosts(self.folder / "ours" / "known_hosts")

    @property
    def access(self) -> Access:
        return Access(self.folder / "key", self.known_hosts)

    @property
    def target(self) -> Target:
        return Target("127.0.0.1", "admin", self.port)

    @property
    def pinned(self) -> HostKey:
        return HostKey("ssh-ed25519", self.host_key.public_data)

    @property
    def fingerprint(self) -> str:
        return self.pinned.fingerprint

    def pin(self) -> None:
        self.known_hosts.pin("127.0.0.1", self.port, self.pinned)

    @property
    def environment(self) -> dict[str, str]:
        """With `omlx` beside the Python that runs the tests, as an installation has it."""
        return {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        }

    async def shell(self, process: Process) -> None:
        """As sshd: the user's shell runs the command."""
        await run_shell(process, process.command or "", self.environment)


async def run_shell(process: Process, command: str, environment: dict[str, str]) -> None:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", command),
        env=environment,
        cwd=environment["HOME"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    assert child.stdin and child.stdout and child.stderr
    incoming = asyncio.ensure_future(pump(process.stdin, child.stdin))
    try:
        with suppress(OSError, asyncssh.Error):
            await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
    finally:
        incoming.cancel()
        child.stdin.close()
        # Whose output has ended is about to end: a signal now would reap it, and its code be lost.
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await child.wait()
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
        process.exit(await child.wait())
        await asyncio.wait([incoming])


async def pump(source: Any, sink: Any) -> None:
    with suppress(OSError, asyncssh.Error):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    if isinstance(sink, asyncio.StreamWriter):
        sink.close()


class _Door(asyncssh.SSHServer):
    def __init__(self, machine: Machine, inside: list[asyncssh.SSHServerConnection]) -> None:
        self._machine = machine
        self._inside = inside

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._inside.append(conn)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return key.public_data == self._machine.client_key.public_data and username == "admin"


@asynccontextmanager
async def sshd(machine: Machine, answer: Answer | None = None) -> AsyncIterator[Machine]:
    """`answer` in the place of the machine's shell."""

    inside: list[asyncssh.SSHServerConnection] = []
    serving: set[asyncio.Task[Any]] = set()

    async def serve(process: Process) -> None:
        machine.commands.append(process.command or "")
        if task := asyncio.current_task():
            serving.add(task)
            task.add_done_callback(serving.discard)
        await (answer or machine.shell)(process)

    server = await asyncssh.listen(
        "127.0.0.1",
        machine.port,
        server_factory=lambda: _Door(machine, inside),
        server_host_keys=[machine.host_key],
        process_factory=serve,
        encoding=None,
    )
    machine.port = server.get_port()
    try:
        yield machine
    finally:
        server.close()
        for connection in inside:
            connection.abort()
            await connection.wait_closed()
        if serving:
            for task in serving:
                task.cancel()
            await asyncio.wait(serving, timeout=5)
        await server.wait_closed()


def without_python(folder: Path) -> dict[str, str]:
    """A PATH with what a bare machine has, and neither omlx nor Python."""
    folder.mkdir()
    for name in ("sh", "uname", "readlink"):
        (folder / name).symlink_to(shutil.which(name) or "")
    return {"HOME": str(folder), "PATH": str(folder), "LANG": os.environ.get("LANG", "C")}


def check(machine: Machine, answer: Answer | None = None, vouched: str | None = None) -> Report:
    """Of a machine that is known unless something is vouched for."""

    async def run() -> Report:
        async with sshd(machine, answer):
            if vouched is None:
                machine.pin()
            (report,) = await check_hosts([Asked(machine.target, vouched)], machine.access, QUICK)
            return report

    return asyncio.run(run())


def only_blocking(report: Report) -> Finding:
    blocking = [finding for finding in report.findings if finding.blocking]
    assert len(blocking) == 1, report.findings
    assert not report.fit
    return blocking[0]
