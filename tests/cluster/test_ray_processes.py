"""Ray's processes, with a command in Ray's place that leaves processes behind as Ray does: what is started,
what is ended, and what is none of ours."""

import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from omlx.cluster import ray_processes
from omlx.cluster.membership import Member
from omlx.cluster.ray_access import ray_environment
from omlx.cluster.ray_processes import (
    MARK,
    RaySession,
    reap_left_over,
    start_head,
    start_worker,
)
from omlx.cluster.recorded_process import RecordedProcess
from omlx.errors import BadSetting, RayFailed
from tests.cluster.certified import HERE, comes_true, members
from tests.cluster.pretended_ray import greeting, pretend

PORT = 26399
RAY = """
    import pathlib, subprocess, sys, time
    print("a warning\\n" + " ".join(sys.argv[1:]))
    temp = pathlib.Path(sys.argv[-1].removeprefix("--temp-dir="))
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {}], {}); time.sleep(60)"
    stage = f"import pathlib, time; pathlib.Path({str(temp / 'runs')!r}).touch(); time.sleep(60)"
    agent = child.format(repr(stage), "start_new_session=True, env={'STAGE': '1'}")
    raylet = child.format(repr(agent), "")
    subprocess.Popen([sys.executable, "-c", raylet], start_new_session=True)
    with open(temp / "agent.log", "w") as log:
        subprocess.Popen(["ray::Agent", "60"], executable="/bin/sleep", env={}, stdout=log)
    end = time.monotonic() + 20
    while not (temp / "runs").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    return members(tmp_path_factory.mktemp("nodes"), "b")


@pytest.fixture
def head(nodes: dict[str, Member]) -> Member:
    return nodes["head"]


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(RAY, tmp_path, monkeypatch)
    yield
    for process in psutil.Process().children(recursive=True):
        process.kill()


@pytest.fixture
def port(head: Member) -> Iterator[int]:
    with greeting(head) as port:
        yield port


def environment_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.environ().get(MARK))
    return ""


def tree(session: RaySession) -> list[psutil.Process]:
    found = [one.find() for one in session.processes]
    return [process for process in found if process is not None]


def test_a_head_is_started_with_token_and_tls_and_ended_with_all_that_is_its_own(
    head: Member, tmp_path: Path
) -> None:
    session = start_head(head, HERE, PORT, tmp_path)
    said = (session.temp / "start.log").read_text()
    for flag in ("--head", f"--port={PORT}", f"--node-ip-address={HERE}", "--labels=omlx=head"):
        assert flag in said.split()
    assert stat.S_IMODE(session.temp.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "ray.json").stat().st_mode) == 0o600
    processes = tree(session)
    # Its raylet, an agent, and one whose environment cannot be read any more; but not the stage.
    assert session.alive() and len(processes) == 3
    environment = next(process for process in processes if process.ppid() == 1).environ()
    assert environment["RAY_AUTH_MODE"] == "token" and environment["RAY_USE_TLS"] == "1"
    session.stop()
    session.stop()
    assert not session.alive() and not session.temp.exists() and not (tmp_path / "ray.json").exists()


def test_a_stage_and_anothers_ray_are_left_alone(head: Member, tmp_path: Path) -> None:
    foreign = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "raylet"], env={MARK: "another"}
    )
    session = start_head(head, HERE, PORT, tmp_path)
    stages = [p for process in tree(session) for p in process.children() if p.environ().get("STAGE")]
    assert stages
    session.stop()
    assert foreign.poll() is None
    foreign.kill()
    foreign.wait()
    for stage in stages:
        assert stage.is_running()
        stage.kill()


def test_what_a_killed_coordinator_left_is_ended_by_the_next_one(head: Member, tmp_path: Path) -> None:
    code = f"""
        import os, pathlib, signal
        from omlx.cluster import membership, ray_processes
        ray_processes.RAY = {ray_processes.RAY!r}
        member = membership.open_member(pathlib.Path({str(Path(head.security.folder).parent)!r}))
        ray_processes.start_head(member, {HERE!r}, {PORT}, pathlib.Path({str(tmp_path)!r}))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=30)
    assert killed.returncode == -signal.SIGKILL
    left = msgspec.json.decode((tmp_path / "ray.json").read_bytes(), type=ray_processes._Recorded)
    assert left.processes and all(one.find() is not None for one in left.processes)
    session = start_head(head, HERE, PORT, tmp_path)
    assert not any(one.find() is not None for one in left.processes)
    assert not Path(left.temp).exists() and session.alive()
    session.stop()
    assert not reap_left_over(tmp_path)


def test_a_pid_that_is_anothers_by_now_is_spared(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    before = RecordedProcess(bystander.pid, psutil.Process(bystander.pid).create_time() - 100)
    recorded = ray_processes._Recorded("mark", str(tmp_path / "omlx-ray-x"), (before,))
    ray_processes.write(tmp_path / "ray.json", msgspec.json.encode(recorded))
    assert not reap_left_over(tmp_path)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_folder_that_only_the_record_calls_rays_is_not_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    recorded = ray_processes._Recorded("mark", str(precious))
    ray_processes.write(tmp_path / "ray.json", msgspec.json.encode(recorded))
    reap_left_over(tmp_path)
    assert precious.is_dir()


def test_a_second_owner_is_refused_while_the_first_lives(head: Member, tmp_path: Path) -> None:
    session = start_head(head, HERE, PORT, tmp_path)
    with pytest.raises(BadSetting, match="another omlx process"):
        start_head(head, HERE, PORT, tmp_path)
    assert not reap_left_over(tmp_path) and session.alive()
    session.stop()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('one\\nno room'); sys.exit(1)", "Ray does not start: one | no room"),
        ("print('fine')", "ended as soon as"),
    ],
)
def test_a_ray_that_does_not_start_is_told_with_its_last_words_and_leaves_nothing(
    code: str, why: str, head: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(code, tmp_path, monkeypatch)
    with pytest.raises(RayFailed) as failed:
        start_head(head, HERE, PORT, tmp_path)
    assert why in str(failed.value)
    assert not (tmp_path / "ray.json").exists()


def test_a_ray_that_hangs_is_given_up_with_all_that_it_started(
    nodes: dict[str, Member], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_processes, "START_WITHIN_S", 1.0)
    pretend(RAY + "    time.sleep(60)\n", tmp_path, monkeypatch)
    marks: list[str] = []
    monkeypatch.setattr(ray_processes.secrets, "token_hex", lambda n: marks.append("m" * n) or marks[-1])
    with pytest.raises(RayFailed, match="did not start within 1 s"):
        start_worker(nodes["b"], HERE, (HERE, port), tmp_path)
    assert comes_true(
        lambda: not any(marks[0] in environment_of(process) for process in psutil.process_iter())
    )


def test_no_ray_without_a_token_that_is_ours_alone_and_a_certificate(tmp_path: Path) -> None:
    member = members(tmp_path, "b")["b"]
    for change in (
        lambda: member.token_path.chmod(0o644),
        lambda: (Path(member.security.folder) / "node.crt").unlink(),
        lambda: member.token_path.unlink(),
    ):
        change()
        with pytest.raises(BadSetting):
            start_worker(member, HERE, (HERE, PORT), tmp_path / "ray")
        member.token_path.chmod(0o600) if member.token_path.exists() else None
    assert not (tmp_path / "ray").exists()


def test_a_head_that_is_not_there_or_not_ours_is_told_before_ray_tries(
    nodes: dict[str, Member], port: int, tmp_path: Path
) -> None:
    """Ray tried for a quarter of a minute, and then spoke of observability."""
    with socket.create_server((HERE, 0)) as closed:
        nobody = closed.getsockname()[1]
    with pytest.raises(RayFailed, match="cannot be reached: Connection refused; is the coordinator up"):
        start_worker(nodes["b"], HERE, (HERE, nobody), tmp_path / "ray")
    stranger = members(tmp_path, "b")["b"]
    with pytest.raises(RayFailed, match=r"not to be trusted: .*certificate"):
        start_worker(stranger, HERE, (HERE, port), tmp_path / "ray")
    assert not (tmp_path / "ray").exists()


def test_an_address_of_another_machine_is_told(head: Member, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="no address of this machine"):
        start_head(head, "192.0.2.77", PORT, tmp_path)


def test_nothing_that_the_shell_says_about_ray_gets_through(
    head: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("OMLX_API_KEY", "secret")
    found = ray_environment(head)
    assert found["RAY_AUTH_MODE"] == "token"
    assert "RAY_ADDRESS" not in found and "OMLX_API_KEY" not in found


@pytest.mark.parametrize("address", ["mac.local", "--help", "fe80::1", "1.2.3.4 --no-x", ""])
def test_what_is_no_address_never_becomes_an_option(address: str, head: Member, tmp_path: Path) -> None:
    with pytest.raises(BadSetting):
        start_worker(head, HERE, (address, PORT), tmp_path)
    with pytest.raises(BadSetting):
        start_head(head, address, PORT, tmp_path)
    assert not (tmp_path / "ray.json").exists()


def test_a_taken_port_is_told_before_ray_tries(head: Member, tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadSetting, match=f"port {port} .* is taken"):
            start_head(head, HERE, port, tmp_path)
    with pytest.raises(BadSetting, match="1024 to 65535"):
        start_head(head, HERE, 80, tmp_path)
