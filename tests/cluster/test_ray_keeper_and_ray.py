"""An agent keeps a real Ray going: through a kill, and from one head to the next."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from omlx.cluster.head_address import write_head
from omlx.cluster.node_agent import run_agent
from omlx.cluster.nodes import Node
from omlx.cluster.ray_driver import RayDriver
from omlx.cluster.ray_messages import RayNode
from omlx.cluster.ray_processes import RaySession, start_head
from omlx.cluster.summoning import head_of
from tests.cluster.certified import HERE, own_address
from tests.cluster.kept_node import Cluster, found_cluster, pids, runs, true_soon

pytestmark = [
    pytest.mark.slow,
]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return found_cluster(tmp_path)


def start(cluster: Cluster, name: str) -> RaySession:
    address = own_address()
    with socket.create_server((address, 0)) as found:
        port = found.getsockname()[1]
    return start_head(cluster.head, address, port, cluster.trust.folder.parent / name)


async def nodes(head: RaySession) -> tuple[RayNode, ...]:
    driver = RayDriver(head)
    try:
        return await driver.nodes()
    finally:
        await driver.close()


def test_an_agent_joins_ray_again_when_its_raylet_is_killed_and_when_the_head_is_elsewhere(
    cluster: Cluster,
) -> None:
    address = own_address()
    heads: list[RaySession] = []

    async def walk() -> None:
        ended, home = asyncio.Event(), cluster.home

        async def joined(besides: frozenset[int]) -> None:
            await true_soon(lambda: bool(pids(home) - besides) and not pids(home) & besides, 45.0)
            assert RayNode("b", address) in await nodes(heads[-1])

        def told(_: Node, __: tuple[str, ...]) -> None:
            write_head(cluster.folder, head_of(heads[-1]))

        heads.append(await asyncio.to_thread(start, cluster, "first-ray"))
        async with asyncio.TaskGroup() as group:
            agent = run_agent(home, ended, told, addresses=lambda: (HERE,), host_key=home / "host_key.pub")
            group.create_task(agent)
            try:
                await joined(frozenset())
                before = pids(home)
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
                await joined(before)
                before = pids(home)
                await asyncio.to_thread(heads[-1].stop)
                heads.append(await asyncio.to_thread(start, cluster, "second-ray"))
                write_head(cluster.folder, head_of(heads[-1]))
                await joined(before)
                before = pids(home)
            finally:
                ended.set()
        assert not any(runs(pid) for pid in before)
        assert not (home / "ray" / "ray.json").exists()

    try:
        asyncio.run(walk())
    finally:
        for head in heads:
            head.stop()
