"""`omlx cluster plan` says what `omlx serve` then does with the same machines, before and while it runs."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab.clustered import cluster, clustered, gifts, serving, wait
from tests.lab.conftest import NewHosts

pytestmark = pytest.mark.slow

GIVEN = gifts({"mac-a": "560MB", "mac-b": "600MB"})
"""Neither holds SmolLM2 alone."""


def spans(plan: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {stage["node"]: (stage["start"], stage["end"]) for stage in plan["stages"]}


def test_serve_does_what_the_plan_has_foretold(hosts: NewHosts, smollm2: Path) -> None:
    fleet = hosts(2, memory_gib=(64, 16))
    first, _ = fleet.hosts
    with clustered(fleet.hosts):
        before = cluster(first, "plan", smollm2, *GIVEN)
        assert before["by"] == "disk" and len(before["stages"]) == 2
        with serving(first, smollm2, *GIVEN) as server:
            assert server.shards() == spans(before)
            now = cluster(first, "plan", smollm2)
            assert now["by"] == "server", "which knows what it was told to take"
            assert spans(now).keys() == spans(before).keys()

            def measured() -> bool:
                assert all(one["text"] for one in server.stream(2, 60).ended())
                stages = cluster(first, "plan", smollm2.name)["stages"]
                return {stage["rates_from"] for stage in stages} == {"measured"}

            wait(measured, 90, server.running.said)
            imagined = cluster(first, "plan", smollm2.name, "--node", "mac-b=2GB")
            assert imagined["by"] == "server" and imagined["stages"]
