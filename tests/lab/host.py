"""A pretend host: namespaces with a network card, a home, a name and a memory, and commands in it."""

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.lab.machine import (
    HOST_NAMESPACES,
    ROOT,
    SYSTEM_PATH,
    Groups,
    LabError,
    Namespaces,
    end,
    ipv6_setting,
    kill_group,
    script,
    send_signal,
    sh,
    wait_dead,
)
from tests.lab.sshd import NO_PENALTIES, SEEN_AS, Sshd

NET = "10.77.0"
Stream = int | IO[str] | None
IN_GROUPS = 'for group in $LAB_GROUPS; do echo $$ >"$group/cgroup.procs"; done; unset LAB_GROUPS; exec "$@"'


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host is to be."""

    name: str
    memory_gib: int | None = None
    """What it says that it has; None: what the machine has."""
    shims: Mapping[str, str] = field(default_factory=dict)
    """Scripts by the name of the command that they stand for."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all hosts of a lab have in common."""

    folder: Path
    groups: Groups
    etc_hosts: str
    private: tuple[str, ...]
    """Folders that each host has to itself."""
    shm_mib: int


def address_of(number: int) -> str:
    return f"{NET}.{10 + number}"


def inside(pid: int, folder: Path, command: Sequence[str | Path | int]) -> list[str]:
    """The command line that runs the command in the host of that init; LAB_GROUPS names its groups."""
    enter = ["nsenter", "-t", str(pid), "-n", "-m", "-u", "-i", "-p", f"--wd={folder}", "--"]
    return ["sh", "-c", IN_GROUPS, "sh", *enter, *(str(part) for part in command)]


@dataclass(eq=False, slots=True)
class Host:
    """Switched on and off by its lab. Its folder, and with it home and host key, outlives that."""

    spec: HostSpec
    number: int
    site: Site
    is_frozen: bool = False
    space: Namespaces | None = None
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ip(self) -> str:
        return address_of(self.number)

    @property
    def hardware_address(self) -> str:
        return f"02:77:00:00:00:{10 + self.number:02x}"

    @property
    def folder(self) -> Path:
        return self.site.folder / self.name

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def pid(self) -> int:
        """Of its init, as the machine numbers it."""
        if self.space is None:
            raise LabError(f"{self.name} is off: boot it first")
        return self.space.pid

    @property
    def sshd(self) -> Sshd:
        return Sshd(self.name, self.folder / "ssh", self.home)

    # -- commands

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Nothing of this process's but the language; Python finds the repository's modules."""
        kept = {key: os.environ[key] for key in ("LANG", "LC_ALL", "TZ") if key in os.environ}
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{SYSTEM_PATH}"
        own = {"HOME": str(self.home), "USER": "root", "LOGNAME": "root", "HOSTNAME": self.name}
        return kept | own | {"PATH": path, "PYTHONPATH": str(ROOT)} | dict(more or {})

    def group_names(self) -> str:
        return " ".join(map(str, self.site.groups.folders(self.name)))

    def popen(
        self,
        command: Sequence[str | Path | int],
        *,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
    ) -> subprocess.Popen[str]:
        """Starts it in the host, in its home if no folder is given. It ends with the host."""
        process = subprocess.Popen(
            inside(self.pid, folder or self.home, command),
            env=self.environment(env) | {"LAB_GROUPS": self.group_names()},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._started = [old for old in self._started if old.poll() is None] + [process]
        return process

    def run(
        self,
        command: Sequence[str | Path | int],
        *,
        timeout_s: float = 60,
        check: bool = False,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it in the host. Raises `TimeoutExpired`, and `LabError` if it fails and `check` is set."""
        pipe = subprocess.PIPE
        with self.popen(command, env=env, folder=folder, stdout=pipe, stderr=pipe) as process:
            try:
                said, complaint = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                kill_group(process)
                raise
        if check and process.returncode:
            what = shlex.join(str(part) for part in command)
            raise LabError(
                f"{self.name}: {what}: exit code {process.returncode}\n{said[-2000:]}{complaint[-2000:]}"
            )
        return subprocess.CompletedProcess(
            [str(part) for part in command], process.returncode, said, complaint
        )

    def omlx(self, *arguments: str | Path | int, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """The repository's `omlx` with these arguments."""
        omlx = Path(sys.executable).with_name("omlx")
        return self.run([omlx, *arguments], folder=ROOT, timeout_s=timeout_s)

    def pids(self) -> list[int]:
        """Its processes, as the machine numbers them; its init comes first."""
        wanted = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with suppress(OSError):
                    if (process / "ns/pid").readlink() == wanted:
                        found.append(int(process.name))
        return sorted(found, key=lambda pid: (pid != self.pid, pid))

    def start_sshd(self, *authorized: str, port: int = 22) -> str:
        """Starts an OpenSSH server that takes these public keys; the line about it for known_hosts."""
        self.sshd.authorize(*authorized)
        self.sshd.write_config(self.ip, port, self.environment())
        self.run(["mkdir", "-p", "/run/sshd"], check=True)
        command = self.sshd.command
        if self.run([*command, "-t", *NO_PENALTIES]).returncode == 0:
            command += NO_PENALTIES
        server = self.popen([*command, "-D"])
        self.sshd.wait(lambda command: self.run(command), server, self.ip, port)
        return self.sshd.known_hosts_line((self.ip, self.name, f"{self.name}.local"), port)

    # -- for its lab

    def start(self, ttl_s: float) -> Namespaces:
        """Makes its namespaces and what it finds in its files; no network yet."""
        self._write_files()
        self.space = Namespaces.make(HOST_NAMESPACES, ttl_s)
        self.site.groups.make(self.name, self.space.pid)
        mounts = [
            ["hostname", self.name],
            ["mount", "-t", "tmpfs", "-o", f"size={self.site.shm_mib}m", "shm", "/dev/shm"],
            ["mount", "-t", "tmpfs", "-o", "size=16m", "run", "/run"],
            *(["mount", "--bind", str(own), seen] for own, seen in self._own_files()),
        ]
        sh(self.space.enter(script(*mounts), "-m", "-u"))
        self.is_frozen = False
        return self.space

    def join_network(self) -> None:
        """Once it has its eth0."""
        assert self.space is not None
        commands = [
            ipv6_setting("accept_dad", 0),
            ["ip", "link", "set", "lo", "up"],
            ["ip", "address", "add", f"{self.ip}/24", "brd", "+", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
            # Where there is no default route, multicast needs one.
            ["ip", "route", "add", "224.0.0.0/4", "dev", "eth0"],
        ]
        sh(self.space.enter(script(*commands), "-n"))

    def stop(self) -> None:
        """Every process in it dies at once."""
        if self.space is None:
            return
        space, self.space = self.space, None
        end(space.holder)  # with it, by unshare's --kill-child, init, and with that all of the namespace
        # A dead namespace waits until all in it are reaped. Those whose parents are outside wait for them:
        # an nsenter that stopped with what it stood for, or the machine's own init, which may take seconds.
        send_signal(self.site.groups.pids(self.name), signal.SIGCONT)
        wait_dead(space.pid)
        for process in self._started:
            process.wait(timeout=5)

    def close(self) -> None:
        self.stop()
        for process in self._started:
            end(process)
        self._started.clear()

    def _private(self, path: str) -> Path:
        return self.folder / "private" / path.strip("/").replace("/", "_")

    def _own_files(self) -> list[tuple[Path, str]]:
        """What is laid over the machine's files, and where."""
        names = ("hosts", "passwd", "shadow")
        own = [(self.folder / name, f"/etc/{name}") for name in names]
        own += [(self._private(path), path) for path in self.site.private]
        own.append((self.sshd.folder, SEEN_AS))
        if Path("/etc/machine-id").exists():
            own.append((self.folder / "machine-id", "/etc/machine-id"))
        if self.spec.memory_gib is not None:
            own.append((self.folder / "meminfo", "/proc/meminfo"))
        return own

    def _write_files(self) -> None:
        private = map(self._private, self.site.private)
        for folder in (self.home, self.folder / "bin", self.sshd.folder, *private):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.spec.shims.items():
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)
        self.sshd.public_key()
        (self.folder / "hosts").write_text(self.site.etc_hosts)
        machine_id = hashlib.md5(f"{self.site.groups.tag} {self.name}".encode(), usedforsecurity=False)
        (self.folder / "machine-id").write_text(f"{machine_id.hexdigest()}\n")
        # Root's home may hold the Python in use: not hidden, another home is written in the list of users.
        users = Path("/etc/passwd").read_text().splitlines()
        moved = [f"root:x:0:0:root:{self.home}:/bin/sh" if u.startswith("root:") else u for u in users]
        (self.folder / "passwd").write_text("\n".join(moved) + "\n")
        shadow = self.folder / "shadow"
        shadow.touch(mode=0o600)
        shadow.write_text("root:*:20000:0:99999:7:::\n")  # a locked root could not log in by key either
        if self.spec.memory_gib is not None:
            (self.folder / "meminfo").write_text(meminfo(self.spec.memory_gib))


def meminfo(memory_gib: int) -> str:
    """A /proc/meminfo of so much memory, of which three quarters are available."""
    total = memory_gib << 20
    known = {
        "MemTotal": total,
        "MemFree": total * 6 // 10,
        "MemAvailable": total * 3 // 4,
        "Cached": total // 10,
    }
    none = "Buffers SwapCached Active Inactive SwapTotal SwapFree Shmem Slab SReclaimable"
    return "".join(f"{key}: {kib} kB\n" for key, kib in (known | dict.fromkeys(none.split(), 0)).items())
