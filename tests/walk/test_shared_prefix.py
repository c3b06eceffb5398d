"""Several requests that begin alike, at once: the common part is computed once, by the first of them."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.node.engine import Engine
from tests.walk.cached import until
from tests.walk.engines import Kept, engine, request

Tiny = Callable[[str], Path]
COMMON, OWN = 1500, 50


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(3)
    common = [draw.randrange(10, 200) for _ in range(COMMON)]
    return [[*common, *(draw.randrange(10, 200) for _ in range(OWN))] for _ in range(count)]


async def answer(opened: Engine, prompt: list[int]) -> tuple[list[int], int]:
    stream = opened.submit(request(prompt, max_tokens=12))
    return [token.id async for token in stream], stream.cached_tokens


@pytest.mark.parametrize(("model", "stages"), [("tiny-llama", 1), ("tiny-llama", 2), ("tiny-qwen3-next", 1)])
def test_a_burst_with_one_system_prompt_computes_it_once(model: str, stages: int, tiny: Tiny) -> None:
    asked = prompts(4)

    async def walk() -> None:
        async with engine(tiny(model), stages) as (opened, _):
            expected = [(await answer(opened, prompt))[0] for prompt in asked]
        async with engine(tiny(model), stages, kept=Kept()) as (opened, scheduler):
            found = await asyncio.gather(*(answer(opened, prompt) for prompt in asked))
            assert [tokens for tokens, _ in found] == expected
            assert found[0][1] == 0
            assert all(cached >= COMMON - 64 for _, cached in found[1:])
            assert scheduler.prefixes.counters.missed_tokens <= COMMON + 4 * (OWN + 64)
            scheduler.prefixes.index.check()

    asyncio.run(walk())


def test_a_burst_goes_on_when_its_first_request_is_cancelled(tiny: Tiny) -> None:
    asked = prompts(3)

    async def walk() -> None:
        async with engine(tiny("tiny-llama"), kept=Kept()) as (opened, scheduler):
            first = opened.submit(request(asked[0], max_tokens=4))
            known = scheduler.waiting[-1]
            others = [asyncio.create_task(answer(opened, prompt)) for prompt in asked[1:]]
            await until(lambda: sum(one.follows is not None for one in scheduler.running.values()) == 2)
            assert known.computed < COMMON
            await first.aclose()
            async with asyncio.timeout(60):
                found = await asyncio.gather(*others)
        async with engine(tiny("tiny-llama")) as (opened, _):
            assert [tokens for tokens, _ in found] == [(await answer(opened, p))[0] for p in asked[1:]]

    asyncio.run(walk())
