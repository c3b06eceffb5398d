"""Whatever is kept, evicted, read back and given up at random: the texts are those without a cache."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.node import prefixes as prefixes_module
from omlx.node.engine import Engine
from omlx.node.scheduler import Scheduler
from tests.walk.cached import check, greedy
from tests.walk.engines import Kept, engine, request

WITHIN_S = 60.0
MODELS = [("tiny-llama", 2), ("tiny-gemma3", 1), ("tiny-qwen3-next", 3)]
SEQUENCES = 16
BLOCK = 16
BRANCHES = 2
"""At each fork of the tree of prompts."""
ROOM = 10**9


@dataclass(frozen=True)
class Asked:
    """A way through the tree and how much of it; how many tokens; when its client hangs up."""

    way: tuple[int, ...]
    length: int
    max_tokens: int
    waits: int
    """Moments before it is asked."""
    leaves: tuple[str, int] | None
    """After so many tokens, or after so many moments, whatever there is by then."""


@dataclass(frozen=True)
class Ways:
    """How much is kept, and how it is handled."""

    hot_blocks: int
    step_tokens: int
    idle_s: float
    restored_tokens: int


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    way = tuple(draw(st.lists(st.integers(0, BRANCHES - 1), min_size=1, max_size=5)))
    length = draw(st.integers(1, 24 * len(way)))
    leaves = st.one_of(
        st.none(),
        st.none(),
        st.tuples(st.just("tokens"), st.integers(1, 8)),
        st.tuples(st.just("moments"), st.integers(0, 200)),
    )
    return Asked(way, length, draw(st.integers(1, 12)), draw(st.integers(0, 100)), draw(leaves))


ways = st.builds(
    Ways,
    st.integers(0, 12),
    st.sampled_from([5, 16, 40, 256]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([BLOCK, 3 * BLOCK, 4096]),
)


def prompt_of(one: Asked) -> tuple[int, ...]:
    """Forks every 24 tokens, so that they lie beside blocks' borders and within blocks."""
    tokens: list[int] = []
    node = 0
    for branch in one.way:
        node = node * BRANCHES + branch + 1
        tokens += [(node * 37 + 11 * place) % 700 + 20 for place in range(24)]
    return tuple(tokens[: one.length])


@dataclass
class Running:
    """An engine that stays open over the examples, with all that it has kept."""

    folder: Path
    runner: asyncio.Runner
    engine: Engine
    scheduler: Scheduler


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[1]}")
def running(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    name, stages = request.param
    kept = Kept(tmp_path_factory.mktemp("blocks"), block_tokens=BLOCK, snapshot_tokens=2 * BLOCK)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opened, scheduler = runner.run(stack.enter_async_context(engine(tiny(name), stages, kept=kept)))
        yield Running(tiny(name), runner, opened, scheduler)
        runner.run(stack.aclose())


async def ask(running: Running, one: Asked) -> None:
    """Its answer is right as far as its client stays."""
    for _ in range(one.waits):
        await asyncio.sleep(0)
    prompt = prompt_of(one)
    stream = running.engine.submit(request(prompt, one.max_tokens))
    check(running.scheduler)
    tokens: list[int] = []
    match one.leaves:
        case ("moments", count):
            for _ in range(count):
                await asyncio.sleep(0)
            await stream.aclose()
        case ("tokens", count) if count < one.max_tokens:
            for _ in range(count):
                tokens.append((await anext(stream)).id)
            await stream.aclose()
        case _:
            async for token in stream:
                tokens.append(token.id)
                check(running.scheduler)
            assert len(tokens) == one.max_tokens
    check(running.scheduler)
    if tokens:
        greedy(running.folder, prompt, tokens)


async def quiet(running: Running) -> None:
    """All is over, and nothing is pinned any more."""
    scheduler, prefixes = running.scheduler, running.scheduler.prefixes
    while scheduler.in_flight or prefixes.index.counts().pinned or prefixes.busy:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    check(scheduler)


def block_bytes(scheduler: Scheduler) -> list[int]:
    counts = scheduler.prefixes.index.counts()
    return [size // max(1, blocks) for size, blocks in zip(counts.hot_bytes, counts.hot_blocks, strict=True)]


@pytest.mark.slow
@hypothesis_settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(some=st.lists(asked(), min_size=SEQUENCES, max_size=SEQUENCES), way=ways)
def test_texts_do_not_depend_on_what_is_kept(
    running: Running, monkeypatch: pytest.MonkeyPatch, some: list[Asked], way: Ways
) -> None:
    scheduler, prefixes = running.scheduler, running.scheduler.prefixes
    monkeypatch.setattr(prefixes_module, "IDLE_S", way.idle_s)
    monkeypatch.setattr(prefixes_module, "RESTORED_TOKENS", way.restored_tokens)
    scheduler.limits = replace(scheduler.limits, step_tokens=way.step_tokens)
    hot = tuple(way.hot_blocks * size or ROOM for size in block_bytes(scheduler))
    prefixes.hold = replace(prefixes.hold, hot_bytes=hot)

    async def walk() -> None:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(ask(running, one) for one in some))
            await quiet(running)
        assert running.engine.recoveries == 0
        assert running.engine.failure is None
        assert prefixes.counters.given_up_fetches == 0

    running.runner.run(walk())
