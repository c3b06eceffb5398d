"""What the lab asks of its machine: what is missing, commands with a deadline, namespaces, groups."""

import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab.holder import cgroup_roots

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
"""The repository."""
BARE_PYTHON = (sys.executable, "-I", "-S")
"""The standard library alone; it starts in half the time."""
TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "ssh-keygen": "openssh-client"}
"""Commands, and Debian's packages that have them."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 20.0
HOST_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class LabError(RuntimeError):
    """The lab was asked for what it cannot do, or the machine refused it."""


def find(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def missing(sshd: bool = True) -> str | None:
    """Why no lab can be made here, in one sentence; None if one can."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux"
    if os.geteuid() != 0:
        return "the lab needs root, for namespaces"
    wanted = TOOLS | ({"sshd": "openssh-server"} if sshd else {})
    lacking = {command: package for command, package in wanted.items() if find(command) is None}
    if lacking:
        packages = " ".join(sorted(set(lacking.values())))
        return f"the lab needs {', '.join(lacking)}: apt-get install {packages}"
    try:
        sh(["unshare", *HOST_NAMESPACES, "true"])
    except LabError as error:
        return f"the lab needs the right to make namespaces, which a container may lack: {error}"
    return None


def sh(command: Sequence[str | Path | int], timeout_s: float = START_S) -> str:
    """What the command says. Raises `LabError` with its complaint, or if it takes too long."""
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{shlex.join(argv)} took more than {timeout_s:g} s") from None
    if done.returncode:
        raise LabError(f"{shlex.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def script(*commands: Sequence[str | Path | int]) -> list[str]:
    """One shell for several commands, which ends at the first that fails."""
    return ["sh", "-ec", "\n".join(shlex.join(str(part) for part in command) for command in commands)]


def ipv6_setting(name: str, value: int) -> list[str]:
    """Sets it for the interfaces there will be, where the kernel has IPv6."""
    write = f'[ ! -e "$file" ] || echo {value} >"$file"'
    return [
        "sh",
        "-ec",
        f"cd /proc/sys/net/ipv6/conf || exit 0; for file in all/{name} default/{name}; do {write}; done",
    ]


def first_line(process: subprocess.Popen[str], within_s: float = START_S) -> str:
    """The next line of the process; empty if it ends or takes too long. Reads no further."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], within_s)
    return process.stdout.readline() if ready else ""


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end(process: subprocess.Popen[str]) -> None:
    """Kills the process and its group, which it leads, waits and closes: nothing of it stays."""
    kill_group(process)
    with process:  # its exit closes the pipes and waits; a killed process does not keep it waiting
        pass


def kill_group(process: subprocess.Popen[str]) -> None:
    """An nsenter that is killed alone leaves what it runs inside."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def running(pid: int) -> bool:
    """Whether the process is there and not dead. Whether it is reaped yet does not matter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def wait_dead(pid: int, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while running(pid):
        if time.monotonic() > deadline:
            raise LabError(f"process {pid} did not end in {within_s:g} s")
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Namespaces of one process that holds them."""

    holder: subprocess.Popen[str]
    pid: int
    """The process inside, as the machine numbers it."""

    @classmethod
    def make(
        cls, flags: Sequence[str], ttl_s: float, leftovers: Mapping[str, object] | None = None
    ) -> "Namespaces":
        """`flags` are unshare's. They end with this process, after `ttl_s`, or by `close`."""
        told = [] if leftovers is None else [json.dumps(leftovers)]
        holder = subprocess.Popen(
            ["unshare", *flags, *BARE_PYTHON, str(HERE / "holder.py"), str(ttl_s), *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        if not first_line(holder):
            kill_group(holder)
            _, complaint = holder.communicate()
            raise LabError(f"no namespaces here: unshare {' '.join(flags)}: {complaint.strip()}")
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        return cls(holder, int(children[0]) if children else holder.pid)

    def enter(self, command: Sequence[str | Path | int], *kinds: str) -> list[str]:
        """The command line that runs the command inside; `kinds` are nsenter's flags."""
        return ["nsenter", "-t", str(self.pid), *kinds, *(str(part) for part in command)]

    def leave(self, within_s: float = START_S) -> None:
        """Lets the holder clear away what it was told to, and end."""
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.holder.wait(within_s)
        end(self.holder)


@dataclass(frozen=True, slots=True)
class Groups:
    """The lab's cgroups, `TAG/HOST` for each host: in version 2's tree, or version 1's for cpu and memory."""

    tag: str

    def make(self, host: str, pid: int) -> None:
        """Puts the process in the host's groups. Where groups cannot be made, there are none."""
        for root in cgroup_roots():
            with suppress(OSError):
                (root / self.tag / host).mkdir(parents=True, exist_ok=True)
                if (root / "cgroup.controllers").exists():
                    for parent in (root, root / self.tag):
                        (parent / "cgroup.subtree_control").write_text("+cpu +memory")
        for folder in self.folders(host):
            (folder / "cgroup.procs").write_text(str(pid))

    def folders(self, host: str) -> list[Path]:
        return [folder for root in cgroup_roots() if (folder := root / self.tag / host).is_dir()]

    def pids(self, host: str) -> set[int]:
        """What runs in the host, and the nsenter processes outside that stand for it."""
        return {int(x) for f in self.folders(host) for x in (f / "cgroup.procs").read_text().split()} - {0}

    def limit_cpu(self, host: str, cores: float) -> None:
        """At most so many cores' worth of time; 0 is no limit."""
        period_us = 20_000
        quota_us = int(cores * period_us)
        for folder in self.folders(host):
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{quota_us or 'max'} {period_us}")
                return
            if (folder / "cpu.cfs_quota_us").exists():
                (folder / "cpu.cfs_period_us").write_text(str(period_us))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us or -1))
                return
        raise LabError("this machine has no cgroup for cpu time: limits cannot be shown here")
