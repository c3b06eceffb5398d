"""What a pretend host is, and that it is nowhere but in its lab."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.conftest import NewLab
from tests.lab.host import NET
from tests.lab.lab import Lab, macs
from tests.lab.machine import BARE_PYTHON, ROOT, LabError
from tests.lab.probes import reaches, wait_for

SPIN = """
import time
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print(time.process_time())
"""
MEMORY = "import psutil; print(psutil.virtual_memory().total >> 30, psutil.virtual_memory().available >> 30)"


@pytest.fixture(scope="module")
def three(lab: NewLab) -> Lab:
    return lab(3, memory_gib=(64, 16, 32))


def test_every_host_has_its_own_name_and_reaches_every_other(three: Lab) -> None:
    names = [host.run(["hostname"], check=True).stdout.strip() for host in three.hosts]
    assert names == ["mac-a", "mac-b", "mac-c"]
    assert all(reaches(x, y) for x in three.hosts for y in three.hosts if x is not y)


def test_a_host_says_that_it_has_its_own_memory_and_chip(three: Lab) -> None:
    small = three["mac-b"]
    assert small.run([sys.executable, "-c", MEMORY], check=True).stdout == "16 12\n"
    words = ["sysctl", "-n", "machdep.cpu.brand_string", "hw.memsize"]
    assert small.run(words, check=True).stdout == f"Apple M4 Max\n{16 << 30}\n"
    assert small.run(["sysctl", "hw.model"]).stdout == "hw.model: Mac16,9\n"
    assert small.run(["sysctl", "-n", "hw.nothing"]).returncode == 1
    assert "ProductVersion:\t\t15.5" in small.run(["sw_vers"]).stdout


def test_a_host_has_its_own_home_and_its_own_folder_for_ray(three: Lab) -> None:
    a, b, _ = three.hosts
    a.run(["sh", "-c", "touch ~/mine /tmp/ray/mine /dev/shm/mine"], check=True)
    assert a.run(["ls", "/tmp/ray"]).stdout == "mine\n"
    assert b.run(["sh", "-c", "ls ~/mine /tmp/ray/mine /dev/shm/mine"]).stdout == ""
    assert (a.home / "mine").exists()
    assert not Path("/dev/shm/mine").exists()


def test_a_host_runs_the_repository_with_its_own_python(three: Lab) -> None:
    done = three["mac-c"].omlx("--help")
    assert (done.returncode, "serve" in done.stdout) == (0, True), done.stderr
    where = "import omlx, pathlib; print(omlx.__file__, pathlib.Path.home())"
    said = three["mac-c"].run([sys.executable, "-c", where], folder=ROOT, check=True).stdout
    assert said.split() == [str(ROOT / "omlx/__init__.py"), str(three["mac-c"].home)]


def test_nothing_of_the_lab_is_on_the_machine(three: Lab) -> None:
    seen = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
    assert NET not in seen


def test_a_command_that_takes_too_long_is_ended_inside_too(three: Lab) -> None:
    a = three["mac-a"]
    before = a.pids()
    with pytest.raises(subprocess.TimeoutExpired):
        a.run(["sleep", "77"], timeout_s=0.3)
    assert wait_for(lambda: a.pids() == before, 5)


def test_a_failed_command_says_where_and_why(three: Lab) -> None:
    with pytest.raises(LabError, match="mac-a: sh -c 'echo alas >&2; exit 3': exit code 3\nalas"):
        three["mac-a"].run(["sh", "-c", "echo alas >&2; exit 3"], check=True)


def test_a_slow_host_gets_its_share_of_a_core(three: Lab) -> None:
    a = three["mac-a"]
    three.cpu(a, 0.2)
    assert float(a.run([*BARE_PYTHON, "-c", SPIN], check=True).stdout) < 0.5
    three.cpu(a, 0)


def test_a_host_is_found_by_name_or_address_only(three: Lab) -> None:
    assert three["10.77.0.12"] is three["mac-b"] is three[three.hosts[1]]
    with pytest.raises(LabError, match="no host 'mac-z' here; there are mac-a, mac-b, mac-c"):
        three["mac-z"]


def test_two_labs_stand_side_by_side(three: Lab, lab: NewLab) -> None:
    other = lab(1, shims={})
    assert other.hosts[0].ip == three.hosts[0].ip
    assert reaches(three["mac-a"], three["mac-b"])


def test_a_lab_does_not_take_a_folder_that_holds_something(tmp_path: Path, lab: NewLab) -> None:
    (tmp_path / "thesis").touch()
    with pytest.raises(LabError, match="not empty"), Lab(macs(1), folder=tmp_path):
        pass
    assert (tmp_path / "thesis").exists()


def test_a_lab_that_is_closed_leaves_no_folder(lab: NewLab, tmp_path: Path) -> None:
    with Lab(macs(1), folder=tmp_path / "lab") as one:
        assert one.folder.exists()
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize(("count", "sizes"), [(0, 8), (17, 8), (2, [8])])
def test_a_lab_without_hosts_or_with_too_many_is_refused(count: int, sizes: int | list[int]) -> None:
    with pytest.raises(LabError, match="one size for each"):
        macs(count, sizes)
