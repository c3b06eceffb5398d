"""`omlx cluster doctor`: what it finds, and when it says that something blocks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import asyncssh
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from omlx import cluster_commands, doctor_command
from omlx.cluster import ray_processes, validation
from omlx.cluster.findings import Finding
from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.members import Joined, add_member
from omlx.cluster.nodes import NodeId
from omlx.cluster.shard_map import ShardMap
from omlx.cluster.trust import Trust, init_trust, issue, open_trust, revoke
from omlx.control_client import Look
from omlx.doctor_command import certificates, look_at_keys, look_at_ray, look_at_server
from tests.cluster.ssh_server import Machine
from tests.control_server import MAP, MINI, MODEL, ScriptedControl, in_a_thread, with_lost_stage
from tests.test_check_command import served
from tests.walk.servers import free_port


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMLX_RAY_PORT", str(free_port()))
    monkeypatch.setattr(validation, "Wanted", partial(validation.Wanted, bulk_s=0.02))
    with capture_logs():
        yield


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return init_trust(tmp_path / "cluster", "head", ["localhost"], ["127.0.0.1"])


def join(trust: Trust, port: int, valid_for: timedelta = timedelta(days=365)) -> None:
    """As mini, at a port of this machine."""
    issue(trust, MINI, [], ["127.0.0.1"], valid_for)
    joined = Joined(
        id=NodeId(MINI),
        name="mini",
        host="127.0.0.1",
        user="admin",
        port=port,
        fingerprint="SHA256:" + "A" * 43,
        chip="Apple M4",
        memory_bytes=16 * 10**9,
        addresses=("127.0.0.1",),
        links=(),
        joined_at=datetime.now(UTC),
    )
    add_member(trust.folder, joined)


def run(folder: Path, port: int, *words: str) -> Result:
    where = ["doctor", "--folder", str(folder), "--port", str(port)]
    return CliRunner().invoke(cluster_commands.app, [*where, *words], env={"COLUMNS": "200"})


def by_what(findings: Iterator[Finding] | list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_a_cluster_whose_node_answers_and_whose_server_runs_has_nothing_wrong(
    trust: Trust, tmp_path: Path
) -> None:
    ours = asyncssh.read_private_key(trust.ssh_key)
    with (
        served(Machine(tmp_path / "machine", client_key=ours)) as machine,
        in_a_thread(ScriptedControl()) as port,
    ):
        join(trust, machine.port)
        KnownHosts(trust.folder / "known_hosts").pin("127.0.0.1", machine.port, machine.pinned)
        result = run(trust.folder, port)
        said = json.loads(run(trust.folder, port, "--json").stdout)
    assert result.exit_code == 0, result.output
    shown = ("this machine", "answers at", "is free", "certificate of mini", "clock")
    for word in (*shown, "can serve", "nothing stands"):
        assert word in result.stdout
    assert "join" not in result.stdout, "it has joined"
    assert said["fit"] is True and [node["host"] for node in said["nodes"]] == ["127.0.0.1"]


def test_a_node_that_cannot_be_reached_blocks_and_no_server_only_warns(trust: Trust) -> None:
    join(trust, free_port())
    result = run(trust.folder, free_port(), "--json")
    said = json.loads(result.stdout)
    assert result.exit_code == 1 and said["fit"] is False and said["nodes"][0]["fit"] is False
    assert {one["what"]: one["level"] for one in said["here"]}["server"] == "warning"


def test_no_cluster_is_what_blocks(tmp_path: Path) -> None:
    result = run(tmp_path / "none", free_port())
    assert result.exit_code == 1 and "omlx cluster init" in result.stdout


def test_keys_that_others_can_read_block(trust: Trust) -> None:
    (trust.folder / "authority").chmod(0o755)
    (trust.authority / "ledger.json").chmod(0o644)
    found, findings = look_at_keys(trust.folder)
    assert found is None and [one.level for one in findings] == ["blocking"]


def test_certificates_that_end_soon_warn_and_those_that_ended_or_are_revoked_block(trust: Trust) -> None:
    join(trust, 22)
    assert by_what(certificates(trust))["certificate of mini"].level == "fact"
    join(trust, 22, timedelta(days=20))
    soon = by_what(certificates(trust))["certificate of mini"]
    assert soon.level == "warning" and soon.fix == "omlx cluster join 127.0.0.1"
    revoke(trust, MINI)
    assert by_what(certificates(open_trust(trust.folder)))["certificate of mini"].blocking


def test_lost_stages_and_failed_models_block_and_nodes_away_warn() -> None:
    lost = by_what(list(look_at_server(Look(with_lost_stage(MAP), None, heard=True), "here")))
    assert lost["node mini"].level == "warning" and "no answer since 5 s" in lost["node mini"].seen
    assert lost["model Org/Name"].blocking and "16 to 23 on mini" in lost["model Org/Name"].seen
    failed = ShardMap("c1", MAP.nodes, (replace(MODEL, state="failed", stages=(), why="three losses"),))
    found = by_what(list(look_at_server(Look(failed, None, heard=True), "here")))
    assert found["model Org/Name"].blocking and found["model Org/Name"].seen == "three losses"


def test_another_program_at_the_servers_port_blocks() -> None:
    with in_a_thread(None) as port, doctor_command.reach(port) as server:
        (finding,) = look_at_server(server.look(), server.place)
    assert finding.blocking and "no omlx server" in finding.seen


@contextmanager
def listening(**environment: str) -> Iterator[tuple[int, int]]:
    """Another process that holds a port: (port, pid)."""
    code = (
        "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


def test_the_port_of_rays_head_is_free_ours_left_over_or_a_strangers() -> None:
    assert look_at_ray(free_port(), served=True).level == "fact"
    with listening() as (port, pid):
        stranger = look_at_ray(port, served=True)
        assert stranger.blocking and str(pid) in stranger.seen
    with listening(**{ray_processes.MARK: "a session's"}) as (port, _):
        assert look_at_ray(port, served=True).level == "fact"
        assert look_at_ray(port, served=False).level == "warning"
