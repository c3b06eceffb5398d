"""Owns the engines by model id: plans a model over the stages, loads it on first use, watches it.

A model is always served by Engine -> Pipeline -> stages; one stage on this machine is the smallest case.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from omlx.cluster.capacity import capacity_tokens
from omlx.cluster.keeping import Keeping
from omlx.cluster.local_actor import free_ring
from omlx.cluster.planner import NodeBudget, ShardPlan, StagePlan, plan_work
from omlx.errors import BadModel, BadSetting, Closed, DoesNotFit
from omlx.ids import ModelId
from omlx.node.client import Placement
from omlx.node.engine import Engine
from omlx.node.health import ModelCard, ModelHealth
from omlx.node.hold import Hold
from omlx.node.library import Library
from omlx.node.limits import Limits
from omlx.node.manifest import ModelManifest, read_manifest
from omlx.node.meters import ModelFigures
from omlx.node.model_config import read_config
from omlx.node.pipeline import Pipeline, PipelineSpec
from omlx.node.scheduler import Scheduler
from omlx.node.timeline import Timeline
from omlx.node.wire import CacheSpec
from omlx.settings import Settings

if TYPE_CHECKING:
    from omlx.node.chat import ChatModel

log = structlog.get_logger()

DEFAULT_CONTEXT_TOKENS = 32768
"""For configs that name no limit."""
LEAST_CONTEXT_TOKENS = 4096
"""A model is refused where its weights leave less room than one sequence of this (or its own) length."""

LoadProgress = Callable[[ModelId, int, int], None]
"""(model, bytes read, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model."""

    engine: Engine
    chat: "ChatModel"
    bytes: int
    """Weights, and keys and values of one sequence, by the manifest's arithmetic."""


class Coordinator:
    """One per server.

    `keeping` knows what all models together may take, `available_bytes` what is free now. Loads go one
    after the other: each is planned with the memory that the one before has left.
    """

    def __init__(
        self,
        library: Library,
        settings: Settings,
        place: Placement,
        keeping: Keeping,
        available_bytes: Callable[[], int],
        progress: LoadProgress = lambda model, done, total: None,
    ) -> None:
        self._settings = settings
        self._keeping = keeping
        self._place = place
        self._ceiling_bytes = keeping.ceiling_bytes
        self._available_bytes = available_bytes
        self._progress = progress
        self._closed = False
        self._loading = asyncio.Lock()
        self._loads: dict[ModelId, asyncio.Task[Served]] = {}
        self._entries = {entry.id: entry for entry in library.entries if entry.problem is None}
        self._library = library
        self._context = {id: _context(entry.folder, settings) for id, entry in self._entries.items()}

    def cards(self) -> tuple[ModelCard, ...]:
        """Every model that can be served, loaded or not."""
        states = {health.id: health.state for health in self.health()}
        return tuple(
            ModelCard(id, int(entry.folder.stat().st_mtime), self._context[id], states[id])
            for id, entry in self._entries.items()
        )

    def health(self) -> tuple[ModelHealth, ...]:
        return tuple(self._health(id) for id in self._entries)

    def figures(self) -> dict[str, ModelFigures]:
        """Of the loaded models, by id."""
        return {served.engine.model: served.engine.figures() for served in self._loaded()}

    async def chat_model(self, model_id: ModelId) -> "ChatModel":
        """Loads it on first use; everybody who asks meanwhile waits for the same load.

        A caller that is cancelled stops no load.
        Raises ModelNotFound, BadModel, DoesNotFit, ModelFailed, Closed.
        """
        entry = self._library.find(model_id)
        if entry.problem is not None:
            raise BadModel(entry.problem)
        if self._closed:
            raise Closed("the server is shutting down")
        load = self._loads.get(entry.id)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = asyncio.create_task(self._load_in_turn(entry.id, entry.folder), name=f"load-{entry.id}")
            self._loads[entry.id] = load
        return (await asyncio.shield(load)).chat

    async def close(self) -> None:
        """End every stream, every load and every stage; nothing runs afterwards."""
        self._closed = True
        loads, self._loads = self._loads, {}
        for load in loads.values():
            if not load.done():
                load.cancel()
        done = await asyncio.gather(*loads.values(), return_exceptions=True)
        await asyncio.gather(*(served.engine.close() for served in done if isinstance(served, Served)))

    def _health(self, id: ModelId) -> ModelHealth:
        load = self._loads.get(id)
        if load is None or load.cancelled():
            return ModelHealth(id, "idle", 0, 0, None)
        if not load.done():
            return ModelHealth(id, "loading", 0, 0, None)
        if load.exception() is not None:
            return ModelHealth(id, "failed", 0, 0, None)
        return load.result().engine.health()

    def _loaded(self) -> list[Served]:
        return [
            load.result()
            for load in self._loads.values()
            if load.done() and not load.cancelled() and load.exception() is None
        ]

    async def _load_in_turn(self, id: ModelId, folder: Path) -> Served:
        async with self._loading:
            return await self._load(id, folder)

    async def _load(self, id: ModelId, folder: Path) -> Served:
        manifest = await asyncio.to_thread(read_manifest, folder, self._settings.kv_bits)
        for warning in manifest.warnings:
            log.warning("model folder", model=id, what=warning)
        plan, hot_bytes = self._plan(id, manifest)
        cache = await asyncio.to_thread(self._keeping.identify, id, folder)
        capacity = capacity_tokens(manifest, plan, self._settings.max_concurrent_requests)
        context = min(self._context[id], capacity)
        hold = self._keeping.hold(plan, hot_bytes)
        engine = self._engine(id, folder, plan, capacity, cache, hold)
        making = asyncio.create_task(
            asyncio.to_thread(_chat_model, id, folder, engine, context), name=f"tokenizer-{id}"
        )
        try:
            await engine.open(lambda done, total: self._progress(id, done, total))
            chat = await making
        except BaseException:
            making.cancel()
            await engine.close()
            raise
        log.info(
            "loaded",
            model=id,
            stages=[(stage.span.start, stage.span.end) for stage in plan.stages],
            weight_bytes=sum(stage.weights for stage in plan.stages),
            context_tokens=context,
            capacity_tokens=capacity,
        )
        self._context[id] = context
        if cache is not None:
            keeper = engine.housekeeper
            await asyncio.to_thread(self._keeping.loaded, cache.root, keeper.cold_bytes, keeper)
        used = hot_bytes + sum(stage.weights + stage.kv for stage in plan.stages)
        return Served(engine, chat, used)

    def _plan(self, id: ModelId, manifest: ModelManifest) -> tuple[ShardPlan, int]:
        """The plan, and the bytes that the hot tier has beside it: none where there is no room for both."""
        taken = sum(served.bytes for served in self._loaded() if served.engine.failure is None)
        budget = min(self._ceiling_bytes - taken, self._available_bytes())
        hot_bytes = self._keeping.hot_bytes(len(self._entries))
        try:
            return self._plan_within(manifest, budget - hot_bytes, self._context[id]), hot_bytes
        except DoesNotFit:
            pass  # perhaps without
        try:
            plan = self._plan_within(manifest, budget, self._context[id])
        except DoesNotFit as error:
            raise DoesNotFit(f"{id} does not fit into memory: {error}", error.short_bytes) from error
        log.warning("no memory is left for the hot tier", model=id, wanted_bytes=hot_bytes)
        return plan, 0

    def _plan_within(self, manifest: ModelManifest, budget: int, context: int) -> ShardPlan:
        stages = self._settings.stages
        nodes = [NodeBudget(f"stage {i}", max(1, budget // stages)) for i in range(stages)]
        return plan_work(
            manifest,
            nodes,
            context_tokens=min(context, LEAST_CONTEXT_TOKENS),
            sequences=1,
            step_tokens=self._settings.step_tokens,
        )

    def _gpu_share(self, stage: StagePlan) -> float:
        """A stage's part of the GPU's limits; over all stages of all models they never exceed the whole."""
        alone = len(self._entries) == 1
        return min(1.0, (stage.node.bytes if alone else stage.used) / self._ceiling_bytes)

    def _engine(
        self,
        id: ModelId,
        folder: Path,
        plan: ShardPlan,
        capacity: int,
        cache: CacheSpec | None,
        hold: Hold,
    ) -> Engine:
        settings = self._settings
        whole = len(plan.stages) == 1
        spec = PipelineSpec(
            folder=folder,
            spans=((0, None),) if whole else tuple((span.start, span.end) for span in plan.spans),
            load_timeout_s=settings.load_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            link=settings.link,
            ring=partial(free_ring, len(plan.stages)) if settings.link != "tcp" and not whole else None,
            memory_shares=tuple(self._gpu_share(stage) for stage in plan.stages),
            cache=cache,
            kv_bits=settings.kv_bits,
        )
        limits = Limits(
            places=settings.max_concurrent_requests,
            queue=settings.max_queued_requests,
            stages=len(plan.stages),
            step_tokens=settings.step_tokens,
            slowdown=settings.slowdown,
            capacity_tokens=capacity,
        )
        engine = Engine(id, Scheduler(limits), Pipeline(spec, self._place), self._timeline(id), hold)
        if cache is not None:
            engine.housekeeper.over_budget = partial(self._keeping.over_for, cache.root)
        return engine

    def _timeline(self, id: ModelId) -> Timeline | None:
        """Raises BadSetting where none can be written."""
        if self._settings.trace is None:
            return None
        try:
            return Timeline(self._settings.trace / f"{id.replace('/', '--')}.json")
        except OSError as error:
            raise BadSetting(f"setting trace = {str(self._settings.trace)!r}: {error.strerror}") from error


def _context(folder: Path, settings: Settings) -> int:
    """The longest prompt and answer: what the config says, or less where the settings say so."""
    own = read_config(folder).context_tokens or DEFAULT_CONTEXT_TOKENS
    return own if settings.context_tokens is None else min(own, settings.context_tokens)


def _chat_model(id: ModelId, folder: Path, engine: Engine, context_tokens: int) -> "ChatModel":
    # Imported here, while the stages read the weights.
    from omlx.node.chat import ChatModel
    from omlx.node.text.tokenizer import load_tokenizer

    return ChatModel(id, load_tokenizer(folder), engine, context_tokens)
