"""Carries what the stages say about blocks to the scheduler's books, and back what they are told to do."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from omlx.cache.prefix_index import PrefixIndex, Tier
from omlx.node.hold import Hold
from omlx.node.pipeline import Pipeline
from omlx.node.prefixes import Prefixes, nothing_kept
from omlx.node.scheduler import Scheduler
from omlx.node.wire import Catalogue, Fetch, Purge, Spill

log = structlog.get_logger()

TICK_S = 0.25
"""How often it looks while something is due by the clock alone."""
IDLE_TICK_S = 3600.0
FLUSH_WITHIN_S = 5.0
"""What is not on the SSD when a server ends may take so long; the rest is lost, and computed again."""


@dataclass(slots=True)
class Housekeeper:
    """Owned by the engine, whose task alone calls it."""

    pipeline: Pipeline
    scheduler: Scheduler
    over_budget: Callable[[], int] = lambda: 0
    """Bytes that all models together hold in the cold tier beyond what they may."""

    def open(self, hold: Hold | None) -> None:
        """Once the stages have said what they can keep."""
        spec, pipeline = self.pipeline.spec.cache, self.pipeline
        self.scheduler.prefixes = nothing_kept(len(pipeline.stages))
        if spec is None or hold is None:
            return
        if not pipeline.stores:
            log.warning(
                "prefixes are not kept: a kind of cache that cannot be cut", folder=str(pipeline.spec.folder)
            )
            return
        hold = replace(hold, trimmable=pipeline.trims, recurrent=pipeline.recurs)
        index = PrefixIndex(spec.root, hold.block_tokens, len(pipeline.stages), hold.trimmable)
        self.scheduler.prefixes = Prefixes(index, hold)

    @property
    def tick_s(self) -> float:
        """Look again after so long, whatever happens."""
        return TICK_S if self.scheduler.prefixes.busy else IDLE_TICK_S

    def cold_bytes(self) -> int:
        """What this model has on SSDs."""
        index = self.scheduler.prefixes.index
        return sum(index.used_bytes(stage, Tier.COLD) for stage in range(len(self.pipeline.stages)))

    def look(self) -> None:
        """Take in what stages said, then tell them what is due."""
        prefixes, pipeline = self.scheduler.prefixes, self.pipeline
        prefixes.now = time.monotonic()
        self._hear()
        if fetches := self.scheduler.fetches():
            pipeline.tell(Fetch(fetches))
        if spills := prefixes.spills():
            pipeline.tell(Spill(spills))

    @property
    def last_used(self) -> float:
        """When something happened to this model, on time.monotonic."""
        return self.scheduler.prefixes.now

    def purge(self, over_bytes: int) -> None:
        """Give up so many bytes of the cold tier."""
        if purges := self.scheduler.prefixes.purges(over_bytes):
            self.pipeline.tell(Purge(purges))

    async def flush(self) -> None:
        """At the end: whatever is in RAM alone goes to the SSD, as far as there is time."""
        end = time.monotonic() + FLUSH_WITHIN_S
        prefixes = self.scheduler.prefixes
        while prefixes.dirty and (left := end - time.monotonic()) > 0:
            if not self.pipeline.stages or any(stage.lost is not None for stage in self.pipeline.stages):
                break
            if spills := prefixes.spills(all_of_them=True):
                self.pipeline.tell(Spill(spills))
            if not prefixes.dirty:
                break
            try:
                async with asyncio.timeout(left):
                    await self.pipeline.events.get()
            except TimeoutError:
                break
            self._hear()
        if prefixes.dirty:
            log.warning("not everything was written to the SSD", blocks=prefixes.dirty)

    def _hear(self) -> None:
        prefixes, pipeline = self.scheduler.prefixes, self.pipeline
        for stage in pipeline.fresh:
            prefixes.lost(stage)
        pipeline.fresh.clear()
        written = False
        while pipeline.kept:
            kept = pipeline.kept.popleft()
            if isinstance(kept.message, Catalogue):
                prefixes.found(kept.stage, kept.message)
            else:
                prefixes.held(kept.stage, kept.message)
            written |= isinstance(kept.message, Catalogue) or kept.message.tier == "cold"
        if written:
            self.purge(self.over_budget())
