"""From machines that know nothing of each other to an answer over both: a service there, one command here."""

import shutil
from pathlib import Path

import pytest

from tests.lab.clustered import cluster, fingerprint, gifts, serving, start_node
from tests.lab.conftest import NewHosts

pytestmark = pytest.mark.slow

GIVEN = gifts({"mac-a": "560MB", "mac-b": "560MB"})


def test_a_person_who_can_log_in_needs_two_commands_before_serve(hosts: NewHosts, smollm2: Path) -> None:
    """No Macs: their chips are in no table, and each is timed before it is planned with."""
    fleet = hosts(2, memory_gib=(64, 16), shims={})
    first, second = fleet.hosts
    own = first.home / ".ssh" / "id_ed25519"
    own.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(fleet.key, own)
    node = start_node(second)
    (told,) = cluster(first, "join", second.ip, "--user", "root", "--fingerprint", fingerprint(second))
    assert told["joined"] and told["speed"]["bytes_per_s"] > 1e8 and told["speed"]["flop_per_s"] > 1e8
    key = (first.home / ".omlx/cluster/authority/ssh_key.pub").read_text().strip()
    assert key in (second.home / ".ssh" / "authorized_keys").read_text().splitlines()
    plan = first.omlx("cluster", "plan", smollm2, "--explain", *GIVEN, timeout_s=60)
    assert plan.stdout.count("(a small model timed there)") == 2, plan.stdout + plan.stderr
    own.unlink()  # from here on the cluster's key is enough
    with serving(first, smollm2, *GIVEN) as server:
        assert set(server.shards()) == {"mac-a", "mac-b"}
        (stream,) = server.stream(1, 10).ended()
        assert stream["text"] and stream["error"] is None
    assert node.end() == 0
