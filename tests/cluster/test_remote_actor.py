"""Stages on another node, with a driver in the place of Ray's: real processes, real TLS, the same tokens."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from omlx.cluster import ray_driver, remote_actor
from omlx.cluster.membership import Member
from omlx.cluster.ray_driver import RayDriver
from omlx.cluster.ray_messages import RayNode
from omlx.cluster.ray_processes import RaySession
from omlx.cluster.remote_actor import RayPlacement
from omlx.errors import Closed, RayFailed, StageLost
from omlx.ids import Epoch
from omlx.node.engine import Engine
from omlx.node.layout import here
from omlx.node.manifest import read_manifest
from omlx.node.pipeline import Pipeline, PipelineSpec
from tests.cluster.certified import HERE, members
from tests.cluster.kept_node import true_soon
from tests.walk.engines import answer, compare, engine, on, request, uneven

Tiny = Callable[[str], Path]
SCRIPT = Path(__file__).with_name("scripted_driver.py")
ROOT = Path(__file__).parent.parent.parent
HERE_AND_THERE = ("head", "b")
WANTED = request([(3 * i) % 700 + 20 for i in range(40)], max_tokens=60)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Member]:
    return members(tmp_path_factory.mktemp("nodes"), "b", "c")


Driving = Callable[..., RayDriver]


@pytest.fixture
def driving(nodes: dict[str, Member], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driving:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(word: str = "obey", node: str = "b") -> RayDriver:
        session = RaySession(nodes["head"], HERE, f"{HERE}:1", tmp_path, tmp_path, (), None)
        return RayDriver(session, (sys.executable, str(SCRIPT), nodes[node].security.folder, word))

    return make


def placing(driver: RayDriver, member: Member) -> RayPlacement:
    return RayPlacement(driver, member, lambda node: HERE)


@asynccontextmanager
async def closing(driver: RayDriver) -> AsyncIterator[RayDriver]:
    try:
        yield driver
    finally:
        await driver.close()


@asynccontextmanager
async def two_stages(
    folder: Path, driver: RayDriver, member: Member
) -> AsyncIterator[tuple[Engine, RayPlacement]]:
    place = placing(driver, member)
    async with closing(driver), engine(folder, 2, place=place, nodes=HERE_AND_THERE) as (opened, _):
        yield opened, place


def pid_of(opened: Engine, stage: int) -> int:
    return opened.pipeline.stages[stage].process.pid


def test_a_stage_on_another_node_gives_the_same_tokens_and_leaves_nothing(
    tiny: Tiny, driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> list[int]:
        async with two_stages(tiny("tiny-llama"), driving(), nodes["head"]) as (opened, _):
            assert compare(tiny("tiny-llama"), [WANTED], [await answer(opened, WANTED)]) == 1
            assert [stage.process.node for stage in opened.pipeline.stages] == ["head", "b"]
            return [pid_of(opened, stage) for stage in (0, 1)]

    assert not any(psutil.pid_exists(pid) for pid in asyncio.run(walk()))


def test_a_stage_killed_in_the_middle_of_an_answer_is_placed_again_and_the_answer_goes_on(
    tiny: Tiny, driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> None:
        async with two_stages(tiny("tiny-llama"), driving(), nodes["head"]) as (opened, _):
            stream = opened.submit(WANTED)
            found = [(await anext(stream)).id]
            before = [pid_of(opened, stage) for stage in (0, 1)]
            os.kill(before[1], signal.SIGKILL)
            found += [token.id async for token in stream]
            assert compare(tiny("tiny-llama"), [WANTED], [found]) == 1
            assert opened.recoveries == 1
            assert pid_of(opened, 0) == before[0] and pid_of(opened, 1) != before[1]

    asyncio.run(walk())


def test_a_frozen_stage_is_lost_and_really_gone_before_another_one_loads(
    tiny: Tiny, driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> None:
        async with two_stages(tiny("tiny-llama"), driving(), nodes["head"]) as (opened, _):
            stream = opened.submit(WANTED)
            found = [(await anext(stream)).id]
            frozen = pid_of(opened, 1)
            os.kill(frozen, signal.SIGSTOP)
            found += [token.id async for token in stream]
            assert compare(tiny("tiny-llama"), [WANTED], [found]) == 1
            assert opened.recoveries == 1 and not psutil.pid_exists(frozen)

    asyncio.run(walk())


def test_the_end_of_the_driver_disturbs_no_answer_and_the_next_call_starts_it_again(
    tiny: Tiny, driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> None:
        driver = driving()
        async with two_stages(tiny("tiny-llama"), driver, nodes["head"]) as (opened, _):
            stream = opened.submit(WANTED)
            found = [(await anext(stream)).id]
            first = driver.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await true_soon(lambda: not psutil.pid_exists(first))
            found += [token.id async for token in stream]
            assert compare(tiny("tiny-llama"), [WANTED], [found]) == 1
            assert opened.recoveries == 0 and driver.pid is None
            os.kill(pid_of(opened, 1), signal.SIGKILL)
            assert compare(tiny("tiny-llama"), [WANTED], [await answer(opened, WANTED)]) == 1
            assert driver.pid not in (None, first)

    asyncio.run(walk())


def test_a_stage_that_the_head_does_not_want_any_more_ends_even_without_a_driver(
    driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> None:
        async with closing(driving()) as driver:
            actor = await placing(driver, nodes["head"])(1, "b")
            await driver.close()
            await actor.end(0.0)
            await true_soon(lambda: not psutil.pid_exists(actor.pid))
            with pytest.raises(Closed):
                await driver.nodes()

    asyncio.run(walk())


def test_another_node_in_the_place_of_the_one_that_was_meant_is_not_spoken_to(
    driving: Driving, nodes: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs a Ray can label it as it likes."""
    monkeypatch.setattr(remote_actor, "CONNECT_WITHIN_S", 2.0)

    async def walk() -> None:
        async with closing(driving(node="c")) as driver:
            with pytest.raises(StageLost, match=r"stage 1 .* node b: .*it is node 'c', not 'b'"):
                await placing(driver, nodes["head"])(1, "b")

    asyncio.run(walk())


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("refuse", "no room"),
        ("abort", "ended by signal 6.*the last words"),
        ("nonsense", "answered nonsense"),
        ("shut", "cannot join Ray at 127.0.0.1:1: the token is wrong"),
    ],
)
def test_what_is_wrong_with_the_driver_is_one_sentence_of_the_call(
    word: str, why: str, driving: Driving, nodes: dict[str, Member]
) -> None:
    async def walk() -> None:
        async with closing(driving(word)) as driver:
            with pytest.raises(RayFailed, match=why):
                await driver.nodes()
            with pytest.raises(StageLost, match=f"stage 1 cannot be placed on node b: .*{why}"):
                await placing(driver, nodes["head"])(1, "b")

    asyncio.run(walk())


def test_a_driver_that_hangs_in_ray_is_ended_and_its_calls_with_it(
    driving: Driving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "BEYOND_S", 0.2)
    monkeypatch.setattr(ray_driver, "NODES_WITHIN_S", 0.1)

    async def walk() -> None:
        async with closing(driving("silence")) as driver:
            with pytest.raises(RayFailed, match="did not answer"):
                await driver.nodes()
            await true_soon(lambda: driver.pid is None)

    asyncio.run(walk())


def test_after_rays_end_calls_say_so(driving: Driving, tmp_path: Path) -> None:
    tmp_path.rmdir()

    async def walk() -> None:
        async with closing(driving()) as driver:
            with pytest.raises(RayFailed, match="Ray was stopped"):
                await driver.nodes()

    asyncio.run(walk())


def test_a_core_is_not_burnt_by_a_driver_whose_head_is_stopped(driving: Driving) -> None:
    """Ray's thread for errors asked a head that was gone, without a pause, until the next one stood."""

    async def walk() -> None:
        driver = driving()
        async with closing(driver):
            await driver.nodes()
            child = psutil.Process(driver.pid)

            async def start() -> RaySession:
                assert not child.is_running()
                asking.append(asyncio.create_task(driver.nodes()))
                await asyncio.sleep(0.2)
                assert driver.pid is None and not asking[0].done()
                return driver._session

            asking: list[asyncio.Task[tuple[RayNode, ...]]] = []
            await driver.follow(start)
            assert {one.node_id for one in await asking[0]} == {"b", "head"}
            assert driver.pid != child.pid

    asyncio.run(walk())


def test_many_calls_at_once_start_one_driver_and_get_their_own_answers(driving: Driving) -> None:
    async def walk() -> None:
        async with closing(driving()) as driver:
            both = (RayNode("b", HERE), RayNode("head", HERE))
            assert await asyncio.gather(*(driver.nodes() for _ in range(40))) == [both] * 40

    asyncio.run(walk())


def test_a_neighbours_link_is_refused_to_another_node_that_knows_the_secret(
    tiny: Tiny, driving: Driving, nodes: dict[str, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole wire, from Begin to the handshake: the first stage must be its node and no other."""
    monkeypatch.setattr("omlx.node.pipeline.JOIN_WITHIN_S", 1.0)

    class Renamed(RayPlacement):
        async def _place_here(self, index: int, address: str) -> object:
            actor = await super()._place_here(index, address)
            actor.node = "c"
            return actor

    async def walk() -> None:
        folder = tiny("tiny-llama")
        layout = on(HERE_AND_THERE, here(uneven(read_manifest(folder).num_layers, 2)))
        spec = PipelineSpec(folder, layout, load_timeout_s=30, step_timeout_s=1)
        async with closing(driving()) as driver:
            pipeline = Pipeline(spec, Renamed(driver, nodes["head"], lambda node: HERE))
            with pytest.raises(StageLost, match="did not connect"):
                await pipeline.open(Epoch(0), lambda done, total: None)

    asyncio.run(walk())
