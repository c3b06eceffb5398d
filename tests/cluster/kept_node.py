"""A cluster of a coordinator and node b, whose agent keeps Ray: what runs of that, and waiting for it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from omlx.cluster import ray_processes
from omlx.cluster.membership import Member, install_bundle, open_member
from omlx.cluster.trust import Trust, init_trust, issue
from tests.cluster.certified import comes_true, own_address


@dataclass(frozen=True)
class Cluster:
    trust: Trust
    home: Path
    """Of node b."""

    @property
    def folder(self) -> Path:
        return self.home / "cluster"

    @property
    def head(self) -> Member:
        return open_member(self.trust.folder)


def found_cluster(folder: Path) -> Cluster:
    address = own_address()
    trust = init_trust(folder / "coordinator", "head", [], [address])
    install_bundle(folder / "home" / "cluster", issue(trust, "b", [], [address]))
    return Cluster(trust, folder / "home")


async def true_soon(true: Callable[[], bool], within_s: float = 10.0) -> None:
    assert await asyncio.to_thread(comes_true, true, within_s)


def pids(home: Path) -> frozenset[int]:
    """Of a worker that has been started and lives."""
    try:
        data = (home / "ray" / "ray.json").read_bytes()
    except FileNotFoundError:
        return frozenset()
    found = msgspec.json.decode(data, type=ray_processes._Recorded).processes
    return frozenset(one.pid for one in found if one.find() is not None)


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
