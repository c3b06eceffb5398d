"""Whatever the pace, the texts are the same: groups, chunks, look-ahead and cancels drawn at random."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.node import engine as engine_module
from omlx.node.costs import StageCost
from omlx.node.engine import Engine
from omlx.node.pacing import Pace
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from tests.walk.engines import compare, engine, request

WITHIN_S = 60.0
PROMPTS = [[(31 * i + 7 * n) % 700 + 20 for i in range(n)] for n in (1, 2, 5, 23, 33, 61, 90, 140)]
MODELS = [("tiny-llama", 1), ("tiny-gemma3", 2), ("tiny-qwen3-next", 3)]

seconds = st.sampled_from([0.0, 1e-4, 1e-3, 1e-2])


@dataclass(frozen=True)
class Asked:
    """One request, and after how many of its tokens its client hangs up."""

    prompt: int
    max_tokens: int
    leaves_after: int | None


asked = st.builds(
    Asked,
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 12),
    st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


@dataclass
class Running:
    """An engine that stays open over the examples."""

    folder: Path
    runner: asyncio.Runner
    engine: Engine
    scheduler: Scheduler


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[1]}")
def running(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Running]:
    name, stages = request.param
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opened, scheduler = runner.run(stack.enter_async_context(engine(tiny(name), stages)))
        yield Running(tiny(name), runner, opened, scheduler)
        runner.run(stack.aclose())


async def ask(opened: Engine, one: Asked) -> tuple[Request, list[int]] | None:
    """The answer, or None where its client hung up."""
    wanted = request(PROMPTS[one.prompt], one.max_tokens)
    stream = opened.submit(wanted)
    tokens: list[int] = []
    if one.leaves_after is not None and one.leaves_after < one.max_tokens:
        for _ in range(one.leaves_after):
            tokens.append((await anext(stream)).id)
        await stream.aclose()
        return None
    return wanted, [token.id async for token in stream]


@dataclass(frozen=True)
class Ways:
    """How the stages are driven."""

    step_tokens: int
    slowdown: float
    costs: StageCost
    seed: int


ways = st.builds(
    Ways,
    st.integers(1, 80),
    st.sampled_from([1.1, 2.7, 50.0]),
    st.builds(StageCost, seconds, seconds, seconds, seconds, seconds, st.booleans()),
    st.integers(0, 2**16),
)


@hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(some=st.lists(asked, min_size=1, max_size=9), way=ways)
def test_texts_do_not_depend_on_the_pace(
    running: Running, monkeypatch: pytest.MonkeyPatch, some: list[Asked], way: Ways
) -> None:
    scheduler = running.scheduler
    dice = Random(way.seed)

    def pace() -> Pace:
        """Another one each time that stages report: regrouped in the middle of answers."""
        if dice.random() < 0.3:
            return Pace()
        return Pace((way.costs,) * scheduler.limits.stages, frozenset({dice.randint(1, 8)}))

    monkeypatch.setattr(running.engine.meters, "pace", pace)
    monkeypatch.setattr(engine_module, "look_ahead", lambda step_s, stages: dice.randint(1, 5))
    scheduler.limits = replace(scheduler.limits, step_tokens=way.step_tokens, slowdown=way.slowdown)
    scheduler.pace = pace()

    async def walk() -> None:
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.gather(*(ask(running.engine, one) for one in some))
        kept = [pair for pair in found if pair is not None]
        compare(running.folder, [wanted for wanted, _ in kept], [tokens for _, tokens in kept])
        scheduler.check()
        assert running.engine.recoveries == 0

    running.runner.run(walk())
