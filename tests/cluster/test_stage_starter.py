"""Stages that wait for a head from another machine: who is let in, and how they end. No Ray here."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omlx.cluster.local_actor import compute_environment
from omlx.cluster.membership import Member
from omlx.cluster.recorded_process import RecordedProcess
from omlx.cluster.stage_starter import SECURITY_FOLDER, StageStarter
from omlx.errors import BadSetting, LinkLost
from omlx.node.channel import Streams, open_streams
from tests.cluster.certified import HERE, comes_true, members


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Member]:
    found = members(tmp_path, "b", "c")
    monkeypatch.setenv(SECURITY_FOLDER, found["b"].security.folder)
    return found


@pytest.fixture
def starter() -> Iterator[StageStarter]:
    found = StageStarter()
    yield found
    for child in found._children:
        child.kill()
        child.wait()


async def hang_up(streams: Streams) -> None:
    streams.close()
    await streams.writer.wait_closed()


def gone(process: RecordedProcess) -> bool:
    return comes_true(lambda: process.find() is None)


def test_the_head_is_let_in_and_the_stage_ends_with_its_connection(
    cluster: dict[str, Member], starter: StageStarter
) -> None:
    stage = starter.start(HERE, "head")

    async def walk() -> None:
        streams = await open_streams((HERE, stage.port), cluster["head"].security, "b", 10)
        assert streams.peer == "b"
        await hang_up(streams)

    asyncio.run(walk())
    assert gone(stage.process)


def test_another_node_of_the_cluster_is_not_the_head(
    cluster: dict[str, Member], starter: StageStarter
) -> None:
    stage = starter.start(HERE, "head")

    async def walk() -> None:
        with pytest.raises(LinkLost):
            await open_streams((HERE, stage.port), cluster["c"].security, "b", 5)
        await hang_up(await open_streams((HERE, stage.port), cluster["head"].security, "b", 5))

    asyncio.run(walk())
    starter.end(stage.process, 0.0)


def test_a_stage_whose_head_never_comes_ends_by_itself(
    cluster: dict[str, Member], starter: StageStarter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hurried = tmp_path / "hurried.py"
    hurried.write_text("from omlx.node import process\nprocess.HEAD_WITHIN_S = 0.3\nprocess.main()\n")
    starter.command = (sys.executable, str(hurried))
    stage = starter.start(HERE, "head")
    with socket.create_connection((HERE, stage.port)):  # whoever says nothing is not the head
        assert gone(stage.process)


def test_a_frozen_stage_is_killed_and_a_stranger_with_its_pid_is_not(
    cluster: dict[str, Member], starter: StageStarter
) -> None:
    stage = starter.start(HERE, "head")
    os.kill(stage.process.pid, signal.SIGSTOP)
    earlier = RecordedProcess(stage.process.pid, stage.process.started - 60)
    StageStarter().end(earlier, 0.0)
    assert stage.process.find() is not None
    starter.end(stage.process, 0.1)
    assert stage.process.find() is None
    starter.end(stage.process, 0.0)  # gone already


def test_a_stage_ends_when_nothing_comes_from_its_head_any_more(
    cluster: dict[str, Member], starter: StageStarter, tmp_path: Path
) -> None:
    """A cable was pulled out: the connection never ends, and the weights stayed."""
    hurried = tmp_path / "hurried.py"
    hurried.write_text("from omlx.node import process\nprocess.HEAD_SILENT_S = 0.5\nprocess.main()\n")
    starter.command = (sys.executable, str(hurried))
    stage = starter.start(HERE, "head")

    async def walk() -> None:
        streams = await open_streams((HERE, stage.port), cluster["head"].security, "b", 10)
        assert await asyncio.to_thread(gone, stage.process)
        await hang_up(streams)

    asyncio.run(walk())


def test_a_stage_gets_the_environment_of_its_own_machine_and_nothing_of_rays(
    cluster: dict[str, Member], starter: StageStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("OF_THIS_MACHINE", "kept")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    stage = starter.start(HERE, "head")

    async def walk() -> None:
        streams = await open_streams((HERE, stage.port), cluster["head"].security, "b", 10)
        running = psutil.Process(stage.process.pid)
        assert running.environ()["OF_THIS_MACHINE"] == "kept"
        assert not [name for name in running.environ() if name.startswith(("RAY_", "OMLX_RAY_"))]
        if "LD_PRELOAD" in compute_environment():
            assert any("openblas" in file.path for file in running.memory_maps())
        await hang_up(streams)

    asyncio.run(walk())


def test_a_starter_without_a_certificate_or_an_address_of_its_own_says_so(
    starter: StageStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECURITY_FOLDER, raising=False)
    with pytest.raises(BadSetting, match="omlx node run"):
        starter.start(HERE, "head")
    monkeypatch.setenv(SECURITY_FOLDER, "/nowhere")
    with pytest.raises(BadSetting, match="cannot listen at 192\\.0\\.2\\.77"):
        starter.start("192.0.2.77", "head")


def test_a_port_scanner_keeps_nobody_out(cluster: dict[str, Member], starter: StageStarter) -> None:
    stage = starter.start(HERE, "head")
    with socket.create_connection((HERE, stage.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n" * 50)

        async def walk() -> None:
            streams = await open_streams((HERE, stage.port), cluster["head"].security, "b", 10)
            await hang_up(streams)

        asyncio.run(walk())
    assert gone(stage.process)


def test_a_stage_starts_without_what_only_servers_and_terminals_need() -> None:
    """Imports are most of a start, and a failover waits for them."""
    script = """
import sys
from omlx.node.process import start_light
start_light()
import omlx.node.host, omlx.node.channel
print([name for name in sys.argv[1:] if getattr(sys.modules.get(name), "__file__", None)])
"""
    needless = ("rich", "transformers", "huggingface_hub", "ray", "fastapi")
    ran = subprocess.run(
        [sys.executable, "-c", script, *needless], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "[]"
