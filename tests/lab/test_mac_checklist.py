"""`python -m tests.mac` between two pretend hosts: it runs from end to end, and names what is amiss."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lab.clustered import Running, cluster, fingerprint, found, start_node
from tests.lab.conftest import NewHosts
from tests.lab.fleet import Fleet
from tests.lab.host import Host
from tests.lab.machine import ROOT, end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

WITHIN_S = 300.0
NOT_A_MAC = {
    "this machine: macOS, Apple silicon, MLX on Metal": "not a Mac",
    "memory: the GPU's wired limits, and what stages may take": "no Metal on both machines",
}
SEEN = "HOST is seen by mDNS"
SPLIT = "a model over both machines says what this one says alone"
KILLED = "the stage on HOST is killed in the middle of an answer"
CABLE = "the cable is pulled in the middle of an answer, and put back"


def checklist(other: Host, model: Path, *flags: str) -> list[str | Path]:
    return [
        sys.executable,
        "-m",
        "tests.mac",
        other.ip,
        model,
        "--user",
        "root",
        "--json",
        "--tokens",
        "32",
        *flags,
    ]


def told(said: str) -> dict[str, tuple[str, str]]:
    """(outcome, detail) by step."""
    found: dict[str, Any] = json.loads(said)
    assert found["shows_macos"] is False
    return {step["what"]: (step["outcome"], step["detail"]) for step in found["steps"]}


def reasons(steps: dict[str, tuple[str, str]], outcome: str) -> dict[str, str]:
    return {what: detail for what, (came, detail) in steps.items() if came == outcome}


def all_named(seen: dict[str, str], wanted: dict[str, str]) -> bool:
    return seen.keys() == wanted.keys() and all(words in seen[what] for what, words in wanted.items())


def left(host: Host) -> list[psutil.Process]:
    """Stages and Ray's processes that live there."""
    found = []
    for pid in host.pids():
        with suppress(psutil.Error):  # it has just ended
            words = " ".join((one := psutil.Process(pid)).cmdline())
            if "omlx.node.process" in words or "omlx-ray-" in words:
                found.append(one)
    return found


def test_a_host_whose_agent_has_stopped_fails_by_name(hosts: NewHosts, smollm2: Path, tmp_path: Path) -> None:
    first, second = hosts(2, memory_gib=(64, 16)).hosts
    found((first, second))
    start_node(second).end()
    words = checklist(second, smollm2, "--no-hands")
    ran = first.run(words, folder=ROOT, timeout_s=WITHIN_S, env={"TMPDIR": str(tmp_path)})
    assert ran.returncode == 1, ran.stdout + ran.stderr
    steps = told(ran.stdout)
    failed = {SEEN: "omlx node install", SPLIT: f"omlx node does not run on {second.name}"}
    assert all_named(reasons(steps, "fail"), failed), steps
    assert all_named(
        reasons(steps, "skipped"),
        NOT_A_MAC | dict.fromkeys((KILLED, CABLE), "no server runs on both machines"),
    )
    assert not left(first)
    (logs,) = tmp_path.glob("omlx-mac-*")
    assert str(logs) in ran.stderr and (logs / "both.log").exists()


# ---------------------------------------------------------------- with hands


def with_hands(fleet: Fleet, model: Path) -> tuple[int, str, str]:
    """Exit code, output and complaints; a pretend person pulls the cable and puts it back when asked."""
    first, second = fleet.hosts
    hand, terminal = pty.openpty()
    pipe = subprocess.PIPE
    command = checklist(second, model, "--fingerprint", fingerprint(second))
    process = first.popen(command, folder=ROOT, stdin=terminal, stdout=pipe, stderr=pipe)
    assert process.stdout is not None and process.stderr is not None
    heard = []
    try:
        for line in process.stderr:
            heard.append(line)
            if "Pull the cable" in line:
                fleet.lab.cut(second)
            if "Put it back" in line:
                fleet.lab.heal(second)
                os.write(hand, b"\n")
        return process.wait(10), process.stdout.read(), "".join(heard)
    finally:
        end(process)
        os.close(hand)
        os.close(terminal)


def test_a_host_joins_and_every_step_passes_a_cable_that_is_pulled_and_put_back_too(
    hosts: NewHosts, smollm2: Path
) -> None:
    fleet = hosts(2, memory_gib=(64, 16))
    first, second = fleet.hosts
    cluster(first, "init")
    second.sshd.authorize((first.home / ".omlx/cluster/authority/ssh_key.pub").read_text())
    node: Running = start_node(second)
    try:
        code, said, complaints = with_hands(fleet, smollm2)
    finally:
        node.end()
    assert code == 0, said + complaints
    steps = told(said)
    assert all_named(reasons(steps, "skipped"), NOT_A_MAC), steps
    assert len(steps) == 9
    assert "has joined now" in steps["HOST is a node of this cluster"][1]
    assert second.name in steps[SPLIT][1] and first.name in steps[SPLIT][1]
    assert "after it was put back, the same text again" in steps[CABLE][1]
    assert not left(first)
    print(complaints)
