"""A real Ray with token and TLS, two nodes of it on this machine: stages are placed, killed and go on."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from omlx.cluster import ray_processes
from omlx.cluster.membership import Member
from omlx.cluster.ray_driver import RayDriver
from omlx.cluster.ray_messages import RayNode
from omlx.cluster.ray_processes import RaySession, start_head, start_worker
from omlx.cluster.recorded_process import RecordedProcess
from omlx.cluster.remote_actor import RayPlacement
from omlx.errors import RayFailed
from omlx.node.engine import Engine
from tests.cluster.certified import members, own_address
from tests.cluster.kept_node import true_soon
from tests.walk.engines import answer, compare, engine, request
from tests.walk.servers import free_port

pytestmark = [
    pytest.mark.slow,
]

Tiny = Callable[[str], Path]
WANTED = request([(3 * i) % 700 + 20 for i in range(40)], max_tokens=60)
HERE = own_address()
NODES = ("head", "b")


@dataclass
class Cluster:
    folder: Path
    nodes: dict[str, Member]
    head: RaySession
    worker: RaySession
    foreign: list[psutil.Process]

    def start_worker(self, member: Member, name: str) -> RaySession:
        host, port = self.head.head.split(":")
        return start_worker(member, HERE, (host, int(port)), self.folder / name)


@pytest.fixture(scope="module")
def foreign() -> Iterator[list[psutil.Process]]:
    """Another project's Ray on the same machine, started as anybody does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="foreign-", dir="/tmp") as temp:
        command = [*ray_processes.RAY, "--head", f"--port={free_port()}", "--include-dashboard=false"]
        lean = ["--num-cpus=0", f"--object-store-memory={80 * 2**20}", f"--temp-dir={temp}"]
        subprocess.run(
            [*command, *lean, "--disable-usage-stats"],
            env=kept | {"HOME": temp},
            capture_output=True,
            timeout=60,
            check=True,
        )
        found = [one for one in psutil.process_iter() if temp in words(one)]
        agents = [child for one in found for child in one.children()]
        yield found
        for process in [*agents, *found]:
            process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, foreign: list[psutil.Process]) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    nodes = members(folder, "b", "c")
    head = start_head(nodes["head"], HERE, free_port(), folder / "head-ray")
    try:
        found = Cluster(folder, nodes, head, head, foreign)
        found.worker = found.start_worker(nodes["b"], "b-ray")
        yield found
        found.worker.stop()
    finally:
        head.stop()


@asynccontextmanager
async def running(folder: Path, cluster: Cluster) -> AsyncIterator[tuple[Engine, RayDriver]]:
    driver = RayDriver(cluster.head)
    try:
        place = RayPlacement(driver, cluster.nodes["head"], lambda node: HERE)
        async with engine(folder, 2, place=place, nodes=NODES) as (opened, _):
            yield opened, driver
    finally:
        await driver.close()


def of_session(session: RaySession) -> list[psutil.Process]:
    return ray_processes._marked(ray_processes._Recorded("no mark", str(session.temp)))


def starters(cluster: Cluster) -> list[psutil.Process]:
    """Ray's workers that hold our actors."""
    raylets = [one.find() for one in cluster.worker.processes]
    children = [child for raylet in raylets if raylet is not None for child in raylet.children()]
    return [child for child in children if "StageStarter" in words(child)]


def words(process: psutil.Process) -> str:
    """Of its command line; none where it has just ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def test_a_stage_placed_by_ray_gives_the_same_tokens_and_comes_back_when_it_is_killed(
    tiny: Tiny, cluster: Cluster
) -> None:
    async def walk() -> RecordedProcess:
        async with running(tiny("tiny-llama"), cluster) as (opened, driver):
            assert await driver.nodes() == (RayNode("b", HERE), RayNode("head", HERE))
            stream = opened.submit(WANTED)
            found = [(await anext(stream)).id]
            os.kill(opened.pipeline.stages[1].process.pid, signal.SIGKILL)
            found += [token.id async for token in stream]
            assert compare(tiny("tiny-llama"), [WANTED], [found]) == 1
            assert opened.recoveries == 1
            return opened.pipeline.stages[1].process.placed

    assert asyncio.run(walk()).find() is None


def test_neither_the_drivers_nor_the_actors_end_disturbs_an_answer(tiny: Tiny, cluster: Cluster) -> None:
    async def walk() -> None:
        async with running(tiny("tiny-llama"), cluster) as (opened, driver):
            stream = opened.submit(WANTED)
            found = [(await anext(stream)).id]
            assert driver.pid is not None
            os.kill(driver.pid, signal.SIGABRT)
            actors = starters(cluster)
            assert actors
            for actor in actors:
                actor.kill()
            await true_soon(lambda: driver.pid is None and not starters(cluster), 20.0)
            found += [token.id async for token in stream]
            assert compare(tiny("tiny-llama"), [WANTED], [found]) == 1
            assert compare(tiny("tiny-llama"), [WANTED], [await answer(opened, WANTED)]) == 1
            assert opened.recoveries == 0
            # A new driver and a new actor place the next one.
            os.kill(opened.pipeline.stages[1].process.pid, signal.SIGKILL)
            assert compare(tiny("tiny-llama"), [WANTED], [await answer(opened, WANTED)]) == 1
            assert opened.recoveries == 1 and starters(cluster)

    asyncio.run(walk())


def test_a_node_whose_raylet_is_killed_computes_on_and_takes_stages_again_once_its_ray_is_back(
    tiny: Tiny, cluster: Cluster
) -> None:
    async def walk() -> None:
        async with running(tiny("tiny-llama"), cluster) as (opened, driver):
            assert starters(cluster)
            for recorded in cluster.worker.processes:
                os.kill(recorded.pid, signal.SIGKILL)
            await true_soon(lambda: not cluster.worker.alive(), 20.0)
            stream = opened.submit(WANTED)
            assert compare(tiny("tiny-llama"), [WANTED], [[token.id async for token in stream]]) == 1
            assert opened.recoveries == 0
            old = cluster.worker
            await asyncio.to_thread(old.stop)
            await true_soon(lambda: not of_session(old), 20.0)
            cluster.worker = await asyncio.to_thread(cluster.start_worker, cluster.nodes["b"], "b-ray")
            assert opened.recoveries == 0, "its Ray came back, its stage had never gone"
            assert RayNode("b", HERE) in await driver.nodes()
            os.kill(opened.pipeline.stages[1].process.pid, signal.SIGKILL)
            assert compare(tiny("tiny-llama"), [WANTED], [await answer(opened, WANTED)]) == 1

    asyncio.run(walk())


def test_a_node_that_is_not_there_is_told_at_once(cluster: Cluster) -> None:
    async def walk() -> None:
        driver = RayDriver(cluster.head)
        try:
            with pytest.raises(RayFailed, match="node c runs no Ray of this cluster"):
                await driver.place("c", "head", 5.0)
        finally:
            await driver.close()

    asyncio.run(walk())


def test_a_worker_with_a_wrong_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.touch(mode=0o600)
    wrong.write_text("ab" * 32)
    with pytest.raises(RayFailed, match="takes another token"):
        cluster.start_worker(replace(cluster.nodes["c"], token_path=wrong), "c-ray")


def test_what_we_end_is_ours_and_another_projects_ray_is_untouched(cluster: Cluster) -> None:
    """The last of this module: what it ends is started for no other."""
    cluster.worker.stop()
    cluster.head.stop()
    assert not cluster.head.alive() and not cluster.worker.alive()
    assert not of_session(cluster.worker) and not of_session(cluster.head)
    assert not cluster.head.temp.exists()
    assert cluster.foreign and all(process.is_running() for process in cluster.foreign)
