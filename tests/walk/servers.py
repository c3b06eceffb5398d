"""The real server: `omlx serve` in a process of its own, on a free port of this machine."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
from openai import OpenAI

OMLX = (sys.executable, "-c", "from omlx.cli import main; main()")


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    process: "subprocess.Popen[str]"
    output: Path
    """What the server and its stages have written to both streams."""

    def log(self) -> str:
        return self.output.read_text()

    def stages(self) -> list[psutil.Process]:
        """Stage processes, the first stage's first."""
        return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)

    def client(self, **options: object) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)  # type: ignore[arg-type]

    def metrics(self) -> dict[str, float]:
        """By name, without the prefix and with the labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name.removeprefix("omlx_"): float(value) for name, _, value in pairs}

    def kill(self) -> None:
        """SIGKILL to the server alone: its stages end by themselves."""
        stages = self.stages()
        self.process.kill()
        self.process.wait(timeout=10)
        wait_until(lambda: all(map(has_ended, stages)), 10)

    def interrupt(self) -> float:
        """Ctrl-C; returns the seconds until it has ended."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=30)
        return time.monotonic() - started


def has_ended(process: psutil.Process) -> bool:
    """Also when nobody has asked for its exit status yet: the one who does may be slow."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    """Below those that systems give out by themselves: nobody gets it before the server does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def omlx(*words: str) -> "subprocess.CompletedProcess[str]":
    """Another command than `serve`, or a `serve` that is to end at once."""
    return subprocess.run(
        [*OMLX, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )


@contextmanager
def serve(
    models: Path, *flags: str, port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Up until the block ends; its stages must then be gone as well. It keeps blocks in a folder of its own,
    unless `flags` name one. `settings`: those that are no flags."""
    with start(models, *flags, port=port, settings=settings) as running:
        wait_until_up(running)
        yield running


@contextmanager
def start(
    models: Path, *flags: str, port: int | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Like `serve`, but perhaps not up yet."""
    with TemporaryDirectory(prefix="omlx-cache-") as own:
        where = () if "--paged-ssd-cache-dir" in flags else ("--paged-ssd-cache-dir", f"{own}/blocks")
        environment = os.environ | {f"OMLX_{name.upper()}": value for name, value in (settings or {}).items()}
        port = port or free_port()
        command = [*OMLX, "serve", str(models), "--port", str(port), "--log-level", "warning", *where, *flags]
        output = Path(own) / "output"
        with (
            output.open("w") as log,
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment
            ) as process,
        ):
            yield from _until_the_end(Running(f"http://127.0.0.1:{port}", process, output))


def _until_the_end(running: Running) -> Iterator[Running]:
    stages: list[psutil.Process] = []
    try:
        yield running
        stages = running.stages() if running.process.poll() is None else []
    finally:
        running.process.terminate()
        running.process.wait(timeout=30)
    wait_until(lambda: all(map(has_ended, stages)), 10)


def wait_until_up(running: Running, within_s: float = 90.0) -> None:
    started = time.monotonic()
    while time.monotonic() - started < within_s:
        assert running.process.poll() is None, f"the server ended: {running.log()}"
        try:
            if httpx.get(f"{running.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server did not come up")


def wait_until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Another process's doing gives no event to wait for."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < within_s
        time.sleep(0.02)
