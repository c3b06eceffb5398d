"""Stages die; answers do not. Real processes, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from omlx.cluster.local_actor import place_local
from omlx.errors import ModelFailed, RequestFailed
from omlx.node.engine import Engine
from omlx.node.sequence import Request
from omlx.node.step import SamplingParams
from tests.walk.engines import LIMITS, answer, answers, compare, engine, request

Tiny = Callable[[str], Path]
PROMPTS = [[(17 * i + 5 * n) % 700 + 20 for i in range(n)] for n in (3, 40, 150)]


def kill(opened: Engine, stage: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(opened.pipeline.stages[stage].process.pid, how)


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Another process's doing gives no event to wait for."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < within_s
        await asyncio.sleep(0.005)


@asynccontextmanager
async def noticed(opened: Engine, within_s: float) -> AsyncIterator[None]:
    """What the block does to a stage is noticed within that time."""
    before = opened.recoveries
    yield
    await until(lambda: opened.recovering or opened.recoveries > before, within_s)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_stage_is_noticed_and_every_answer_goes_on_to_the_same_tokens(
    stage: int, tiny: Tiny
) -> None:
    folder = tiny("tiny-llama")
    wanted = [request(prompt, max_tokens=60) for prompt in PROMPTS]
    warm = request(PROMPTS[1], 60, SamplingParams(temperature=0.8, presence_penalty=0.4, seed=11))

    async def walk() -> None:
        async with engine(folder, 3) as (opened, scheduler):
            undisturbed = await answer(opened, warm)
            streams = [opened.submit(one) for one in [*wanted, warm]]
            found = [[(await anext(stream)).id] for stream in streams]
            async with noticed(opened, within_s=1.0):
                kill(opened, stage)
            for tokens, stream in zip(found, streams, strict=True):
                tokens += [token.id async for token in stream]
            assert compare(folder, wanted, found[:3]) >= 2
            assert found[3] == undisturbed
            assert opened.recoveries == 1
            assert compare(folder, wanted, await answers(opened, wanted)) >= 2
            scheduler.check()

    asyncio.run(walk())


def test_a_stage_killed_while_a_prompt_is_computed_and_one_killed_while_idle(tiny: Tiny) -> None:
    folder = tiny("tiny-qwen3-next")
    wanted = request([(3 * i) % 700 + 20 for i in range(1500)], max_tokens=5)

    async def walk() -> None:
        async with engine(folder, 2) as (opened, scheduler):
            stream = opened.submit(wanted)
            await until(lambda: bool(scheduler.in_flight))
            kill(opened, 0)
            compare(folder, [wanted], [[token.id async for token in stream]])
            async with noticed(opened, within_s=1.0):
                kill(opened, 1)
            compare(folder, [wanted], [await answer(opened, wanted)])
            assert opened.recoveries == 2

    asyncio.run(walk())


def test_requests_after_one_that_came_while_a_stage_was_started_again_are_answered_too(tiny: Tiny) -> None:
    """A wake-up was thrown away with the events of the epoch that was over: everybody waited for ever."""
    folder = tiny("tiny-llama")

    async def walk() -> None:
        async with engine(folder, 2) as (opened, scheduler), asyncio.timeout(30):
            kill(opened, 1)
            await until(lambda: opened.recovering)
            assert len(await answer(opened, request(PROMPTS[0], max_tokens=4))) == 4
            assert opened.recoveries == 1
            for _ in range(3):
                await until(lambda: not scheduler.in_flight)
                assert len(await answer(opened, request(PROMPTS[0], max_tokens=4))) == 4

    asyncio.run(walk())


def test_a_stage_deep_in_a_long_step_is_waited_for_and_not_started_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with a prompt of 4,800 words in one step: the stage behind gave up on the one before, and
    then the head gave up on the one that was still at work."""
    monkeypatch.setattr("omlx.node.pipeline.JOIN_WITHIN_S", 0.2)
    folder = tiny("tiny-llama")
    wanted = request([(3 * i) % 700 + 20 for i in range(3500)], max_tokens=3)

    async def walk() -> None:
        async with engine(folder, 2, replace(LIMITS, step_tokens=8000)) as (opened, scheduler):
            pids = [stage.process.pid for stage in opened.pipeline.stages]
            started = time.monotonic()
            undisturbed = await answer(opened, wanted)
            assert time.monotonic() - started > 0.25, "the step must be longer than the time to join"
            assert opened.recoveries == 0
            stream = opened.submit(wanted)
            await until(lambda: bool(scheduler.in_flight))
            await asyncio.sleep(0.2)  # into the first stage's forward
            kill(opened, 1)
            assert [token.id async for token in stream] == undisturbed
            assert opened.recoveries == 1
            assert opened.pipeline.stages[0].process.pid == pids[0]

    asyncio.run(walk())


def test_a_frozen_stage_is_told_from_a_busy_one_within_a_few_seconds(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")
    wanted = [request(prompt, max_tokens=40) for prompt in PROMPTS]

    async def walk() -> None:
        async with engine(folder, 2) as (opened, _):
            streams = [opened.submit(one) for one in wanted]
            await anext(streams[0])
            async with noticed(opened, within_s=5.0):
                kill(opened, 1, signal.SIGSTOP)
            found = [[token.id async for token in stream] for stream in streams]
            assert compare(folder, wanted[1:], found[1:]) >= 1

    asyncio.run(walk())


def test_after_three_deaths_within_a_minute_the_model_fails_with_one_clear_error(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")

    async def walk() -> None:
        async with engine(folder, 1) as (opened, _):
            stream = opened.submit(request(PROMPTS[0], max_tokens=100_000))
            for deaths in range(3):
                await anext(stream)
                kill(opened, 0)
                if deaths < 2:
                    await until(lambda deaths=deaths: opened.recoveries > deaths)
            with pytest.raises(ModelFailed, match="3 times"):
                async for _ in stream:
                    pass
            with pytest.raises(ModelFailed):
                opened.submit(request(PROMPTS[0]))
            assert opened.health().state == "failed"
            await until(lambda: not children())

    asyncio.run(walk())


POISON = 666
POISONED = textwrap.dedent(
    f"""
    import mlx.core as mx
    from omlx.node.process import main, start_light
    start_light()
    from omlx.node.slicing import Cut

    whole = Cut.__call__

    def call(cut, x, caches):
        if cut.first and (x == {POISON}).any().item():
            raise ValueError("a shape that does not fit")
        return whole(cut, x, caches)

    Cut.__call__ = call
    main()
    """
)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_that_the_model_cannot_compute_fails_alone(stages: int, tiny: Tiny) -> None:
    """BAT-05: in its prompt or in its answer, however often it is sent."""
    folder = tiny("tiny-llama")
    healthy = [request(prompt, max_tokens=30) for prompt in PROMPTS]
    in_prompt = request([5, 6, POISON, 7, 8], max_tokens=30)
    in_answer = request(PROMPTS[0], 30, SamplingParams(temperature=0, logit_bias=((POISON, 100.0),)))

    async def refused(opened: Engine, wanted: Request) -> None:
        with pytest.raises(RequestFailed):
            await answer(opened, wanted)

    async def walk() -> None:
        place = partial(place_local, command=(sys.executable, "-c", POISONED))
        async with engine(folder, stages, place=place) as (opened, scheduler):
            alone = [await answer(opened, one) for one in healthy]
            for _ in range(4):
                answering = asyncio.gather(*(answer(opened, one) for one in healthy[1:]))
                await refused(opened, in_prompt)
                assert await answering == alone[1:]
            await refused(opened, in_answer)
            assert await answers(opened, healthy) == alone
            assert opened.health().state == "ready"
            scheduler.check()

    asyncio.run(walk())


@pytest.mark.parametrize("stages", [1, 2])
def test_an_answer_that_cannot_be_computed_fails_alone_among_answers_of_the_same_forward(
    stages: int, tiny: Tiny
) -> None:
    """What MLX raises names a forward, not a row: each of its sequences is tried alone."""
    folder = tiny("tiny-llama")
    healthy = [request(prompt, max_tokens=40) for prompt in PROMPTS]
    guilty = request(PROMPTS[0], 40, SamplingParams(temperature=0, logit_bias=((POISON, 100.0),)))

    async def walk() -> None:
        place = partial(place_local, command=(sys.executable, "-c", POISONED))
        async with engine(folder, stages, place=place) as (opened, scheduler):
            alone = [await answer(opened, one) for one in healthy]
            answering = asyncio.gather(*(answer(opened, one) for one in healthy))
            with pytest.raises(RequestFailed):
                await answer(opened, guilty)
            assert await answering == alone
            assert opened.health().state == "ready"
            scheduler.check()

    asyncio.run(walk())


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


HEAD = textwrap.dedent(
    """
    import asyncio, signal, sys
    from pathlib import Path
    from tests.walk.engines import engine, request

    # Whoever was started in the background by a shell ignores it, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def walk():
        async with engine(Path(sys.argv[1]), 2) as (opened, _):
            stream = opened.submit(request([5, 6, 7], max_tokens=100_000))
            await anext(stream)
            print(*(stage.process.pid for stage in opened.pipeline.stages), flush=True)
            async for _ in stream:
                pass

    asyncio.run(walk())
    """
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_head_that_goes_in_any_way_leaves_no_stage_behind(how: signal.Signals, tiny: Tiny) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HEAD, str(tiny("tiny-llama"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as head:
        assert head.stdout is not None
        stages = [psutil.Process(int(pid)) for pid in head.stdout.readline().split()]
        assert len(stages) == 2
        head.send_signal(how)
        try:
            head.wait(timeout=20)
        finally:
            head.kill()
        _, alive = psutil.wait_procs(stages, timeout=5)
        assert not alive
