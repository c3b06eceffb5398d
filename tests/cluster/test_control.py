"""The levers of a server over a site whose Ray was never started: what they leave behind, and offer."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from omlx.cluster.cluster_site import ClusterSite
from omlx.cluster.control import Levers
from omlx.cluster.coordinator import Coordinator
from omlx.cluster.fleet import this_machine
from omlx.cluster.keeping import Keeping
from omlx.cluster.measure import LEAST, LinkSample
from omlx.cluster.members import Joined, Members
from omlx.cluster.offer import Terms
from omlx.cluster.ray_site import RaySite
from omlx.errors import BadSetting, Refused
from omlx.ids import ModelId
from omlx.node.library import Library
from omlx.settings import Settings
from tests.cluster.test_offer import MINI, OTHER
from tests.walk.servers import free_port

GB = 10**9


@contextmanager
def greeting() -> Iterator[int]:
    """Where something greets as an SSH server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet() -> None:
            while True:
                sock, _ = listener.accept()
                with sock:
                    if ended.is_set():
                        return
                    sock.sendall(b"SSH-2.0-test\r\n")

        ended = threading.Event()
        greeter = threading.Thread(target=greet)
        greeter.start()
        try:
            yield port
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            greeter.join(10)


def at(node: Joined, port: int) -> Joined:
    return replace(node, host="127.0.0.1", addresses=("127.0.0.1",), port=port)


def levers(*members: Joined, alive: frozenset[str] = frozenset(), why: str | None = None) -> Levers:
    settings = Settings.model_validate({"nodes": {"mini": "8GB"}, "hot_cache_max_size": "10%"})
    nothing = cast(Any, None)
    rays = RaySite(
        trust=nothing,
        member=cast(Any, SimpleNamespace(node_id="head")),
        address="127.0.0.1",
        port=1,
        session=nothing,
        driver=nothing,
        members=Members(members),
        token="",
        alive=alive,
    )
    keeping = Keeping(settings, 4 * GB)
    site = ClusterSite(settings, this_machine("head", 4 * GB, busy=True), rays, lambda: 3 * GB)
    coordinator = Coordinator(Library(()), settings, site, keeping)
    reconciler = cast(Any, SimpleNamespace(site=site, why=lambda model: why))
    return Levers(coordinator, site, Terms.of(settings), reconciler, "c1")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some model's stage stays on whatever node is drained."""
    monkeypatch.setattr(Levers, "_held_by", lambda self, node: ModelId("big"))


def draining(control: Levers) -> set[str]:
    assert control.reconciler is not None
    return control.reconciler.site.rays.draining


def test_a_node_that_cannot_be_drained_is_in_use_again(held: None) -> None:
    control = levers(MINI, why="the rest is 3 GB short")
    with pytest.raises(Refused, match="3 GB short"):
        asyncio.run(control.drain(MINI.id))
    assert draining(control) == set()


def test_a_drain_that_nobody_waits_for_any_more_gives_the_node_back(held: None) -> None:
    control = levers(MINI)

    async def walk() -> None:
        task = asyncio.create_task(control.drain(MINI.id))
        await asyncio.sleep(0)
        assert draining(control) == {MINI.id}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(walk())
    assert draining(control) == set()


def test_a_node_without_layers_is_drained_until_it_is_taken_back_and_this_machine_never() -> None:
    control = levers(MINI)
    asyncio.run(control.drain(MINI.id))
    assert draining(control) == {MINI.id}
    asyncio.run(control.undrain(MINI.id))
    assert draining(control) == set()
    with pytest.raises(BadSetting, match="runs the server"):
        asyncio.run(control.drain("head"))


def test_a_servers_offer_has_its_gifts_its_links_and_why_a_node_gets_nothing() -> None:
    with greeting() as port:
        mini, third = at(MINI, port), replace(at(MINI, port), id=cast(Any, "d" * 32), name="third")
        other = at(OTHER, free_port())
        control = levers(mini, other, third, alive=frozenset({mini.id, other.id, third.id}))
        assert control.reconciler is not None
        site = control.reconciler.site
        for _ in range(LEAST):
            site.measures.add_link(site.here.name, "mini", LinkSample(0.002, 1e9))
        site.rays.draining.add(third.id)
        offer = asyncio.run(control.offer(str(Path("nowhere"))))
    left = {node.name: node.budget.bytes for node in offer.candidates(with_hot=False)}
    assert left == {site.here.name: 3 * GB, "mini": 8 * GB}
    assert offer.hot_bytes()[mini.id] == 8 * GB // 10
    assert dict(offer.idle()) == {
        "mini-cccc": "it does not answer",
        "third": "it gets no layers until it is taken back",
    }
    assert offer.links().between(site.here.name, "mini").latency_s == pytest.approx(0.001)
    assert offer.folder is None
