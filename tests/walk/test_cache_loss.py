"""Clients hang up and stages die: what is kept by then is right, and is used."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from omlx.node.engine import Engine
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Sequence as Known
from omlx.node.stream import Stream
from tests.walk.cached import (
    BLOCK,
    FEW,
    KINDS,
    STRIDE,
    Folder,
    ask_right,
    check,
    greedy,
    quiet,
    until,
    words,
)
from tests.walk.engines import LIMITS, Kept, engine, request


@dataclass(frozen=True)
class Hangs:
    """When a client hangs up."""

    when: str
    now: Callable[[Known], bool]


def drawn(count: int) -> Callable[[Known], bool]:
    return lambda known: len(known.answer) >= count


HANGS = (
    Hangs("in mid chunk", lambda known: 0 < known.issued < len(known.request.prompt) - 1),
    Hangs("right after its prompt", lambda known: known.computed >= len(known.request.prompt) - 1),
    Hangs("after a token", drawn(1)),
    Hangs("in mid answer", drawn(7)),
)


async def hang_up(opened: Engine, scheduler: Scheduler, prompt: Sequence[int], hangs: Hangs) -> Stream:
    stream = opened.submit(request(prompt, 60))
    mine = scheduler.waiting[-1]
    await until(lambda: hangs.now(mine))
    assert mine.id in scheduler.running
    await stream.aclose()
    check(scheduler)
    return stream


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stages"), [*((kind, 1) for kind in KINDS), *((kind, 2) for kind in FEW)])
def test_what_a_cancelled_request_leaves_behind_is_as_long_as_it_says(
    kind: str, stages: int, folder: Folder
) -> None:
    """KV-05: cancelled at any moment, another one being answered; then the prompt goes on."""
    model = folder(kind)
    found: dict[str, int] = {}

    async def walk() -> None:
        limits = replace(LIMITS, step_tokens=12)
        kept = Kept(block_tokens=16, snapshot_tokens=32)
        async with engine(model, stages, limits, kept=kept) as (opened, scheduler):
            other = opened.submit(request(words(50, 20), 100_000))
            await anext(other)
            for hangs in HANGS:
                for length in (17, 90):
                    prompt = words(100 * length + HANGS.index(hangs), length)
                    await hang_up(opened, scheduler, prompt, hangs)
                    await ask_right(opened, model, [*prompt, 7], 8)
                    own = [token.id async for token in opened.submit(request(prompt, 20))]
                    greedy(model, prompt, own)
                    for more in ([*own[:1], 5], [5], [*own, 5, 6]):
                        answer = await ask_right(opened, model, [*prompt, *more], 8)
                        found[hangs.when] = max(found.get(hangs.when, 0), answer.cached_tokens)
                        check(scheduler)
            await other.aclose()
            assert opened.recoveries == 0
            await quiet(scheduler)

    asyncio.run(walk())
    assert all(found.values()), found


@pytest.mark.parametrize(("kind", "stages"), [("tiny-llama", 2), ("tiny-gemma3", 1), ("tiny-qwen3-next", 2)])
def test_a_client_that_gives_up_on_a_long_prompt_gets_further_with_each_try(
    kind: str, stages: int, folder: Folder
) -> None:
    """KV-06: a try computes a third of the prompt at most."""
    model = folder(kind)
    prompt = words(4, 1000)
    reached = [0]

    async def walk() -> None:
        limits = replace(LIMITS, step_tokens=16)
        async with engine(model, stages, limits, kept=Kept()) as (opened, scheduler):
            for _ in range(3):
                enough = Hangs("", lambda known: known.computed >= known.restore_end + 310)
                stream = await hang_up(opened, scheduler, prompt, enough)
                reached.append(stream.cached_tokens)
                await quiet(scheduler)
            answer = await ask_right(opened, model, prompt)
            reached.append(answer.cached_tokens)
            assert opened.recoveries == 0

    asyncio.run(walk())
    first, *tries = reached[1:]
    assert first == 0
    assert all(later >= before + 310 - STRIDE for before, later in pairwise([0, *tries])), tries


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", FEW)
def test_after_a_stage_was_killed_answers_go_on_from_what_its_ssd_and_the_others_have(
    kind: str, stage: int, folder: Folder, tmp_path: Path
) -> None:
    model = folder(kind)
    wanted = [request(words(seed, 150), 60) for seed in (10, 11, 12)]

    async def walk() -> None:
        async with engine(model, 2, kept=Kept(tmp_path)) as (opened, scheduler), asyncio.timeout(60):
            for one in wanted:
                await ask_right(opened, model, one.prompt, 2)
            await quiet(scheduler)
            streams = [opened.submit(one) for one in wanted]
            found = [[(await anext(stream)).id for _ in range(5)] for stream in streams]
            before = scheduler.prefixes.counters.restored_blocks
            os.kill(opened.pipeline.stages[stage].process.pid, signal.SIGKILL)
            for tokens, stream in zip(found, streams, strict=True):
                tokens += [token.id async for token in stream]
            for one, tokens in zip(wanted, found, strict=True):
                greedy(model, one.prompt, tokens)
            assert opened.recoveries == 1
            assert scheduler.prefixes.counters.restored_blocks >= before + len(wanted) * 128 // BLOCK
            assert scheduler.prefixes.counters.fetched_blocks > 0
            check(scheduler)
            for one in wanted:
                assert (await ask_right(opened, model, one.prompt)).cached_tokens >= 128
            await quiet(scheduler)

    asyncio.run(walk())


@pytest.mark.parametrize("kind", FEW)
def test_a_stage_that_is_killed_before_anything_is_written_costs_no_token(kind: str, folder: Folder) -> None:
    """There is no SSD: what one stage lost, the others have for nothing."""
    model = folder(kind)
    wanted = [request(words(seed, 150), 60) for seed in (10, 11, 12)]

    async def walk() -> None:
        async with engine(model, 2, kept=Kept()) as (opened, scheduler), asyncio.timeout(60):
            for stage in (1, 0):
                streams = [opened.submit(one) for one in wanted]
                found = [[(await anext(stream)).id for _ in range(5)] for stream in streams]
                os.kill(opened.pipeline.stages[stage].process.pid, signal.SIGKILL)
                for tokens, stream in zip(found, streams, strict=True):
                    tokens += [token.id async for token in stream]
                for one, tokens in zip(wanted, found, strict=True):
                    greedy(model, one.prompt, tokens)
                check(scheduler)
            assert opened.recoveries == 2
            for one in wanted:
                assert (await ask_right(opened, model, one.prompt)).cached_tokens >= 128
            await quiet(scheduler)

    asyncio.run(walk())


@pytest.mark.parametrize("kind", FEW)
def test_what_a_killed_stage_could_not_lay_back_is_not_counted_as_cached(kind: str, folder: Folder) -> None:
    """The blocks of a plan that was lost with its epoch are computed again, and said so."""
    model, prompt = folder(kind), words(6, 150)

    async def walk() -> None:
        async with engine(model, 2, kept=Kept()) as (opened, scheduler), asyncio.timeout(60):
            await ask_right(opened, model, prompt)
            await quiet(scheduler)
            os.kill(opened.pipeline.stages[1].process.pid, signal.SIGKILL)
            answer = await ask_right(opened, model, prompt)
            assert opened.recoveries == 1
            assert scheduler.prefixes.counters.restored_blocks > 0
            assert answer.cached_tokens == 0
            await quiet(scheduler)

    asyncio.run(walk())
