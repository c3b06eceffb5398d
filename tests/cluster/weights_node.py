"""A machine that weights are copied to, on this one: its home, its sshd, and what was told of each copy."""

import asyncio
import getpass
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from omlx.cluster import weights
from omlx.cluster.known_hosts import HostKey
from omlx.cluster.members import Joined
from omlx.cluster.nodes import NodeId
from omlx.cluster.planner import Span
from omlx.cluster.ssh import Access
from omlx.cluster.weights import Progress
from omlx.node.manifest import read_manifest
from tests.cluster.test_validation_openssh import SSHD, OpenSsh, wait_for_sshd

ROOT = Path(__file__).parents[2]
SPAN = Span(1, 3)


@dataclass
class Node:
    """The other machine: a home of its own, and what was told of each copy."""

    access: Access
    joined: Joined
    home: Path
    memo: Path
    server: int = 0
    told: list[tuple[int, int]] = field(default_factory=list)

    def provide(self, folder: Path, span: Span = SPAN, also: Progress | None = None) -> Path:
        self.told.clear()

        def tell(done: int, total: int) -> None:
            self.told.append((done, total))
            if also is not None:
                also(done, total)

        manifest = read_manifest(folder)
        given = weights.provide(self.access, self.joined, manifest, span, self.memo, tell)
        return asyncio.run(given).folder

    @property
    def sent(self) -> int:
        """Bytes of the last copy."""
        return self.told[-1][1] - self.told[0][0]

    @property
    def copies(self) -> Path:
        return self.home / ".omlx" / "cluster" / "weights"

    def end_sessions(self) -> None:
        for process in psutil.Process(self.server).children(recursive=True):
            process.kill()


def joined_at(port: int, user: str) -> Joined:
    return Joined(
        id=NodeId("a" * 32),
        name="mini",
        host="127.0.0.1",
        user=user,
        port=port,
        fingerprint="",
        chip="",
        memory_bytes=1 << 34,
        addresses=("127.0.0.1",),
        links=(),
        joined_at=datetime.now(UTC),
    )


@contextmanager
def openssh_node(folder: Path) -> Iterator[Node]:
    """Behind OpenSSH's own server, with SFTP, on a port of 127.0.0.1."""
    assert SSHD is not None
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's sshd leaves its privileges
    home = folder / "home"
    home.mkdir()
    (folder / "ssh").mkdir()
    server = OpenSsh(folder / "ssh")
    pinned = HostKey("ssh-ed25519", server.host_key.public_data)
    server.access.known_hosts.pin("127.0.0.1", server.port, pinned)
    config = server.folder / "sshd_config"
    environment = f"SetEnv HOME={home} PYTHONPATH={ROOT} PATH="
    told = config.read_text().replace("SetEnv PATH=", environment)
    config.write_text(f"{told}Subsystem sftp internal-sftp\n")
    log = folder / "log"
    with (
        log.open("wb") as written,
        subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=written) as process,
    ):
        wait_for_sshd(server.port, process, log)
        user = getpass.getuser()
        memo = folder / "digests.json"
        yield Node(server.access, joined_at(server.port, user), home, memo, process.pid)
        process.terminate()
