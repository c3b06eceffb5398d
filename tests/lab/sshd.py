"""A host's OpenSSH server: its key, its configuration, who may come in, and the wait until it listens."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.machine import BARE_PYTHON, LabError, find, sh

LISTENS = """
import socket, sys, time
end = time.monotonic() + 10
while time.monotonic() < end:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()
        sys.exit(0)
    except OSError:
        time.sleep(0.02)
sys.exit(1)
"""
SEEN_AS = "/etc/ssh"
NO_PENALTIES = ("-o", "PerSourcePenalties=no")
"""OpenSSH 9.8 and later keep whoever was refused out for a while; earlier ones do not know the option."""

Command = Sequence[str | Path | int]


def new_key(path: Path, comment: str) -> str:
    """Makes an ed25519 key pair at `path` and `path`.pub; the public line without its comment."""
    for old in (path, path.with_name(f"{path.name}.pub")):
        old.unlink(missing_ok=True)
    sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path])
    return public_line(path)


def public_line(path: Path) -> str:
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


@dataclass(frozen=True, slots=True)
class Sshd:
    """Files of one host; they outlive a reboot."""

    name: str
    folder: Path
    """What the host sees as /etc/ssh."""
    home: Path

    @property
    def key(self) -> Path:
        return self.folder / "ssh_host_ed25519_key"

    @property
    def log(self) -> Path:
        return self.folder / "sshd.log"

    @property
    def command(self) -> list[str]:
        if (program := find("sshd")) is None:
            raise LabError("no sshd on this machine: apt-get install openssh-server")
        return [program, "-E", f"{SEEN_AS}/sshd.log", "-f", f"{SEEN_AS}/sshd_config"]

    def public_key(self) -> str:
        """Of the host; made when it is asked for first."""
        return public_line(self.key) if self.key.exists() else self.change_key()

    def change_key(self) -> str:
        """As a host that was set up anew. A server that runs keeps the old one."""
        return new_key(self.key, self.name)

    def authorize(self, *public_keys: str) -> None:
        """Adds lines to the authorized_keys of the host's user."""
        folder = self.home / ".ssh"
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / "authorized_keys").open("a") as file:
            file.writelines(f"{key.strip()}\n" for key in public_keys)

    def write_config(self, ip: str, port: int, environment: Mapping[str, str]) -> None:
        self.public_key()
        kept = " ".join(f'"{name}={environment[name]}"' for name in ("PATH", "PYTHONPATH"))
        (self.folder / "sshd_config").write_text(
            f"""Port {port}
ListenAddress {ip}
HostKey {SEEN_AS}/{self.key.name}
AuthorizedKeysFile .ssh/authorized_keys
PidFile /run/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
UseDNS no
Subsystem sftp internal-sftp
SetEnv {kept}
"""
        )

    def wait(
        self,
        run: Callable[[Command], subprocess.CompletedProcess[str]],
        server: subprocess.Popen[str],
        ip: str,
        port: int,
    ) -> None:
        """Until it takes connections. `run` runs a command in the host."""
        listens = run([*BARE_PYTHON, "-c", LISTENS, ip, port]).returncode == 0
        if not listens or server.poll() is not None:
            said = self.log.read_text()[-500:] if self.log.exists() else "it wrote no log"
            raise LabError(f"sshd of {self.name} does not listen on port {port}: {said}")

    def known_hosts_line(self, names: Sequence[str], port: int) -> str:
        shown = names if port == 22 else [f"[{name}]:{port}" for name in names]
        return f"{','.join(shown)} {self.public_key()}"
