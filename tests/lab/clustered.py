"""Hosts that made a cluster, run `omlx node` and serve a model: what tests of the whole start from."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from tests.cluster.known_speed import know_speed
from tests.lab.dial import get
from tests.lab.host import Host
from tests.lab.machine import ROOT, LabError, kill_group

OMLX = Path(sys.executable).with_name("omlx")
PORT = 8000
READY_WITHIN_S = 120.0


def fingerprint(host: Host) -> str:
    """Of its SSH host key, as people compare it."""
    digest = hashlib.sha256(base64.b64decode(host.sshd.public_key().split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def cluster(host: Host, *words: str | Path, code: int = 0, timeout_s: float = 60) -> Any:
    """What `omlx cluster ... --json` prints there."""
    ran = host.omlx("cluster", *words, "--json", timeout_s=timeout_s)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def found(hosts: Sequence[Host]) -> None:
    """The first host makes a cluster, and the others join it. All are as fast as each other, as far as they
    know: timed on a busy machine, they would differ in each run."""
    first, *others = hosts
    for host in hosts:
        know_speed(host.home)
    cluster(first, "init")
    key = (first.home / ".omlx/cluster/authority/ssh_key.pub").read_text()
    for other in others:
        other.sshd.authorize(key)
        (told,) = cluster(first, "join", other.ip, "--user", "root", "--fingerprint", fingerprint(other))
        assert told["joined"], told


@dataclass
class Running:
    """A process in a host, whose words go to a file."""

    process: subprocess.Popen[str]
    log: Path
    words: IO[str] = field(repr=False)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Of its log, those in JSON."""
        return [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]

    def end(self, within_s: float = 30) -> int:
        """The process itself is told, not the nsenter around it, which then ends like it."""
        with suppress(psutil.NoSuchProcess):
            for inside in psutil.Process(self.process.pid).children():
                inside.terminate()
        try:
            return self.process.wait(within_s)
        finally:
            kill_group(self.process)
            self.words.close()


def start(host: Host, *words: str | Path, env: Mapping[str, str] | None = None) -> Running:
    """`omlx ...` in the host; its log is a file named after its first words."""
    log = host.folder / f"{words[0]}-{time.monotonic_ns()}.log"
    words_to = log.open("w")
    process = host.popen([OMLX, *words], folder=ROOT, env=env, stdout=words_to, stderr=subprocess.STDOUT)
    return Running(process, log, words_to)


def wait(true: Callable[[], bool], within_s: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            raise LabError(what())
        time.sleep(0.05)


def start_node(host: Host) -> Running:
    """`omlx node run` there, as a service would."""
    node = start(host, "node", "run")
    wait(lambda: "is announced" in node.said(), 20, node.said)
    return node


@contextmanager
def clustered(hosts: Sequence[Host]) -> Iterator[dict[str, Running]]:
    """A cluster of these hosts; `omlx node run` runs on all but the first."""
    found(hosts)
    running = {host.name: start_node(host) for host in hosts[1:]}
    try:
        yield running
    finally:
        for one in running.values():
            one.end()


def processes(host: Host, word: str) -> list[psutil.Process]:
    """With that in their command line."""
    found = []
    for pid in host.pids():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
            one = psutil.Process(pid)
            if any(word in part for part in one.cmdline()):
                found.append(one)
    return found


@dataclass
class Server:
    """`omlx serve` on the first host."""

    host: Host
    running: Running
    port: int = PORT

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """JSON, asked for inside the host."""
        return json.loads(get(self.host, self.port, path))

    def shards(self, model: int = 0) -> dict[str, tuple[int, int]]:
        """Spans by the node's name."""
        stages = self.get("/omlx/v1/cluster")["models"][model]["stages"]
        return {stage["node"]: (stage["start"], stage["end"]) for stage in stages}

    def stream(self, count: int, tokens: int) -> "Streams":
        """So many answers at once; they run when this returns."""
        command: list[str | Path | int] = [sys.executable, "-m", "tests.lab.streams", self.url, count, tokens]
        pipe = subprocess.PIPE
        process = self.host.popen(command, folder=ROOT, stdout=pipe, stderr=pipe)
        first = first_line(process)
        if first.strip() != "running":
            raise LabError(f"{first} {process.communicate()} {self.running.said()[-3000:]}")
        return Streams(process)


def first_line(process: "subprocess.Popen[str]") -> str:
    """Not by a readline, which may take more than the line: `communicate` would not see that."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


@dataclass
class Streams:
    process: subprocess.Popen[str]

    def ended(self, within_s: float = 300) -> list[dict[str, Any]]:
        """Of each: text, finish, error, tokens, longest_pause_s."""
        said, complaint = self.process.communicate(timeout=within_s)
        assert self.process.returncode == 0, complaint
        found: list[dict[str, Any]] = json.loads(said)
        return found


@contextmanager
def serving(
    host: Host, model: Path, *flags: str, port: int = PORT, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Ended with it, and waited for."""
    running = start(host, "serve", model, "--port", str(port), *flags, env=env)
    try:
        wait(
            lambda: "serving " in running.said() or running.process.poll() is not None,
            READY_WITHIN_S,
            running.said,
        )
        if running.process.poll() is not None:
            raise LabError(running.said())
        yield Server(host, running, port)
    finally:
        running.end()


def gifts(sizes: Mapping[str, str]) -> Sequence[str]:
    """Flags for what each host gives."""
    return [word for name, size in sizes.items() for word in ("--node", f"{name}={size}")]


def move(host: Host, address: str) -> None:
    """As DHCP does it, with all that a Mac's sshd listens on. Its last address takes the routes along."""
    eth0 = ("dev", "eth0")
    host.run(["ip", "address", "del", f"{host.ip}/24", *eth0], check=True)
    host.run(["ip", "address", "add", f"{address}/24", "brd", "+", *eth0], check=True)
    host.run(["ip", "route", "replace", "224.0.0.0/4", *eth0], check=True)
    host.sshd.write_config(address, 22, host.environment())
    sshd = host.popen([*host.sshd.command, "-D"])
    host.sshd.wait(lambda command: host.run(command), sshd, address, 22)
