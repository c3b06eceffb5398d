"""Owns the engines by model id: plans a model over the stages, loads it on first use, watches it.

A model is always served by Engine -> Pipeline -> stages; one stage on this machine is the smallest case.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from omlx.cluster.keeping import Keeping
from omlx.cluster.local_actor import free_ring
from omlx.cluster.site import Need, Site
from omlx.errors import BadModel, BadSetting, Closed
from omlx.ids import ModelId
from omlx.node.engine import Engine
from omlx.node.health import ModelCard, ModelHealth
from omlx.node.layout import Layout
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

LOOK_EVERY_S = 0.05

LoadProgress = Callable[[ModelId, int, int], None]
"""(model, bytes read, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model."""

    engine: Engine
    chat: "ChatModel"
    manifest: ModelManifest

    def bytes(self) -> dict[str, int]:
        """Weights, keys and values of one sequence, and what is kept in RAM, by node."""
        layout, taken = self.engine.layout, Counter[str]()
        for part, hot in zip(layout.parts, layout.hot_bytes, strict=True):
            taken[part.node] += part.bytes + hot
        return dict(taken)


class Coordinator:
    """One per server.

    `site` knows the machines. Loads go one after the other: each is planned with the memory that the one
    before has left.
    """

    def __init__(
        self,
        library: Library,
        settings: Settings,
        site: Site,
        keeping: Keeping,
        progress: LoadProgress = lambda model, done, total: None,
    ) -> None:
        self._settings = settings
        self._keeping = keeping
        self._site = site
        self._progress = progress
        self._closed = False
        self._loading = asyncio.Lock()
        self._loads: dict[ModelId, asyncio.Task[Served]] = {}
        self._unloads: dict[ModelId, asyncio.Task[None]] = {}
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

    def layers(self, id: ModelId) -> int:
        """Of the model, by its config."""
        return read_config(self._entries[id].folder).num_layers

    def health(self) -> tuple[ModelHealth, ...]:
        return tuple(self._health(id) for id in self._entries)

    def figures(self) -> dict[str, ModelFigures]:
        """Of the loaded models, by id."""
        return {served.engine.model: served.engine.figures() for served in self.loaded()}

    async def chat_model(self, model_id: ModelId) -> "ChatModel":
        """Loads it on first use; everybody who asks meanwhile waits for the same load.

        A caller that is cancelled stops no load.
        Raises ModelNotFound, BadModel, DoesNotFit, ModelFailed, Closed.
        """
        entry = self._library.find(model_id)
        if entry.problem is not None:
            raise BadModel(entry.problem)
        if (unloading := self._unloads.get(entry.id)) is not None:
            await asyncio.shield(unloading)
        if self._closed:
            raise Closed("the server is shutting down")
        load = self._loads.get(entry.id)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = asyncio.create_task(self._load_in_turn(entry.id, entry.folder), name=f"load-{entry.id}")
            self._loads[entry.id] = load
        return (await asyncio.shield(load)).chat

    async def unload(self, model_id: ModelId, within_s: float) -> None:
        """Let what runs end within so many seconds, then end its stages; who asks for it meanwhile waits, and
        has it loaded again. Nothing where it is not loaded. Raises ModelNotFound."""
        id = self._library.find(model_id).id
        if id not in self._unloads:
            self._unloads[id] = asyncio.create_task(self._unload(id, within_s), name=f"unload-{id}")
            self._unloads[id].add_done_callback(lambda _: self._unloads.pop(id))
        await asyncio.shield(self._unloads[id])

    async def _unload(self, id: ModelId, within_s: float) -> None:
        load = self._loads.get(id)
        if load is None:
            return
        if not load.done():
            load.cancel()
        done = (await asyncio.gather(load, return_exceptions=True))[0]
        if isinstance(done, Served):
            end = time.monotonic() + within_s
            while done.engine.busy:
                if time.monotonic() > end:
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            await done.engine.close()
        self._loads.pop(id, None)

    async def close(self) -> None:
        """End every stream, every load and every stage; nothing runs afterwards."""
        self._closed = True
        unloads = list(self._unloads.values())
        for unload in unloads:
            unload.cancel()
        await asyncio.gather(*unloads, return_exceptions=True)
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

    def need(self, served: Served) -> Need:
        """What a loaded model asks of the machines now."""
        return self._need(served.engine.model, served.manifest)

    def loaded(self) -> list[Served]:
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
        layout = await self._site.layout(self._need(id, manifest))
        cache = await asyncio.to_thread(self._keeping.identify, id, folder)
        context = min(self._context[id], layout.capacity_tokens)
        engine = self._engine(id, manifest, layout, cache)
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
            stages=[(part.node, part.start, part.end) for part in layout.parts],
            bytes=sum(part.bytes for part in layout.parts),
            context_tokens=context,
            capacity_tokens=layout.capacity_tokens,
        )
        self._context[id] = context
        if cache is not None:
            keeper = engine.housekeeper
            await asyncio.to_thread(self._keeping.loaded, cache.root, keeper.cold_bytes, keeper)
        return Served(engine, chat, manifest)

    def taken_and_held(self, id: ModelId | None) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by node that loaded models have: the others, and the one with that id."""
        taken, held = Counter[str](), Counter[str]()
        for served in self.loaded():
            if served.engine.failure is None:
                (held if served.engine.model == id else taken).update(served.bytes())
        return dict(taken), dict(held)

    def _need(self, id: ModelId, manifest: ModelManifest) -> Need:
        taken, held = self.taken_and_held(id)
        return Need(
            id,
            self._entries[id].folder,
            manifest,
            self._context[id],
            len(self._entries),
            taken,
            held,
        )

    def _engine(
        self, id: ModelId, manifest: ModelManifest, layout: Layout, cache: CacheSpec | None
    ) -> Engine:
        settings = self._settings
        stages = len(layout.parts)
        spec = PipelineSpec(
            folder=self._entries[id].folder,
            layout=layout,
            load_timeout_s=settings.load_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            link=settings.link,
            ring=partial(free_ring, stages) if settings.link != "tcp" and stages > 1 else None,
            cache=cache,
            kv_bits=settings.kv_bits,
        )
        limits = Limits(
            places=settings.max_concurrent_requests,
            queue=settings.max_queued_requests,
            stages=stages,
            step_tokens=settings.step_tokens,
            slowdown=settings.slowdown,
            capacity_tokens=layout.capacity_tokens,
        )

        async def again(before: Layout, lost: frozenset[str]) -> Layout:
            return await self._site.again(self._need(id, manifest), before, lost)

        hold = self._keeping.hold(layout.hot_bytes)
        pipeline = Pipeline(spec, self._site.place)
        engine = Engine(id, Scheduler(limits), pipeline, self._timeline(id), hold, again)
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
