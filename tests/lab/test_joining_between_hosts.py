"""Hosts join a cluster over OpenSSH, and leave it: the command line from end to end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.cluster.membership import Member, open_member
from omlx.errors import BadSetting
from tests.lab.clustered import cluster, fingerprint
from tests.lab.conftest import NewHosts
from tests.lab.fleet import Fleet
from tests.lab.host import Host


@pytest.fixture(scope="module")
def three(hosts: NewHosts) -> Fleet:
    """The first has made a cluster, and the others have joined it."""
    fleet = hosts(3, memory_gib=(64, 16, 128))
    first, *others = fleet.hosts
    made = cluster(first, "init")
    assert made["cluster_id"] and made["node_id"]
    key = (folder(first) / "authority" / "ssh_key.pub").read_text()
    for other in others:
        other.sshd.authorize(key)
        (told,) = cluster(first, "join", other.ip, "--user", "root", "--fingerprint", fingerprint(other))
        assert told["joined"] and told["node_id"] == member(other).node_id
    return fleet


def folder(host: Host) -> Path:
    return host.home / ".omlx" / "cluster"


def member(host: Host) -> Member:
    return open_member(folder(host))


def test_hosts_join_with_a_certificate_each_and_are_listed_until_they_leave(
    three: Fleet, tiny: Callable[[str], Path]
) -> None:
    first, second, third = three.hosts
    assert len({member(host).node_id for host in three.hosts}) == 3
    assert len({member(host).cluster_id for host in three.hosts}) == 1
    nodes = cluster(first, "status")["nodes"]
    assert [(one["name"], one["memory_bytes"] >> 30) for one in nodes] == [
        (second.name, 16),
        (third.name, 128),
    ]
    assert all(one["certificate_days"] > 300 and 0 < one["round_trip_s"] < 1 for one in nodes)
    plan = cluster(first, "plan", str(tiny("tiny-llama")))
    planned = {one["node"] for one in plan["stages"]} | {one["node"] for one in plan["left_out"]}
    assert planned == {host.name for host in three.hosts}

    before = member(third).security
    listed = (folder(third) / "node" / "revocations.crl").read_bytes()
    left = cluster(first, "leave", second.name)
    assert left["unreached"] == {}
    assert [one["name"] for one in cluster(first, "status")["nodes"]] == [third.name]
    with pytest.raises(BadSetting, match="in no cluster"):
        member(second)
    assert before.folder == member(third).security.folder
    assert (folder(third) / "node" / "revocations.crl").read_bytes() != listed, "it heard of it"

    cluster(first, "join", second.ip, "--user", "root")  # its key is known by now
    assert {one["name"] for one in cluster(first, "status")["nodes"]} == {second.name, third.name}


def test_a_host_nobody_vouches_for_or_with_another_key_does_not_join(three: Fleet) -> None:
    first, _, third = three.hosts
    wrong = "SHA256:" + "A" * 43
    (told,) = cluster(first, "join", third.name, "--user", "root", code=1)
    assert not told["joined"] and "host key unknown" in told["why"]
    (told,) = cluster(first, "join", third.name, "--user", "root", "--fingerprint", wrong, code=1)
    assert not told["joined"]


def test_this_machine_itself_a_stranger_and_a_second_cluster_are_refused_in_one_line(three: Fleet) -> None:
    first, second, third = three.hosts
    again = first.omlx("cluster", "init")
    assert again.returncode == 2 and "already holds a cluster" in again.stderr
    joined = third.omlx("cluster", "init")
    assert joined.returncode == 2 and "let it leave first" in joined.stderr
    unknown = first.omlx("cluster", "leave", "nobody")
    assert unknown.returncode == 2 and second.name in unknown.stderr
    option = first.omlx("cluster", "join", "--", "-oProxyCommand=touch /tmp/owned")
    assert option.returncode == 2 and "Traceback" not in option.stderr
    nowhere = second.omlx("cluster", "status", "--folder", "/nowhere")
    assert nowhere.returncode == 2 and len(nowhere.stderr.strip().splitlines()) == 1


def test_a_home_that_was_copied_does_not_join_as_the_machine_that_it_was_copied_from(three: Fleet) -> None:
    first, second, third = three.hosts
    file, theirs = (host.home / ".omlx" / "node.json" for host in (second, third))
    own = file.read_text()
    file.write_text(json.dumps({"id": json.loads(theirs.read_text())["id"]}))  # its hardware is not told
    ran = first.omlx("cluster", "join", second.ip, "--user", "root")
    assert ran.returncode == 2 and "its home was copied" in ran.stderr, ran.stderr
    assert member(second).node_id == json.loads(own)["id"], "what it was before"
    file.unlink()
    (told,) = cluster(first, "join", second.ip, "--user", "root")
    nodes = cluster(first, "status")["nodes"]
    assert [one["id"] for one in nodes if one["name"] == second.name] == [told["node_id"]]
    assert told["node_id"] not in own
