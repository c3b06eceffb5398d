"""Both machines by what a user has there: `omlx`, the system's `ssh`, and Python to ask MLX."""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

OMLX = Path(sys.executable).with_name("omlx")
CLUSTER = Path("~/.omlx/cluster")
SSH_WITHIN_S = 20.0
SSH_FAILED = 255
NONE_FOUND = 1
"""Exit code of pgrep and pkill."""
STAGES = "'omlx[.]node[.]process --listener'"
"""Stages that were started for another machine's head. A pattern that its own command line does not match."""
RAY = "omlx-ray-"
"""In the paths that omlx's Ray is started with."""
ASK_MLX = """
import json, platform
import mlx.core as mx
gpu = mx.default_device() == mx.gpu
told = {
    "system": platform.system(), "machine": platform.machine(),
    "release": platform.mac_ver()[0] or platform.release(),
    "metal": bool(gpu and mx.metal.is_available()), "gpu": mx.device_info() if gpu else {},
}
print(json.dumps(told, default=str))
"""


class Failed(Exception):
    """What is wrong, and what to do about it, in a sentence."""


# ------------------------------------------------------------------ commands here


def run_command(
    command: Sequence[str | Path], within_s: float, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Raises Failed where it cannot be started, or does not end in time."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"`{shlex.join(words)[:200]}` has not ended within {within_s:g} s") from None
    except OSError as error:
        raise Failed(f"{words[0]}: {error.strerror}") from error


def omlx(*words: str | Path, within_s: float) -> subprocess.CompletedProcess[str]:
    """Raises Failed as `run_command`; its exit code says the rest."""
    return run_command([OMLX, *words], within_s)


def omlx_json(*words: str | Path, within_s: float, codes: tuple[int, ...] = (0,)) -> Any:
    """What `omlx ... --json` prints. Raises Failed with its own line where it ends with another code."""
    ran = omlx(*words, "--json", within_s=within_s)
    if ran.returncode not in codes:
        raise Failed(complaint(ran.stderr or ran.stdout))
    try:
        return json.loads(ran.stdout)
    except ValueError as error:
        raise Failed(f"`omlx {words[0]} {words[1]} --json` prints no JSON: {ran.stdout[:200]!r}") from error


def complaint(said: str) -> str:
    """omlx's own line, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("omlx: ")]
    return (ours or lines or ["it says nothing"])[-1][:600]


def rays_here() -> frozenset[psutil.Process]:
    """Of omlx on this machine: Ray's processes are nobody's children."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(RAY in word for word in process.cmdline()):
                found.append(process)
    return frozenset(found)


# ------------------------------------------------------------------ commands there


@dataclass(frozen=True, slots=True)
class Remote:
    """HOST, over OpenSSH with the cluster's key and its list of host keys; nothing of ~/.ssh is read."""

    host: str
    user: str

    def command(self, words: str) -> list[str]:
        """The command line here of a shell's command line there."""
        folder = CLUSTER.expanduser()
        options = (
            f'UserKnownHostsFile="{folder / "known_hosts"}"',
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "ConnectTimeout=5",
        )
        flags = [word for option in options for word in ("-o", option)]
        key = folder / "authority/ssh_key"
        # Whatever shell that user has.
        there = f"exec /bin/sh -c {shlex.quote(words)}"
        return ["ssh", "-F", "none", "-T", "-i", str(key), *flags, "-l", self.user, "--", self.host, there]

    def run(
        self, words: str, given: str = "", within_s: float = SSH_WITHIN_S
    ) -> subprocess.CompletedProcess[str]:
        """Raises Failed where ssh itself fails."""
        ran = run_command(self.command(words), within_s, given)
        if ran.returncode == SSH_FAILED:
            raise Failed(f"ssh {self.user}@{self.host}: {complaint(ran.stderr)}")
        return ran

    def stages(self) -> list[int]:
        """Pids there. Raises Failed."""
        ran = self.run(f"pgrep -f {STAGES}")
        if ran.returncode not in (0, NONE_FOUND):
            raise Failed(f"pgrep on {self.host}: {complaint(ran.stderr)}")
        return [int(word) for word in ran.stdout.split() if word.isdecimal()]

    @contextmanager
    def ready_to_kill(self) -> Iterator["Killer"]:
        """Logged in there, so that the kill itself takes a round trip. Raises Failed."""
        words = f"echo ready; read line; pkill -9 -f {STAGES}"
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.command(words),
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            late = threading.Timer(SSH_WITHIN_S, process.kill)
            late.start()
            try:
                said = _until_ready(process)
            finally:
                late.cancel()
            try:
                if said is not None:
                    raise Failed(f"ssh {self.user}@{self.host}: {complaint(said)}")
                yield Killer(process, self.host)
            finally:
                process.kill()


def _until_ready(process: "subprocess.Popen[str]") -> str | None:
    """None: it is. Else all that it said before it ended; a shell may greet first."""
    assert process.stdout is not None
    heard = []
    for line in process.stdout:
        if line.strip() == "ready":
            return None
        heard.append(line)
    return "".join(heard)


@dataclass(slots=True)
class Killer:
    """A shell there that kills its stages at a word."""

    process: "subprocess.Popen[str]"
    host: str

    def fire(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("now\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Failed(f"ssh {self.host} is gone: {error.strerror}") from error

    def check(self) -> None:
        """Raises Failed unless a stage was killed."""
        try:
            code = self.process.wait(SSH_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"pkill on {self.host} has not ended within {SSH_WITHIN_S:g} s") from None
        if code:
            why = "there was no stage to kill" if code == NONE_FOUND else f"pkill ended with code {code}"
            raise Failed(f"{self.host}: {why}")


# ------------------------------------------------------------------ MLX


@dataclass(frozen=True, slots=True)
class Mlx:
    """What MLX says of a machine."""

    system: str
    machine: str
    release: str
    metal: bool
    """Its default device is a GPU, by Metal."""
    name: str
    memory_bytes: int
    most_bytes: int
    """That its GPU ought to work on at once; 0: not told."""

    @property
    def shows_macos(self) -> bool:
        return self.system == "Darwin" and self.machine == "arm64" and self.metal


def mlx_here() -> Mlx:
    """Raises Failed."""
    return read_mlx(run_command([sys.executable, "-c", ASK_MLX], 60), "here")


def mlx_there(remote: Remote, python: str) -> Mlx:
    """By the Python that omlx runs in there. Raises Failed."""
    ran = remote.run(f"cd / && exec {shlex.quote(python)} -", ASK_MLX, within_s=60)
    return read_mlx(ran, f"on {remote.host}")


def read_mlx(ran: subprocess.CompletedProcess[str], where: str) -> Mlx:
    """What ASK_MLX printed. Raises Failed."""
    if ran.returncode:
        raise Failed(f"MLX does not work {where}: {complaint(ran.stderr)}")
    try:
        told = json.loads(ran.stdout.strip().splitlines()[-1])
        gpu = told["gpu"]
        return Mlx(
            told["system"],
            told["machine"],
            told["release"],
            told["metal"],
            str(gpu.get("device_name", "")),
            int(gpu.get("memory_size", 0)),
            int(gpu.get("max_recommended_working_set_size", 0)),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise Failed(f"MLX {where} tells something else than it should: {ran.stdout[-200:]!r}") from error
