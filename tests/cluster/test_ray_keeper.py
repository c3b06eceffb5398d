"""A node's Ray is kept going, with a command in Ray's place that leaves a process behind as Ray does."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from omlx.cluster import ray_access, ray_keeper, ray_processes
from omlx.cluster.head_address import HEAD_FILE, HeadAddress, write_head
from omlx.cluster.membership import Member, install_bundle, install_news, remove_bundle
from omlx.cluster.ray_keeper import (
    Step,
    Wanted,
    decide,
    keep_ray,
    pause_s,
    read_stamp,
    read_wanted,
)
from omlx.cluster.trust import issue, renew, revoke
from omlx.errors import BadSetting
from tests.cluster.certified import HERE, comes_true
from tests.cluster.kept_node import Cluster, found_cluster, pids, runs, true_soon
from tests.cluster.pretended_ray import greeting, pretend

QUICK_S = 0.02
RAY = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""
A, B = (Wanted(HeadAddress("10.0.0.1", 6399, number), "one") for number in (1, 2))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return found_cluster(tmp_path)


# ------------------------------------------------------------------ what is decided


@pytest.mark.parametrize(
    ("wanted", "running", "rested", "step"),
    [
        (None, None, True, Step()),
        (A, None, True, Step(start=A)),
        (A, None, False, Step()),
        (A, A, True, Step()),
        (A, A, False, Step()),
        (None, A, True, Step(stop=True)),
        (None, A, False, Step(stop=True)),
        (B, A, True, Step(stop=True, start=B)),
        (B, A, False, Step(stop=True)),
    ],
)
def test_what_runs_becomes_what_is_wanted(
    wanted: Wanted | None, running: Wanted | None, rested: bool, step: Step
) -> None:
    assert decide(wanted, running, rested=rested) == step


def test_pauses_grow_and_a_start_that_costs_is_tried_more_rarely() -> None:
    assert [pause_s(tries, reached=False) for tries in (1, 2, 3, 4, 5, 99)] == [1, 2, 4, 8, 15, 15]
    assert [pause_s(tries, reached=True) for tries in (1, 5, 9, 10_000)] == [1, 16, 256, 300]


# ------------------------------------------------------------------ what the folder says


def test_a_node_wants_a_worker_once_it_knows_the_head_and_none_after_it_has_left(cluster: Cluster) -> None:
    assert read_wanted(cluster.folder) is None
    write_head(cluster.folder, A.head)
    found = read_wanted(cluster.folder)
    assert found is not None and found.head == A.head
    remove_bundle(cluster.folder)
    assert read_wanted(cluster.folder) is None and read_stamp(cluster.folder) is None


def test_the_coordinator_itself_wants_none(cluster: Cluster) -> None:
    write_head(cluster.trust.folder, A.head)
    assert read_wanted(cluster.trust.folder) is None


def test_a_head_that_is_said_again_is_noticed_and_wants_the_same_worker(cluster: Cluster) -> None:
    write_head(cluster.folder, A.head)
    stamp, wanted = read_stamp(cluster.folder), read_wanted(cluster.folder)
    assert read_stamp(cluster.folder) == stamp
    write_head(cluster.folder, A.head)
    assert read_stamp(cluster.folder) != stamp, "so that a pause ends"
    assert read_wanted(cluster.folder) == wanted
    write_head(cluster.folder, B.head)
    assert read_wanted(cluster.folder) != wanted


def test_another_token_or_certificate_wants_another_worker(cluster: Cluster) -> None:
    write_head(cluster.folder, A.head)
    stamps, found = [read_stamp(cluster.folder)], [read_wanted(cluster.folder)]
    issue(cluster.trust, "c", [], [])
    install_news(cluster.folder, revoke(cluster.trust, "c"))
    stamps.append(read_stamp(cluster.folder))
    found.append(read_wanted(cluster.folder))
    install_bundle(cluster.folder, renew(cluster.trust, "b"))
    stamps.append(read_stamp(cluster.folder))
    found.append(read_wanted(cluster.folder))
    assert None not in found and len(set(found)) == len(set(stamps)) == 3


def test_a_file_that_is_open_to_others_is_refused_and_its_mending_is_noticed(cluster: Cluster) -> None:
    write_head(cluster.folder, A.head)
    (cluster.folder / HEAD_FILE).chmod(0o644)
    with pytest.raises(BadSetting, match="open to others"):
        read_wanted(cluster.folder)
    stamp = read_stamp(cluster.folder)
    (cluster.folder / HEAD_FILE).chmod(0o600)
    assert read_stamp(cluster.folder) != stamp


# ------------------------------------------------------------------ a worker that only looks like one


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(RAY, tmp_path, monkeypatch)


@asynccontextmanager
async def kept(home: Path) -> AsyncIterator[None]:
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_ray(home, ended, QUICK_S))
        try:
            yield
        finally:
            ended.set()


def test_a_worker_that_is_killed_comes_back_one_for_another_head_replaces_it_and_leaving_ends_it(
    cluster: Cluster, ray: None
) -> None:
    async def walk(first: int, second: int) -> None:
        async with kept(cluster.home):
            write_head(cluster.folder, HeadAddress(HERE, first))
            await true_soon(lambda: bool(pids(cluster.home)))
            before = pids(cluster.home)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            await true_soon(lambda: bool(pids(cluster.home) - before))
            before = pids(cluster.home)
            write_head(cluster.folder, HeadAddress(HERE, second))
            await true_soon(lambda: bool(pids(cluster.home) - before))
            assert not any(runs(pid) for pid in before)
            before = pids(cluster.home)
            remove_bundle(cluster.folder)
            await true_soon(lambda: not any(runs(pid) for pid in before))
        assert not (cluster.home / "ray" / "ray.json").exists()

    with greeting(cluster.head) as first, greeting(cluster.head) as second:
        asyncio.run(walk(first, second))


def test_the_agents_end_ends_its_worker(cluster: Cluster, ray: None) -> None:
    async def walk(port: int) -> frozenset[int]:
        async with kept(cluster.home):
            write_head(cluster.folder, HeadAddress(HERE, port))
            await true_soon(lambda: bool(pids(cluster.home)))
            return pids(cluster.home)

    with greeting(cluster.head) as port:
        found = asyncio.run(walk(port))
    assert found and not any(runs(pid) for pid in found)
    assert not (cluster.home / "ray" / "ray.json").exists()


def test_an_end_in_the_middle_of_a_start_does_not_wait_for_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` may take a minute; a service manager gives ten seconds."""
    file = tmp_path / "pid"
    writes = f"import os, pathlib, time\npathlib.Path({str(file)!r}).write_text(str(os.getpid()))"
    pretend(f"{writes}\ntime.sleep(60)", tmp_path, monkeypatch)

    async def walk(port: int) -> float:
        async with kept(cluster.home):
            write_head(cluster.folder, HeadAddress(HERE, port))
            await true_soon(lambda: file.exists() and bool(file.read_text()))
            start = time.monotonic()
        return time.monotonic() - start

    with greeting(cluster.head) as port:
        assert asyncio.run(walk(port)) < 5.0
    assert not runs(int(file.read_text()))
    assert not (cluster.home / "ray" / "ray.json").exists()


def test_a_head_that_is_not_there_is_told_once_and_joined_when_it_is(
    cluster: Cluster, ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_keeper, "FIRST_PAUSE_S", QUICK_S)
    tries: list[tuple[str, int]] = []
    check = ray_access.check_head

    def counted(member: Member, head: tuple[str, int]) -> None:
        tries.append(head)
        check(member, head)

    monkeypatch.setattr(ray_access, "check_head", counted)
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]

    async def walk() -> None:
        async with kept(cluster.home):
            write_head(cluster.folder, HeadAddress(HERE, port))
            await true_soon(lambda: len(tries) >= 3)
            write_head(cluster.folder, HeadAddress(HERE, port))  # which ends a pause
            with greeting(cluster.head, port):
                await true_soon(lambda: bool(pids(cluster.home)))

    with capture_logs() as logs:
        asyncio.run(walk())
    said = [line["why"] for line in logs if line["log_level"] == "warning"]
    assert len(said) == 1 and "cannot be reached" in said[0]


def test_what_a_killed_agent_left_is_ended_by_the_next_one(
    cluster: Cluster, ray: None, tmp_path: Path
) -> None:
    code = f"""
        import asyncio, pathlib
        from omlx.cluster import ray_keeper, ray_processes
        ray_processes.RAY = {ray_processes.RAY!r}
        asyncio.run(ray_keeper.keep_ray(pathlib.Path({str(cluster.home)!r}), asyncio.Event(), {QUICK_S}))
    """
    with greeting(cluster.head) as port:
        write_head(cluster.folder, HeadAddress(HERE, port))
        agent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
        try:
            assert comes_true(lambda: bool(pids(cluster.home)))
        finally:
            agent.kill()
            agent.wait(10)
    left = pids(cluster.home)
    assert left
    remove_bundle(cluster.folder)

    async def walk() -> None:
        async with kept(cluster.home):
            await true_soon(lambda: not any(runs(pid) for pid in left))

    asyncio.run(walk())
    assert not (cluster.home / "ray" / "ray.json").exists()


def test_a_machine_that_no_head_has_called_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"""
        import asyncio, pathlib, sys
        from omlx.cluster.ray_keeper import keep_ray
        async def main():
            ended = asyncio.Event()
            asyncio.get_running_loop().call_later(0.2, ended.set)
            await keep_ray(pathlib.Path({str(tmp_path)!r}), ended, 0.02)
        asyncio.run(main())
        heavy = ("cryptography", "mlx", "ray", "asyncssh", "omlx.cluster.ray_processes")
        print([name for name in heavy if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []
