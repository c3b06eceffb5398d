"""The real server: `omlx serve` in a process of its own, on a free port of this machine."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from openai import OpenAI


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    process: "subprocess.Popen[str]"

    def stages(self) -> list[psutil.Process]:
        """Stage processes, the first stage's first."""
        return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)

    def client(self, **options: object) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)  # type: ignore[arg-type]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def serve(models: Path, *flags: str, port: int | None = None) -> Iterator[Running]:
    """Up until the block ends; its stages must then be gone as well."""
    port = port or free_port()
    command = [sys.executable, "-c", "from omlx.cli import main; main()", "serve", str(models)]
    with subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "warning", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        running = Running(f"http://127.0.0.1:{port}", process)
        stages: list[psutil.Process] = []
        try:
            wait_until_up(running)
            yield running
            stages = running.stages() if process.poll() is None else []
        finally:
            process.terminate()
            process.communicate(timeout=30)
        _, alive = psutil.wait_procs(stages, timeout=10)
        assert not alive


def wait_until_up(running: Running, within_s: float = 90.0) -> None:
    started = time.monotonic()
    while time.monotonic() - started < within_s:
        if running.process.poll() is not None:
            assert running.process.stdout is not None
            raise AssertionError(f"the server ended: {running.process.stdout.read()}")
        try:
            if httpx.get(f"{running.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server did not come up")
