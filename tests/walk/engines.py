"""Real engines for the walk: real stage processes, real sockets, and what to compare them with."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from omlx.cache.identity import model_root
from omlx.cluster.keeping import kv_format
from omlx.cluster.local_actor import free_ring, place_local
from omlx.ids import ModelId
from omlx.node.client import Placement
from omlx.node.engine import Engine, Relayout, as_before
from omlx.node.layout import Layout, here
from omlx.node.limits import Limits
from omlx.node.manifest import read_manifest
from omlx.node.pipeline import Pipeline, PipelineSpec
from omlx.node.prefixes import Hold
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.step import SamplingParams
from omlx.node.wire import CacheSpec

LIMITS = Limits(places=8, queue=64, stages=1, step_tokens=256, slowdown=2.7, capacity_tokens=1_000_000)
GREEDY = SamplingParams(temperature=0)
TIE = 1e-3
"""Two logits closer than this may change places when a batch's shapes round otherwise. A text is
compared up to the first such tie, and a test says how many texts must be free of them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an engine may keep: `cold` is the folder on the SSD."""

    cold: Path | None = None
    hot_bytes: int = 2**30
    block_tokens: int = 32
    snapshot_tokens: int = 64

    def spec(self, folder: Path, kv_bits: int | None) -> CacheSpec:
        root = model_root(folder, None, kv_format(kv_bits), self.block_tokens)
        return CacheSpec(root, self.block_tokens, str(self.cold) if self.cold else None, 0)

    def hold(self, stages: int) -> Hold:
        return Hold(
            (self.hot_bytes,) * stages, self.cold is not None, self.block_tokens, self.snapshot_tokens
        )


def uneven(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Unequal spans: the first stage has what single-layer stages behind it leave."""
    starts = [0, *range(layers - stages + 1, layers)]
    return tuple(zip(starts, [*starts[1:], layers], strict=True))


def on(nodes: Sequence[str], layout: Layout) -> Layout:
    """The same parts on these nodes; none: on those they had."""
    if not nodes:
        return layout
    parts = tuple(replace(part, node=node) for part, node in zip(layout.parts, nodes, strict=True))
    return replace(layout, parts=parts)


@asynccontextmanager
async def engine(  # noqa: PLR0913 (what tests vary)
    folder: Path,
    stages: int = 1,
    limits: Limits = LIMITS,
    link: str = "tcp",
    place: Placement = place_local,
    kept: Kept | None = None,
    kv_bits: int | None = None,
    nodes: Sequence[str] = (),
    relayout: Relayout = as_before,
) -> AsyncIterator[tuple[Engine, Scheduler]]:
    """An open engine, and its scheduler for a test that changes the limits between requests."""
    spec = PipelineSpec(
        folder=folder,
        layout=on(nodes, here(uneven(read_manifest(folder).num_layers, stages))),
        load_timeout_s=120,
        step_timeout_s=120,
        link=link,
        ring=partial(free_ring, stages) if link == "ring" else None,
        cache=kept.spec(folder, kv_bits) if kept is not None else None,
        kv_bits=kv_bits,
    )
    scheduler = Scheduler(replace(limits, stages=stages))
    hold = kept.hold(stages) if kept is not None else None
    opened = Engine(ModelId(folder.name), scheduler, Pipeline(spec, place), hold=hold, relayout=relayout)
    await opened.open(lambda done, total: None)
    try:
        yield opened, scheduler
    finally:
        await opened.close()


def request(
    prompt: Sequence[int], max_tokens: int = 16, sampling: SamplingParams = GREEDY, stop: int | None = None
) -> Request:
    return Request(tuple(prompt), sampling, max_tokens, frozenset() if stop is None else frozenset({stop}))


async def answer(engine: Engine, wanted: Request) -> list[int]:
    return [token.id async for token in engine.submit(wanted)]


async def answers(engine: Engine, wanted: Sequence[Request]) -> list[list[int]]:
    """All at once: they share batches."""
    return list(await asyncio.gather(*(answer(engine, one) for one in wanted)))


@cache
def expected(folder: Path, prompt: tuple[int, ...], count: int) -> tuple[tuple[int, ...], int]:
    """mlx-lm's own greedy tokens, and how many of them come before the first tie."""
    model, _ = _whole(folder)
    caches = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=caches)
    found: list[int] = []
    safe = count
    last = prompt[-1]
    for place in range(count):
        logits = model(mx.array([[last]]), cache=caches)[0, -1]
        top = mx.sort(logits)[-2:]
        if (top[1] - top[0]).item() < TIE:
            safe = min(safe, place)
        last = int(mx.argmax(logits).item())
        found.append(last)
    return tuple(found), safe


@cache
def _whole(folder: Path):
    return load_model(folder)


def compare(folder: Path, wanted: Sequence[Request], found: Sequence[Sequence[int]]) -> int:
    """Assert equality with mlx-lm up to ties; returns how many texts had none."""
    whole = 0
    for one, tokens in zip(wanted, found, strict=True):
        right, safe = expected(folder, one.prompt, one.max_tokens)
        assert list(tokens)[:safe] == list(right)[:safe], (len(one.prompt), safe)
        assert len(tokens) == one.max_tokens
        whole += safe == one.max_tokens
    return whole
