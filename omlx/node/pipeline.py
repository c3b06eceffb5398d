"""The stages of one model, in order: started, joined for an epoch, fed with plans, started again.

It carries plans out and results in; what they are about is the scheduler's business.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omlx.errors import StageLost, StepFailed
from omlx.ids import Epoch
from omlx.node.client import Event, Kept, Placement, StageClient
from omlx.node.step import StepPlan
from omlx.node.wire import Begin, CacheSpec, Load, Step, ToStage

T = TypeVar("T")

JOIN_WITHIN_S = 10.0
"""Joining the neighbours once each of them has time for it: connections alone, no data."""


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What to run where."""

    folder: Path
    spans: tuple[tuple[int, int | None], ...]
    """Half-open layer spans, one a stage, in order; an end of None means all the rest."""
    load_timeout_s: float
    step_timeout_s: float
    link: str = "tcp"
    ring: Callable[[], tuple[str, ...]] | None = None
    """Where the link is mx.distributed's: "host:port" for every stage, new ones for every group."""
    memory_shares: tuple[float, ...] | None = None
    """Each stage's part of its machine's GPU limits; None: equal parts of one machine."""
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
        self._place = place
        self._read: list[tuple[int, int]] = []
        self._ring: tuple[str, ...] = ()
        self._started: list[StageClient] = []
        """Every stage that may have a process, in whatever state it is."""
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

    async def open(self, epoch: Epoch, progress: Callable[[int, int], None]) -> None:
        """Start and load every stage side by side, then begin the first epoch.

        Raises Refused as a stage says, StageLost; whatever was started is ended again.
        """
        try:
            self._read = [(0, 0)] * len(self.spec.spans)
            self._ring = self.spec.ring() if self.spec.ring is not None else ()
            self.stages = await _all(self._start(i, progress) for i in range(len(self.spec.spans)))
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

    async def rebuild(self, epoch: Epoch) -> None:
        """After a roll call: start the dead stages again, keep the others' weights, begin `epoch`.

        Raises StageLost when another one goes meanwhile.
        """
        dead = [stage for stage in self.stages if stage.lost is not None]
        if self.spec.ring is not None:
            dead = list(self.stages)  # a group of mx.distributed cannot be joined twice
            self._ring = self.spec.ring()
        await _all(self._end(stage) for stage in dead)
        # Their RAM is empty; what is still queued of them is about the processes before.
        gone = {stage.index for stage in dead}
        self.fresh += gone
        self.kept = deque(kept for kept in self.kept if kept.stage not in gone)
        fresh = await _all(self._start(stage.index, lambda done, total: None) for stage in dead)
        for stage in fresh:
            self.stages[stage.index] = stage
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
        await asyncio.gather(*(stage.close() for stage in self._started))
        self._started, self.stages = [], []

    async def _end(self, stage: StageClient) -> None:
        await stage.close(within_s=0.0)
        self._started.remove(stage)

    async def _start(self, index: int, progress: Callable[[int, int], None]) -> StageClient:
        process = await self._place(index)
        client = StageClient(index, process, self._take)
        self._started.append(client)
        start, end = self.spec.spans[index]
        shares = self.spec.memory_shares or (1.0 / len(self.spec.spans),) * len(self.spec.spans)

        def told(done: int, total: int) -> None:
            self._read[index] = (done, total)
            progress(sum(d for d, _ in self._read), sum(t for _, t in self._read))

        load = Load(
            folder=str(self.spec.folder),
            start=start,
            end=end,
            listen_host=process.host,
            memory_share=shares[index],
            ring=self._ring,
            rank=index,
            backend=self.spec.link,
            cache=self.spec.cache,
            kv_bits=self.spec.kv_bits,
        )
        try:
            await client.load(load, told, self.spec.load_timeout_s)
        except BaseException:
            await self._end(client)
            raise
        return client

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
