"""What the benches measure: the server's own pipelines and engines, without HTTP and text around them."""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from omlx.cache.identity import model_root
from omlx.cluster.keeping import PLAIN
from omlx.cluster.local_actor import STAGE, place_local
from omlx.cluster.planner import NodeBudget, ShardPlan, plan_work
from omlx.demo.cache import build_whole, default_cache
from omlx.demo.models import build
from omlx.ids import ModelId
from omlx.node.client import Placement, StageProcess
from omlx.node.engine import Engine
from omlx.node.hold import Hold
from omlx.node.layout import here
from omlx.node.limits import Limits
from omlx.node.manifest import read_manifest
from omlx.node.pipeline import Pipeline, PipelineSpec
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.step import SamplingParams
from omlx.node.timeline import Timeline
from omlx.node.wire import CacheSpec
from omlx.settings import Settings
from tests.models.tiny import TINY, build_tiny, recipe

WITHIN_S = 120.0
"""For a load and for a step; reached only where something hangs."""
CONTEXT_TOKENS = 2048
ROOMY = 2**40
"""A budget in bytes that decides nothing."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """An empty one until the block ends, where caches are: the system's folder for such may lie in RAM."""
    default_cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=default_cache()) as folder:
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class Kept:
    """What an engine keeps of computed prefixes, in the server's default blocks."""

    cold: Path
    """A folder on the SSD."""
    hot_bytes: int = 2**30
    """Of each stage's RAM."""

    def spec(self, folder: Path) -> CacheSpec:
        block_tokens = Settings.model_fields["cache_block_tokens"].default
        return CacheSpec(
            model_root(folder, None, PLAIN, block_tokens), block_tokens, str(self.cold), floor_bytes=0
        )

    def hold(self, stages: int) -> Hold:
        defaults = Settings.model_fields
        return Hold(
            hot_bytes=(self.hot_bytes,) * stages,
            cold=True,
            block_tokens=defaults["cache_block_tokens"].default,
            snapshot_tokens=defaults["cache_snapshot_tokens"].default,
        )


def model_folder(name: str) -> Path:
    """A tiny or a demonstration model, built on first use."""
    cache = default_cache()
    if name in TINY:

        def make(beside: Path) -> None:
            build_tiny(name, beside)

        return build_whole(cache / "tests" / name, recipe(), make)
    return build(name, cache)


def shards(folder: Path, stages: int) -> ShardPlan:
    """The layers over `stages` equal budgets, as the coordinator cuts them."""
    nodes = [NodeBudget(f"stage {i}", ROOMY) for i in range(stages)]
    return plan_work(read_manifest(folder), nodes, context_tokens=CONTEXT_TOKENS, sequences=1)


async def place_on_a_core(index: int, node: str) -> StageProcess:
    """Stage i has core i to itself, its threads and all, so that one core is compared with two."""
    core = sorted(os.sched_getaffinity(0))[index]
    return await place_local(index, node, ("taskset", "--cpu-list", str(core), *STAGE))


def new_pipeline(
    folder: Path, stages: int, place: Placement = place_local, kept: Kept | None = None
) -> Pipeline:
    """Not yet opened; its stages are child processes."""
    spans: list[tuple[int, int | None]] = [(span.start, span.end) for span in shards(folder, stages).spans]
    spec = PipelineSpec(
        folder,
        here([(0, None)] if stages == 1 else spans),
        load_timeout_s=WITHIN_S,
        step_timeout_s=WITHIN_S,
        cache=kept.spec(folder) if kept is not None else None,
    )
    return Pipeline(spec, place)


@asynccontextmanager
async def running_engine(
    folder: Path,
    stages: int,
    place: Placement = place_local,
    *,
    places: int | None = None,
    timeline: Timeline | None = None,
    kept: Kept | None = None,
) -> AsyncIterator[Engine]:
    """An engine with the server's default limits; `places`: sequences that run at once. Without `kept`
    nothing is kept."""
    defaults = Settings.model_fields
    limits = Limits(
        places=places or defaults["max_concurrent_requests"].default,
        queue=defaults["max_queued_requests"].default,
        stages=stages,
        step_tokens=defaults["step_tokens"].default,
        slowdown=defaults["slowdown"].default,
        capacity_tokens=10**6,
    )
    pipeline = new_pipeline(folder, stages, place, kept)
    hold = kept.hold(stages) if kept is not None else None
    engine = Engine(ModelId(folder.name), Scheduler(limits), pipeline, timeline, hold)
    await engine.open(lambda done, total: None)
    try:
        yield engine
    finally:
        await engine.close()


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    """The same token ids in every run."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(10, vocabulary) for _ in range(tokens)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, when they were asked for, and when each of them came; on time.perf_counter."""

    tokens: tuple[int, ...]
    asked: float
    times: tuple[float, ...]

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.first - self.asked

    @property
    def token_s(self) -> float:
        """Seconds a token, after the first."""
        return (self.last - self.first) / (len(self.tokens) - 1)


async def answer(engine: Engine, prompt: Iterable[int], max_tokens: int) -> Answer:
    """Exactly `max_tokens` greedy tokens: no stop token ends it."""
    request = Request(tuple(prompt), SamplingParams(temperature=0), max_tokens, frozenset())
    tokens: list[int] = []
    times: list[float] = []
    asked = time.perf_counter()
    async for token in engine.submit(request):
        times.append(time.perf_counter())
        tokens.append(token.id)
    return Answer(tuple(tokens), asked, tuple(times))


async def together(engine: Engine, asked: list[tuple[int, ...]], max_tokens: int) -> float:
    """Tokens/s from the moment when all of them decode to the first one's end."""
    answers = await asyncio.gather(*(answer(engine, prompt, max_tokens) for prompt in asked))
    begin, end = max(one.first for one in answers), min(one.last for one in answers)
    if end <= begin:
        raise SystemExit("bench: the answers did not run side by side; ask for longer ones")
    inside = sum(begin < at <= end for one in answers for at in one.times)
    return inside / (end - begin)
