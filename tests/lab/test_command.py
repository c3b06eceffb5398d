"""`python -m tests.lab`, and that a lab whose owner is killed goes away by itself."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.lab.holder import cgroup_roots
from tests.lab.lab import Lab, macs
from tests.lab.machine import ROOT, missing, running
from tests.lab.probes import wait_for

OWNER = """
import subprocess
import time
from pathlib import Path
from tests.lab.lab import Lab, macs
with Lab(macs(2), ttl_s=60) as lab:
    first = lab.hosts[0]
    lab.shape(first, delay_ms=1)
    sleeper = first.popen(["sh", "-c", "echo ready; exec sleep 50"], stdout=subprocess.PIPE)
    sleeper.stdout.readline()
    lab.suspend(first)
    spaces = [Path(f"/proc/{pid}/ns/net").readlink() for pid in (lab.switch.space.pid, first.pid)]
    print(lab.folder, lab.groups.tag, *spaces, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True, scope="module")
def needs_a_lab() -> None:
    if reason := missing(sshd=False):
        pytest.skip(reason)


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.lab", words[0], "--state", str(folder), *words[1:]]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_lab_is_made_used_and_ended_by_commands(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    up = command(folder, "up", "-n", "2", "--memory-gib", "64,16", "--ttl", "60")
    assert up.returncode == 0, up.stderr
    assert json.loads(up.stdout) == {"mac-a": "10.77.0.11", "mac-b": "10.77.0.12"}
    assert "already: `down` ends it" in command(folder, "up").stderr

    assert command(folder, "exec", "mac-b", "--", "sh", "-c", "hostname; exit 7").stdout == "mac-b\n"
    assert command(folder, "exec", "mac-b", "--", "sh", "-c", "exit 7").returncode == 7
    assert "no host 'mac-z'" in command(folder, "exec", "mac-z", "true").stderr

    assert command(folder, "do", "shape", "mac-a", "delay_ms=1").returncode == 0
    assert command(folder, "do", "cut", "mac-b", "carrier=true").returncode == 0
    of_b = json.loads(command(folder, "status").stdout)["hosts"]["mac-b"]
    assert of_b["cut"] is True
    assert "no verb 'rob'" in command(folder, "do", "rob", "mac-b").stderr
    assert "unexpected keyword argument 'force'" in command(folder, "do", "cut", "mac-b", "force=1").stderr
    assert "shape" in command(folder, "do", "shape", "mac-b", "delay_ms=much").stderr

    assert command(folder, "down").returncode == 0
    assert not folder.exists()
    assert not running(of_b["pid"])
    assert command(folder, "down").returncode == 0
    assert "make one with `up`" in command(folder, "status").stderr


def test_a_lab_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    refused = command(tmp_path, "up", "-n", "1")
    assert refused.returncode == 1
    assert "not empty" in refused.stderr
    assert "one size for each" in command(tmp_path / "lab", "up", "-n", "3", "--memory-gib", "1,2").stderr
    assert (tmp_path / "thesis").exists()


def in_networks(spaces: list[str]) -> list[int]:
    """Living processes in these network namespaces, and those outside that hold them open."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and str((process / "ns/net").readlink()) in spaces:
                found.append(int(process.name))
    return [pid for pid in found if running(pid)]


def test_a_killed_owner_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder, tag, *spaces = owner.stdout.readline().split()
        before = in_networks(spaces)
        owner.kill()
    assert len(before) >= 5  # two holders, the relay, nsenter and `sleep`

    def left() -> list[object]:
        groups = [root / tag for root in cgroup_roots()]
        return [
            # Another test's lab may be given the number of a network that is gone.
            *(pid for pid in in_networks(spaces) if pid in before),
            *(path for path in (Path(folder), *groups) if path.exists()),
        ]

    wait_for(lambda: not left())
    assert left() == []


def test_a_lab_whose_time_is_up_goes_away_under_its_owner() -> None:
    with Lab(macs(1), ttl_s=1) as lab:
        pid = lab.hosts[0].pid
        assert wait_for(lambda: not running(pid) and not lab.folder.exists())
