"""A command in the place of Ray's, and something that listens as Ray's head does."""

import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from omlx.cluster import ray_processes
from omlx.cluster.membership import Member
from tests.cluster.certified import HERE


def pretend(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "ray.py"
    file.write_text(textwrap.dedent(code))
    monkeypatch.setattr(ray_processes, "RAY", (sys.executable, str(file)))


@contextmanager
def greeting(member: Member, port: int = 0) -> Iterator[int]:
    """Where something listens that shows the head's certificate, as Ray's GCS does, and greets."""
    ended = threading.Event()
    with socket.create_server((HERE, port)) as listener:
        greeter = threading.Thread(target=_greet, args=(listener, member, ended))
        greeter.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            socket.create_connection(listener.getsockname(), timeout=1).close()
            greeter.join()


def _greet(listener: socket.socket, member: Member, ended: threading.Event) -> None:
    while True:
        sock, _ = listener.accept()
        with sock:
            if ended.is_set():
                return
            sock.settimeout(5)
            with (
                suppress(OSError),
                member.security.context(server=True).wrap_socket(sock, server_side=True) as tls,
            ):
                tls.sendall(b"settings")
                tls.recv(1)
