"""Stages go elsewhere, with the weights that they have: after a loss, or because it pays. Answers go on."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omlx.cluster.local_actor import LocalActor, place_local
from omlx.errors import NodesAway, PromptTooLong, RequestFailed
from omlx.node.client import StageProcess
from omlx.node.engine import Engine
from omlx.node.layout import Layout, Part
from omlx.node.sequence import Finish
from tests.walk.cached import until
from tests.walk.engines import GREEDY, Kept, answer, answers, compare, engine, request

Tiny = Callable[[str], Path]
LAYERS = 4
PROMPTS = [[(17 * i + 5 * n) % 700 + 20 for i in range(n)] for n in (3, 40, 150)]
WANTED = [request(prompt, max_tokens=60) for prompt in PROMPTS]
MOSTLY = 2
"""One of the three texts has a tie (walk/engines.py)."""
THREE = ("a", "b", "c")
ROOM = 2**20


def layout(*parts: tuple[str, int, int], capacity: int = ROOM) -> Layout:
    made = tuple(Part(start, end, 1 / 3, node) for node, start, end in parts)
    return Layout(made, capacity, (2**28,) * len(made))


def pids(opened: Engine) -> dict[str, int]:
    return {stage.seat: stage.process.pid for stage in opened.pipeline.stages}


def spans(opened: Engine) -> list[tuple[str, int, int | None]]:
    return [(part.node, part.start, part.end) for part in opened.pipeline.layout.parts]


async def few(opened: Engine) -> list[asyncio.Task[list[int]]]:
    """Answers under way."""
    before = opened.figures().drawn_tokens
    tasks = [asyncio.create_task(answer(opened, one)) for one in WANTED]
    await until(lambda: opened.figures().drawn_tokens > before + 30)
    return tasks


@pytest.mark.parametrize(("lost", "left"), [("a", "bc"), ("b", "ac"), ("c", "ab")])
def test_those_that_are_left_take_a_lost_nodes_layers_and_every_answer_goes_on(
    lost: str, left: str, tiny: Tiny
) -> None:
    folder = tiny("tiny-llama")
    seen: list[frozenset[str]] = []

    async def elsewhere(before: Layout, gone: frozenset[str]) -> Layout:
        seen.append(gone)
        return layout((left[0], 0, 1), (left[1], 1, LAYERS))

    async def walk() -> None:
        async with engine(folder, 3, nodes=THREE, relayout=elsewhere) as (opened, scheduler):
            before = pids(opened)
            tasks = await few(opened)
            os.kill(before[lost], signal.SIGKILL)
            assert compare(folder, WANTED, await asyncio.gather(*tasks)) >= MOSTLY
            assert seen == [frozenset(lost)] and opened.recoveries == 1
            assert pids(opened) == {node: before[node] for node in left}, "they keep what they have"
            assert spans(opened) == [(left[0], 0, 1), (left[1], 1, LAYERS)]
            assert compare(folder, WANTED, await answers(opened, WANTED)) >= MOSTLY
            scheduler.check()

    asyncio.run(walk())


@pytest.mark.parametrize(
    "to",
    [
        layout(("a", 0, 3), ("b", 3, LAYERS)),
        layout(("c", 0, 1), ("a", 1, 2), ("b", 2, LAYERS)),
        layout(("b", 0, LAYERS)),
        layout(("d", 0, 1), ("a", 1, LAYERS)),
    ],
    ids=["fewer", "another order", "one", "a new one"],
)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied", "tiny-qwen3-next"])
def test_a_move_is_a_pause_and_nothing_else(name: str, to: Layout, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny(name)
    before = layout(("a", 0, 1), ("b", 1, 3), ("c", 3, LAYERS))

    async def walk() -> None:
        kept = Kept(tmp_path / "cold")
        async with engine(folder, 3, nodes=THREE, kept=kept) as (opened, scheduler):
            for target in (to, before, to):
                tasks = await few(opened)
                opened.move(target)
                assert compare(folder, WANTED, await asyncio.gather(*tasks)) > 0
                assert opened.pipeline.layout == target
                assert len(opened.pipeline.stages) == len(target.parts)
                assert set(pids(opened)) == set(target.seats)
                scheduler.check()
            assert opened.recoveries == 0

    asyncio.run(walk())


def test_a_move_to_a_place_without_the_model_is_given_up_and_costs_no_answer(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = tiny("tiny-llama")
    wrong = layout(("a", 0, 1), ("d", 1, LAYERS))
    wrong = replace(wrong, parts=(wrong.parts[0], replace(wrong.parts[1], folder=tmp_path / "nothing")))

    async def walk() -> None:
        async with engine(folder, 3, nodes=THREE) as (opened, _):
            before = spans(opened)
            tasks = await few(opened)
            opened.move(wrong)
            assert compare(folder, WANTED, await asyncio.gather(*tasks)) >= MOSTLY
            assert spans(opened) == before and opened.failure is None

    asyncio.run(walk())


def test_where_less_memory_is_left_answers_end_with_it_and_say_so(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")
    fits, too_long = request(PROMPTS[1], 200), request(PROMPTS[2], 60)

    async def walk() -> None:
        async with engine(folder, 3, nodes=THREE) as (opened, scheduler):
            short, long = opened.submit(fits), opened.submit(too_long)
            first = [await anext(short), await anext(long)]
            opened.move(layout(("a", 0, 2), ("b", 2, LAYERS), capacity=100))
            tokens = [first[0], *[token async for token in short]]
            assert tokens[-1].finish is Finish.LENGTH and len(tokens) == 100 - len(PROMPTS[1])
            with pytest.raises(RequestFailed, match="memory for 100 tokens"):
                _ = [token async for token in long]
            with pytest.raises(PromptTooLong):
                opened.submit(too_long)
            assert len(await answer(opened, request(PROMPTS[0], 10))) == 10
            scheduler.check()

    asyncio.run(walk())


def test_where_the_rest_cannot_hold_the_model_requests_end_with_the_reason(tiny: Tiny) -> None:
    async def nowhere(before: Layout, gone: frozenset[str]) -> Layout:
        raise NodesAway("mac-b is away, and the other machines cannot hold the model")

    async def walk() -> None:
        async with engine(tiny("tiny-llama"), 3, nodes=THREE, relayout=nowhere) as (opened, _):
            stream = opened.submit(request(PROMPTS[0], 200, GREEDY))
            await anext(stream)
            os.kill(pids(opened)["b"], signal.SIGKILL)
            with pytest.raises(NodesAway, match="mac-b is away"):
                _ = [token async for token in stream]
            assert opened.health().state == "failed"
            await until(lambda: not opened.pipeline.stages)
            with pytest.raises(NodesAway):
                opened.submit(request(PROMPTS[0]))

    asyncio.run(walk())


def test_a_second_node_that_is_lost_while_the_first_is_made_good_is_made_good_too(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")

    async def walk() -> None:
        async with engine(folder, 3, nodes=THREE) as (opened, _):
            before = pids(opened)

            async def elsewhere(layout_before: Layout, gone: frozenset[str]) -> Layout:
                if gone == {"b"}:
                    loop = asyncio.get_running_loop()
                    loop.call_later(0.02, os.kill, before["c"], signal.SIGKILL)  # while it loads
                    return layout(("a", 0, 2), ("c", 2, LAYERS))
                return layout(("a", 0, LAYERS))

            opened._relayout = elsewhere
            tasks = await few(opened)
            os.kill(before["b"], signal.SIGKILL)
            assert compare(folder, WANTED, await asyncio.gather(*tasks)) >= MOSTLY
            assert spans(opened) == [("a", 0, LAYERS)]

    asyncio.run(walk())


def test_a_host_that_is_off_cannot_say_that_its_stage_is_gone_and_is_not_waited_for(tiny: Tiny) -> None:
    """Twenty answers stood still a second longer, for a node that had no part in them any more."""
    folder, said = tiny("tiny-llama"), asyncio.Event()

    class Off(LocalActor):
        async def end(self, within_s: float) -> None:
            await said.wait()
            await super().end(within_s)

    async def place(index: int, node: str) -> StageProcess:
        placed = await place_local(index, node)
        if node != "c":
            return placed
        return Off(placed.reader, placed.writer, placed.process, placed.host, placed.node)

    async def elsewhere(before: Layout, gone: frozenset[str]) -> Layout:
        return layout(("a", 0, 1), ("b", 1, LAYERS))

    async def walk() -> None:
        async with engine(folder, 3, nodes=THREE, place=place, relayout=elsewhere) as (opened, _):
            tasks = await few(opened)
            os.kill(pids(opened)["c"], signal.SIGKILL)
            try:
                async with asyncio.timeout(60):
                    assert compare(folder, WANTED, await asyncio.gather(*tasks)) >= MOSTLY
                back = layout(("a", 0, 1), ("b", 1, 2), ("c", 2, LAYERS))
                opened.move(back)
                await asyncio.sleep(0.3)
                assert opened.recovering, "what is there of it may have the memory that is needed"
            finally:
                said.set()
            await until(lambda: opened.pipeline.layout == back and not opened.recovering)
            assert compare(folder, WANTED, await answers(opened, WANTED)) >= MOSTLY

    asyncio.run(walk())


def test_how_far_a_stage_is_away_is_known_without_any_work(tiny: Tiny) -> None:
    async def walk() -> None:
        async with engine(tiny("tiny-llama"), 3, nodes=THREE) as (opened, _):
            await until(lambda: all(stage.round_trip_s is not None for stage in opened.pipeline.stages))
            assert all(0 < (stage.round_trip_s or 0) < 1 for stage in opened.pipeline.stages)

    asyncio.run(walk())


def test_what_a_link_carries_is_asked_of_a_living_stage_and_its_distance_stays_the_one_of_an_empty_ping(
    tiny: Tiny,
) -> None:
    heavy = 64 << 20

    async def walk() -> None:
        async with engine(tiny("tiny-llama"), 2, nodes=("a", "b")) as (opened, _):
            first, second = opened.pipeline.stages
            await until(lambda: second.round_trip_s is not None)
            carried = await second.carries(heavy, 10.0)
            assert carried is not None and carried > 10e6
            assert second.round_trip_s is not None and second.round_trip_s < heavy / carried
            assert await first.carries(heavy, 1e-4) is None  # that is too late, and nobody is lost by it
            assert await first.alive() and await second.alive()

    asyncio.run(walk())


def test_what_a_move_would_cost_counts_chats_that_go_on_and_requests_that_run_once(tiny: Tiny) -> None:
    """Layers moved away from under a chat of 100,000 tokens because nothing was running at that moment."""
    prompt = PROMPTS[-1]

    async def walk() -> None:
        async with engine(tiny("tiny-llama"), kept=Kept()) as (opened, _):
            assert opened.tokens_at_stake == 0
            answering = asyncio.create_task(answer(opened, request(prompt, max_tokens=60)))
            await until(lambda: opened.figures().drawn_tokens > 30)
            # Blocks on their way into RAM are in neither.
            assert len(prompt) <= opened.tokens_at_stake <= len(prompt) + 60
            await answering
            await until(lambda: opened.tokens_at_stake >= len(prompt) + 32)
            assert opened.tokens_at_stake <= len(prompt) + 60
            await answer(opened, request(prompt, max_tokens=2))
            assert opened.tokens_at_stake <= len(prompt) + 60, "it is the same chat"

    asyncio.run(walk())
