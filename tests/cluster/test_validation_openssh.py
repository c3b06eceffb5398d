"""The same check against OpenSSH's own server, on a port of 127.0.0.1."""

import asyncio
import getpass
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from omlx.cluster.findings import Report
from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.ssh import Access, Target
from omlx.cluster.validation import Asked, Wanted, check_hosts
from tests.walk.servers import free_port

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")


def write_key(file: Path) -> asyncssh.SSHKey:
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(file)
    file.chmod(0o600)
    key.write_public_key(f"{file}.pub")
    return key


class OpenSsh:
    """A server with its own configuration; the machine's own is not looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host_key = write_key(folder / "host_key")
        write_key(folder / "key")
        shutil.copy(folder / "key.pub", folder / "authorized_keys")
        self.port = free_port()
        self.access = Access(folder / "key", KnownHosts(folder / "known_hosts"))
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {folder / 'host_key'}",
            f"AuthorizedKeysFile {folder / 'authorized_keys'}",
            f"PidFile {folder / 'pid'}",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            f"SetEnv PATH={Path(sys.executable).parent}:/usr/bin:/bin",
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def check(self, vouched: str | None = None) -> Report:
        where = Target("127.0.0.1", getpass.getuser(), self.port)
        (report,) = asyncio.run(check_hosts([Asked(where, vouched)], self.access, Wanted(bulk_s=0.02)))
        return report


def wait_for_sshd(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            assert process.poll() is None and time.monotonic() < end, log.read_text()


@pytest.fixture
def openssh(tmp_path: Path) -> Iterator[OpenSsh]:
    assert SSHD is not None
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's sshd leaves its privileges
    server = OpenSsh(tmp_path)
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen([SSHD, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=log) as process:
        wait_for_sshd(server.port, process, tmp_path / "log")
        yield server
        process.terminate()


def test_a_machine_behind_openssh_is_pinned_and_looked_at(openssh: OpenSsh) -> None:
    unknown = openssh.check()
    assert [finding.what for finding in unknown.findings] == ["host key unknown"]
    assert unknown.fingerprint == openssh.host_key.get_fingerprint()
    first = openssh.check(unknown.fingerprint)
    assert first.fit, first.findings
    assert openssh.check().fit


def test_openssh_refuses_a_key_that_it_does_not_know(openssh: OpenSsh) -> None:
    (openssh.folder / "authorized_keys").write_text("")
    report = openssh.check(openssh.host_key.get_fingerprint())
    assert [finding.what for finding in report.findings] == ["login"]


def test_another_host_key_at_the_same_place_is_a_changed_one(openssh: OpenSsh) -> None:
    other = write_key(openssh.folder / "other")
    line = f"[127.0.0.1]:{openssh.port} {other.export_public_key().decode()}"
    openssh.access.known_hosts.file.write_text(line)
    openssh.access.known_hosts.file.chmod(0o600)
    report = openssh.check()
    assert [finding.what for finding in report.findings] == ["host key changed"]
