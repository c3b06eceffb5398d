"""Hosts that one key may log into: what tests of the cluster start from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.host import Host
from tests.lab.lab import Lab, macs
from tests.lab.sshd import new_key


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts with sshd on port 22. The files can be read in every host, and go with the lab."""

    lab: Lab
    key: Path
    """A private key that every host takes; its public half is beside it, with .pub."""
    known_hosts: Path
    """A line for each host, by address and names."""

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.lab.hosts

    def ssh(self, to: Host, *command: str) -> list[str]:
        """The command line of OpenSSH's client, to be run in another host."""
        strict = ("StrictHostKeyChecking=yes", "BatchMode=yes", "ConnectTimeout=5", "IdentitiesOnly=yes")
        options = [f"UserKnownHostsFile={self.known_hosts}", *strict]
        flags = [part for option in options for part in ("-o", option)]
        return ["ssh", "-F", "none", "-i", str(self.key), *flags, f"root@{to.ip}", *command]


@contextmanager
def fleet(
    count: int,
    memory_gib: int | Sequence[int] = 64,
    shims: Mapping[str, str] | None = None,
    *,
    ttl_s: float = 600,
) -> Iterator[Fleet]:
    """Raises `LabError` where there can be no lab or no sshd."""
    with Lab(macs(count, memory_gib, shims), ttl_s) as lab:
        key = lab.folder / "id_ed25519"
        public = new_key(key, "tests")
        known_hosts = lab.folder / "known_hosts"
        known_hosts.write_text("".join(f"{host.start_sshd(public)}\n" for host in lab.hosts))
        yield Fleet(lab, key, known_hosts)
