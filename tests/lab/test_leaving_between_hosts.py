"""A node leaves while answers run, and comes back: its layers go first, then its trust, then Ray's token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.clustered import Running, Server, cluster, gifts, processes, serving, wait
from tests.lab.fleet import Fleet

pytestmark = pytest.mark.slow

TOKENS = 60
"""Some seconds of answering: the leaving lies within them."""
FLAGS = gifts({"mac-a": "560MB", "mac-b": "560MB", "mac-c": "560MB"})


@pytest.fixture(scope="module")
def server(three: Fleet, nodes: dict[str, Running], smollm2: Path) -> Iterator[Server]:
    with serving(three.hosts[0], smollm2, *FLAGS, "--objective", "throughput") as running:
        yield running


def states(server: Server) -> dict[str, str]:
    return {node["name"]: node["state"] for node in server.get("/omlx/v1/cluster")["nodes"]}


def test_the_command_line_shows_moves_unloads_and_loads_what_runs_over_hosts(
    server: Server, three: Fleet, smollm2: Path
) -> None:
    first, *others = three.hosts
    told = cluster(first, "status")
    assert {node["name"]: node["state"] for node in told["shard_map"]["nodes"]} == dict.fromkeys(
        (host.name for host in three.hosts), "up"
    )
    drawn = first.omlx("cluster", "status")
    assert drawn.returncode == 0 and all(host.name in drawn.stdout for host in three.hosts), drawn.stdout
    wished = cluster(first, "rebalance", smollm2.name, "--dry-run")
    assert wished["lines"] and not wished["moved"]
    assert cluster(first, "doctor", timeout_s=120)["fit"]

    before = server.shards()
    assert any(processes(host, "omlx.node.process") for host in others)
    assert cluster(first, "deactivate", smollm2.name)["state"] == "idle"
    assert not any(processes(host, "omlx.node.process") for host in others)
    assert cluster(first, "activate", smollm2.name, timeout_s=120)["state"] == "ready"
    assert server.shards().keys() == before.keys()


def test_a_node_that_leaves_gives_its_layers_away_first_and_no_answer_notices(
    server: Server, three: Fleet, nodes: dict[str, Running]
) -> None:
    first, second, third = three.hosts

    def said() -> str:
        return server.running.said() + "".join(node.said() for node in nodes.values())

    wait(lambda: third.name in server.shards(), 60, server.running.said)
    undisturbed = [one["text"] for one in server.stream(6, TOKENS).ended()]
    streams = server.stream(6, TOKENS)
    left = cluster(first, "leave", third.name, timeout_s=180)
    assert left["drained"] and left["unreached"] == {}
    assert [one["text"] for one in streams.ended()] == undisturbed
    assert set(server.shards()) <= {first.name, second.name}
    wait(lambda: third.name not in states(server), 10, said)
    wait(lambda: states(server)[second.name] == "up", 60, said)  # with Ray's new token

    cluster(first, "join", third.ip, "--user", "root")
    wait(lambda: states(server).get(third.name) == "up", 60, said)
    wait(lambda: third.name in server.shards(), 90, server.running.said)
    assert [one["text"] for one in server.stream(6, TOKENS).ended()] == undisturbed


def test_the_last_node_that_a_model_needs_is_not_let_go(server: Server, three: Fleet) -> None:
    first, second, third = three.hosts
    cluster(first, "leave", third.name, timeout_s=180)
    refused = first.omlx("cluster", "leave", second.name, timeout_s=180)
    assert refused.returncode == 2 and "--now" in refused.stderr, refused.stderr
    assert len(server.shards()) == 2
    assert all(one["text"] for one in server.stream(2, 10).ended())
