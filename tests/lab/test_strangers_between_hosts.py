"""A host of no cluster calls at every socket of one that serves: turned away, and nobody is disturbed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.clustered import Server, cluster, clustered, gifts, serving
from tests.lab.conftest import NewHosts
from tests.lab.fleet import Fleet
from tests.lab.host import Host
from tests.lab.machine import ROOT

pytestmark = pytest.mark.slow

LISTENERS = """
import json, psutil
found = {(c.laddr.ip, c.laddr.port) for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
print(json.dumps(sorted(found)))
"""
REFUSALS = tuple(
    word.hex() for word in (b"\x15\x03", b"SSH-", b"HTTP/1.1 401", b"HTTP/1.1 400", b"HTTP/1.0 400")
)
"""How TLS says no, an SSH server's greeting, and Ray's agents, which want the token."""


@pytest.fixture(scope="module")
def three(hosts: NewHosts) -> Fleet:
    return hosts(3, memory_gib=(64, 16, 128))


@pytest.fixture(scope="module")
def stranger(three: Fleet) -> Host:
    """It has made a cluster of its own."""
    host = three.hosts[2]
    cluster(host, "init")
    return host


@pytest.fixture(scope="module")
def server(three: Fleet, stranger: Host, smollm2: Path) -> Iterator[Server]:
    pair = three.hosts[:2]
    with clustered(pair), serving(pair[0], smollm2, *gifts({"mac-a": "560MB", "mac-b": "560MB"})) as running:
        yield running


def listening(host: Host) -> list[str]:
    """Its sockets that another host could reach."""
    ran = host.run([sys.executable, "-c", LISTENERS], check=True)
    places = json.loads(ran.stdout)
    return [f"{host.ip}:{port}" for ip, port in places if not ip.startswith("127.") and ip != "::1"]


def recoveries(server: Server) -> tuple[int, int]:
    (model,) = server.get("/omlx/v1/cluster")["models"]
    return model["recoveries"], model["epoch"]


def test_strangers_at_every_socket_hear_nothing_and_disturb_nobody(
    server: Server, three: Fleet, stranger: Host
) -> None:
    assert len(server.shards()) == 2
    undisturbed = [one["text"] for one in server.stream(4, 60).ended()]
    before = recoveries(server)
    places = [place for host in three.hosts[:2] for place in listening(host)]
    streams = server.stream(4, 60)
    folder = stranger.home / ".omlx/cluster/node"
    ran = stranger.run(
        [sys.executable, "-m", "tests.lab.stranger", folder, *places], folder=ROOT, check=True, timeout_s=300
    )
    told: list[dict[str, Any]] = json.loads(ran.stdout)
    assert len(told) == len(places) > 4
    for one in told:
        assert not one["welcome"], one
        assert all(not heard or heard.startswith(REFUSALS) for heard in one["heard"]), one
    assert [one["text"] for one in streams.ended()] == undisturbed
    assert recoveries(server) == before
