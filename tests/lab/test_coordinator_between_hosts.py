"""The coordinator ends, in every way, and starts again, while the other hosts stay up."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.lab.clustered import Server, gifts, move, processes, serving, wait
from tests.lab.fleet import Fleet
from tests.lab.host import NET, Host

pytestmark = pytest.mark.slow

ELSEWHERE = f"{NET}.121"
FLAGS = gifts({"mac-a": "560MB", "mac-b": "560MB", "mac-c": "560MB"})


def stages(host: Host) -> list[psutil.Process]:
    return processes(host, "omlx.node.process")


@pytest.mark.usefixtures("nodes")
def test_a_coordinator_that_was_killed_finds_its_nodes_again_and_leaves_no_stage_behind(
    three: Fleet, smollm2: Path
) -> None:
    first, *others = three.hosts
    texts = []
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with serving(first, smollm2, *FLAGS) as server:
            assert len(server.shards()) > 1 and any(stages(host) for host in others)
            texts.append([one["text"] for one in server.stream(2, 12).ended()])
            for one in processes(first, "bin/omlx"):
                os.kill(one.pid, how)
            wait(
                lambda: not any(stages(host) for host in others),
                25,
                lambda: "stages stay",
            )
    assert texts[0] == texts[1] == texts[2] and all(texts[0])


def over_hosts(server: Server) -> bool:
    (model,) = server.get("/omlx/v1/cluster")["models"]
    return len(model["stages"]) > 1 and all(stage["state"] == "ready" for stage in model["stages"])


@pytest.mark.usefixtures("nodes")
def test_a_coordinator_that_gets_another_address_finds_its_nodes_from_there(
    three: Fleet, smollm2: Path
) -> None:
    """As a laptop does that wakes up in another network."""
    first, *others = three.hosts
    with serving(first, smollm2, *FLAGS) as server:
        before = [one["text"] for one in server.stream(4, 20).ended()]
        move(first, ELSEWHERE)
        wait(lambda: any(processes(host, f"{ELSEWHERE}:") for host in others), 90, server.running.said)
        wait(lambda: over_hosts(server), 120, server.running.said)
        after = server.stream(4, 20).ended()
        assert [(one["text"], one["error"]) for one in after] == [(text, None) for text in before]
        assert over_hosts(server), "it was no leftover of what the server knew before"
