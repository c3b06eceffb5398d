"""A connection from inside a host, held by the test's own process: asking often costs no processes there."""

import ctypes
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

from tests.lab.host import Host
from tests.lab.machine import LabError

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET; os.setns came with Python 3.12."""


def dial(host: Host, port: int, within_s: float = 20.0) -> socket.socket:
    """To a port of its loopback. Raises OSError, LabError."""
    # A thread of its own is in another network; the socket stays in that, and the thread ends.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_dial, host.pid, port, within_s).result()


def _dial(pid: int, port: int, within_s: float) -> socket.socket:
    library = ctypes.CDLL(None, use_errno=True)
    network = os.open(Path(f"/proc/{pid}/ns/net"), os.O_RDONLY)
    try:
        if library.setns(network, NEW_NETWORK) != 0:
            raise LabError(f"setns: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(network)
    return socket.create_connection(("127.0.0.1", port), within_s)


def get(host: Host, port: int, path: str) -> str:
    """What a server there answers. Raises OSError, LabError for anything but 200."""
    with closing(HTTPConnection("127.0.0.1", port)) as connection:
        connection.sock = dial(host, port)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    if answer.status != 200:
        raise LabError(f"{host.name}: GET {path}: {answer.status} {text[:500]}")
    return text
