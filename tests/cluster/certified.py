"""Nodes of a small cluster, each with its own folder, all on this machine."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from omlx.cluster.membership import Member, install_bundle
from omlx.cluster.trust import init_trust, issue

HERE = "127.0.0.1"


def own_address() -> str:
    """Another than the loopback's, where there is one: Ray puts that in the loopback's place."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    return HERE


def members(folder: Path, *ids: str) -> dict[str, Member]:
    """The coordinator "head", and these nodes, all on this machine."""
    trust = init_trust(folder / "coordinator", "head", [], [own_address()])
    return {
        id: install_bundle(folder / id, issue(trust, id, [], [own_address()]))
        for id in dict.fromkeys(("head", *ids))
    }


def comes_true(true: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Another process's doing gives no event to wait for."""
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()
