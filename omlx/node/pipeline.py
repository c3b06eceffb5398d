"""The stages of one model, in order: started, joined for an epoch, fed with plans, started again.

It carries plans out and results in; what they are about is the scheduler's business.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from omlx.errors import StageLost, StepFailed
from omlx.ids import Epoch
from omlx.node.client import Event, Kept, LoadProgress, Placement, StageClient
from omlx.node.layout import Layout, Part
from omlx.node.step import StepPlan
from omlx.node.wire import Begin, CacheSpec, Load, Step, ToStage
from omlx.observe import watched

T = TypeVar("T")

JOIN_WITHIN_S = 10.0
"""Joining the neighbours once each of them has time for it: connections alone, no data."""


def untold(done: int, total: int) -> None:
    """Nobody looks at the progress."""


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What to run where."""

    folder: Path
    layout: Layout
    """To begin with."""
    load_timeout_s: float
    step_timeout_s: float
    link: str = "tcp"
    ring: Callable[[], tuple[str, ...]] | None = None
    """Where the link is mx.distributed's: "host:port" for every stage, new ones for every group."""
    cache: CacheSpec | None = None
    """Where stages keep what they computed; None: nowhere."""
    kv_bits: int | None = None
    """Of each number in plain keys and values; None: as the model computes them."""


class Pipeline:
    """Owns the stage clients. `events` gives results in plan order, and every loss."""

    def __init__(self, spec: PipelineSpec, place: Placement) -> None:
        self.spec = spec
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        """None only wakes whoever waits."""
        self.kept: deque[Kept] = deque()
        """What stages hold of blocks; bounded by what they were asked. It outlives epochs."""
        self.fresh: list[int] = []
        """Stages that were started anew since somebody looked."""
        self.stages: list[StageClient] = []
        self.layout = spec.layout
        self._place = place
        self._read: list[tuple[int, int]] = []
        self._ring: tuple[str, ...] = ()
        self._started: list[StageClient] = []
        """Every stage that may have a process, in whatever state it is."""
        self._ending: dict[StageClient, asyncio.Task[None]] = {}
        self.load_s = 0.0
        """What the slowest load of the last rebuild took."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def batches(self) -> bool:
        """Whether every stage can compute several sequences together."""
        return all(stage.loaded is None or stage.loaded.batches for stage in self.stages)

    @property
    def mixes(self) -> bool:
        """Whether every stage computes chunks and single tokens in one forward."""
        return all(stage.loaded is not None and stage.loaded.mixes for stage in self.stages)

    @property
    def stores(self) -> bool:
        """Whether blocks can be cut out of every stage's caches, and laid back."""
        return all(stage.loaded is not None and stage.loaded.storable for stage in self.stages)

    @property
    def trims(self) -> bool:
        """Whether every stage can go on from any token of a block."""
        return all(stage.loaded is not None and stage.loaded.trimmable for stage in self.stages)

    @property
    def recurs(self) -> bool:
        """Whether a stage has states that are right only where a forward ended."""
        return any(stage.loaded is not None and stage.loaded.recurrent for stage in self.stages)

    async def open(self, epoch: Epoch, progress: LoadProgress) -> None:
        """Start and load every stage side by side, then begin the first epoch.

        Raises Refused as a stage says, StageLost; whatever was started is ended again.
        """
        try:
            self._ring = self.spec.ring() if self.spec.ring is not None else ()
            self._read = [(0, 0)] * len(self.layout.parts)
            self.stages = await _all(self._start(i, progress) for i in range(len(self.layout.parts)))
            await self._begin(epoch)
        except BaseException:
            await self.close()
            raise

    async def roll_call(self) -> list[StepFailed]:
        """After a loss: every stage answers or is lost. Returns what stages could not compute.

        A neighbour's complaint may come before the word of the stage that it complains about; what a
        stage said before it answers here is in.
        """
        await _all(stage.alive() for stage in self.stages)
        failures = []
        while not self.events.empty():
            event = self.events.get_nowait()
            if isinstance(event, StepFailed):
                failures.append(event)
        return failures

    def bury(self) -> None:
        """Begin to end what is lost: it may be frozen, and have the memory that another one needs."""
        for stage in self._started:
            if stage.lost is not None:
                self._end_soon(stage)

    async def rebuild(self, epoch: Epoch, layout: Layout) -> None:
        """After a roll call: what `layout` asks for, with the weights that living stages have of it, in a
        new epoch. Where it is the layout of before, only dead stages are started again.

        Raises StageLost when another one goes meanwhile, Refused as a stage says.
        """
        like_before = layout.runs_like(self.layout)
        self.layout = layout
        self.load_s = 0.0
        self._read = [(0, 0)] * len(layout.parts)
        living = {stage.seat: stage for stage in self._started if stage.lost is None}
        if self.spec.ring is not None:
            living = {}  # a group of mx.distributed cannot be joined twice
            self._ring = self.spec.ring()
        stay = [living.get(seat) for seat in layout.seats]
        ending = {stage: self._end_soon(stage) for stage in self._started if stage not in stay}
        # The node of a lost one may be gone for good; where it has no part, nobody needs its memory.
        awaited = [task for one, task in ending.items() if one.lost is None or layout.uses(one.seat)]
        await _all(asyncio.shield(task) for task in awaited)
        if like_before:
            # The RAM of new ones is empty; what is still queued of those before is of no use.
            fresh = {index for index, stage in enumerate(stay) if stage is None}
            self.kept = deque(kept for kept in self.kept if kept.stage not in fresh)
            self.fresh += fresh
        else:
            self.kept.clear()
            self.fresh.clear()
        self.stages = await _all_to_the_end(
            self._start(index, untold) if stage is None else self._keep(index, stage, like_before)
            for index, stage in enumerate(stay)
        )
        await self._begin(epoch)
        while not self.events.empty():  # of epochs that are over; a loss since then shows in `lost`
            self.events.get_nowait()
        for stage in self.stages:
            if stage.lost is not None:
                raise stage.lost

    def send(self, plan: StepPlan) -> None:
        """The same plan to every stage."""
        self.tell(Step(plan))

    def tell(self, message: ToStage) -> None:
        """The same message to every stage."""
        for stage in self.stages:
            stage.send(message)

    def give_up(self, lost: StageLost) -> None:
        """No stage answers for a step: none of them can be trusted with another epoch."""
        for stage in self.stages:
            stage.lost = stage.lost or lost

    async def close(self) -> None:
        """End every process, also when this is called twice or its caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._end_all(), name="pipeline-close")
        await asyncio.shield(self._closing)

    def _take(self, event: Event) -> None:
        if isinstance(event, Kept):
            self.kept.append(event)
            self.events.put_nowait(None)
        else:
            self.events.put_nowait(event)

    async def _end_all(self) -> None:
        await asyncio.gather(*self._ending.values())
        await asyncio.gather(*(stage.close() for stage in self._started))
        self._started, self.stages = [], []

    def _end_soon(self, stage: StageClient) -> asyncio.Task[None]:
        if stage not in self._ending:
            task = asyncio.create_task(self._end(stage), name=f"stage-{stage.seat}-end")
            self._ending[stage] = watched(task)
        return self._ending[stage]

    async def _end(self, stage: StageClient) -> None:
        await stage.close(within_s=0.0)
        if stage in self._started:
            self._started.remove(stage)
        self._ending.pop(stage, None)

    async def _start(self, index: int, progress: LoadProgress) -> StageClient:
        part = self.layout.parts[index]
        process = await self._place(index, part.node)
        client = StageClient(index, self.layout.seats[index], process, self._take)
        self._started.append(client)
        try:
            await self._load(client, progress)
        except BaseException:
            await self._end(client)
            raise
        return client

    async def _keep(self, index: int, client: StageClient, like_before: bool) -> StageClient:
        client.index = index
        if not like_before or client.loaded is None:
            await self._load(client, untold)
        return client

    async def _load(self, client: StageClient, progress: LoadProgress) -> None:
        index, part = client.index, self.layout.parts[client.index]

        def told(done: int, total: int) -> None:
            self._read[index] = (done, total)
            progress(sum(d for d, _ in self._read), sum(t for _, t in self._read))

        load = Load(
            folder=str(part.folder or self.spec.folder),
            start=part.start,
            end=part.end,
            listen_host=client.process.host,
            memory_share=part.memory_share,
            ring=self._ring,
            rank=index,
            backend=self.spec.link,
            cache=self._cache(part),
            kv_bits=self.spec.kv_bits,
        )
        started = time.monotonic()
        await client.load(load, told, self.spec.load_timeout_s)
        self.load_s = max(self.load_s, time.monotonic() - started)

    def _cache(self, part: Part) -> CacheSpec | None:
        cache = self.spec.cache
        if cache is None or cache.folder is None or not part.cache_folder:
            return cache
        return msgspec.structs.replace(cache, folder=part.cache_folder)

    async def _begin(self, epoch: Epoch) -> None:
        """All at once: each connects to the one behind it, the last to the first, and is connected to."""
        secret = secrets.token_bytes(32)
        # A stage that lives may be deep in a step of the epoch before.
        join_within_s = self.spec.step_timeout_s + JOIN_WITHIN_S

        def message(index: int) -> Begin:
            behind = self.stages[(index + 1) % len(self.stages)]
            downstream = None
            if len(self.stages) > 1 and behind.loaded is not None:
                downstream = (behind.process.host, behind.loaded.port)
            return Begin(
                epoch,
                downstream,
                secret,
                join_within_s,
                self.spec.step_timeout_s,
                before=self.stages[index - 1].process.node,
                behind=behind.process.node,
            )

        await _all(
            stage.begin(message(index), join_within_s + JOIN_WITHIN_S)
            for index, stage in enumerate(self.stages)
        )


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Side by side; the first error cancels the others, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_to_the_end(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Side by side; the first error is raised when all have ended. What was asked of a living stage is
    waited for: it would answer all the same, and that be taken for the answer to the next question."""
    done = await asyncio.gather(*awaitables, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]
