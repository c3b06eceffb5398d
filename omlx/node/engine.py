"""One model's engine: requests in, tokens out. It keeps the pipeline full and outlives its stages.

A lost stage ends the epoch: the scheduler rewinds, the pipeline is rebuilt, and every running sequence
goes on to the same tokens. Clients see a pause.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf

import structlog

from omlx.errors import (
    Closed,
    ModelFailed,
    OmlxError,
    PromptTooLong,
    Refused,
    RequestFailed,
    StageLost,
    StepFailed,
    TooLate,
)
from omlx.ids import ModelId, SeqId
from omlx.node.cache_figures import cache_figures
from omlx.node.client import Measured
from omlx.node.deaths import Deaths
from omlx.node.health import ModelHealth, ModelState
from omlx.node.hold import Hold
from omlx.node.housekeeping import Housekeeper
from omlx.node.layout import Layout
from omlx.node.meters import Meters, ModelFigures
from omlx.node.pacing import Pace
from omlx.node.pipeline import Pipeline
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request
from omlx.node.step import StepPlan, StepResult
from omlx.node.stream import Stream
from omlx.node.timeline import Timeline

log = structlog.get_logger()

STALLED_AFTER_S = 30.0
"""Work on its way without a result for so long is reported as stalled."""


Relayout = Callable[[Layout, frozenset[str]], Awaitable[Layout]]
"""Where to go on, after the stages of these seats were lost. Raises ModelFailed where that is nowhere."""


async def as_before(layout: Layout, lost: frozenset[str]) -> Layout:
    """On one machine there is no other place."""
    return layout


def look_ahead(step_s: float, stages: int) -> int:
    """Plans of one group to keep in flight, so that the stages never wait for the head.

    The head needs about a millisecond for a result and the next plan. Two hide it behind a step of tens of
    milliseconds of one stage; short steps need more, and stages that wait for each other. Each costs a row
    that is thrown away when an answer stops, and a newcomer a step of waiting.
    """
    if step_s > 0.02 and stages == 1:
        return 2
    return 3 if step_s > 0.008 else 4


class Engine:
    """Owns the scheduler, the pipeline and the streams; one task moves all three."""

    def __init__(
        self,
        model: ModelId,
        scheduler: Scheduler,
        pipeline: Pipeline,
        timeline: Timeline | None = None,
        hold: Hold | None = None,
        relayout: Relayout = as_before,
    ) -> None:
        """`hold`: what may be kept, where the pipeline has a place for it."""
        self.model = model
        self.pipeline = pipeline
        self.failure: OmlxError | None = None
        self.recovering = False
        self.recoveries = 0
        self.meters = Meters(timeline)
        self.housekeeper = Housekeeper(pipeline, scheduler)
        self.layout = pipeline.layout
        """That all books are kept for."""
        self._relayout = relayout
        self._next: Layout | None = None
        """To move to."""
        self._hold = hold
        self._scheduler = scheduler
        self._limits = scheduler.limits
        self._streams: dict[SeqId, Stream] = {}
        self._deaths = Deaths()
        self._progress = time.monotonic()
        self._heard = time.monotonic()
        """The last event, or the first plan after a time without any."""
        self._step_s = 0.05
        """Time from one result to the next while the stages have work, smoothed."""
        self._task: asyncio.Task[None] | None = None

    async def open(self, progress: Callable[[int, int], None]) -> None:
        """Start the stages and the engine's task. Raises Refused or ModelFailed; then nothing runs."""
        try:
            await self.pipeline.open(self._scheduler.epoch, progress)
        except StageLost as lost:
            raise ModelFailed(f"{self.model}: a stage went while it was loading: {lost}") from lost
        self._set_limits()
        self.meters.begin(len(self.pipeline.stages), self._scheduler.limits.mixes)
        self.housekeeper.open(self._hold)
        self._task = asyncio.create_task(self._run(), name=f"engine-{self.model}")
        self._task.add_done_callback(self._ended)

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises Full, PromptTooLong, ModelFailed or Closed at once."""
        if self.failure is not None:
            raise self.failure
        capacity = self._scheduler.limits.capacity_tokens
        if (fitting := request.within(capacity)) is None:  # there is less memory than when it was loaded
            raise PromptTooLong(len(request.prompt), capacity - 1)
        seq = self._scheduler.add(fitting)
        stream = Stream(lambda: self._cancel(seq))
        self._streams[seq] = stream
        self._wake()
        return stream

    def move(self, layout: Layout) -> None:
        """Go on elsewhere, as soon as the plan in hand is over: what runs is computed anew from its known
        tokens, as after a loss."""
        self._next = layout
        self._wake()

    @property
    def busy(self) -> bool:
        """Whether somebody waits for tokens."""
        return self.failure is None and bool(self._streams)

    @property
    def tokens_at_stake(self) -> int:
        """What is computed again once layers move: of requests that run, and of chats that likely go on."""
        return self._scheduler.prefixes.at_stake(self._scheduler.running.values(), time.monotonic())

    @property
    def epoch(self) -> int:
        return self._scheduler.epoch

    def health(self) -> ModelHealth:
        """Whether this model makes progress, not just whether its processes live."""
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        since_s = time.monotonic() - self._progress if running or waiting else None
        state: ModelState
        if self.failure is not None:
            state = "failed"
        elif self.recovering:
            state = "recovering"
        elif since_s is not None and since_s > STALLED_AFTER_S:
            state = "stalled"
        else:
            state = "ready"
        return ModelHealth(self.model, state, running, waiting, since_s)

    def figures(self) -> ModelFigures:
        scheduler = self._scheduler
        return ModelFigures(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            in_flight=len(scheduler.in_flight),
            groups=scheduler.groups,
            ahead=scheduler.ahead,
            recoveries=self.recoveries,
            plans=self.meters.plans,
            drawn_tokens=self.meters.drawn_tokens,
            prompt_tokens=self.meters.prompt_tokens,
            cache=cache_figures(scheduler.prefixes),
            stages=self.meters.stages(),
            rounds=scheduler.pace.rounds(scheduler.decoding),
        )

    async def close(self) -> None:
        """End every stream with Closed and every stage's process."""
        self.failure = self.failure or Closed(f"{self.model}: the server is shutting down")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_streams(self.failure)
        await self.housekeeper.flush()
        await self.pipeline.close()
        self.meters.close()

    # ---------------------------------------------------------------- the task

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._serve()
                    await self._move()
                except StageLost as lost:
                    await self._recover(lost)
        except (ModelFailed, Refused) as failure:
            self._give_up(failure)
            await self.pipeline.close()

    async def _serve(self) -> None:
        """Choose, run, account, until a stage is lost or all are to move."""
        while self._next is None:
            self.housekeeper.look()
            while (plan := self._scheduler.next_plan()) is not None:
                if len(self._scheduler.in_flight) == 1:
                    self._heard = time.monotonic()
                self.pipeline.send(plan)
                self.meters.sent(plan)
                self._tell_reused(plan)
            self.meters.in_flight(len(self._scheduler.in_flight))
            match await self._event():
                case StepResult() as result if result.epoch == self._scheduler.epoch:
                    self._deliver(result)
                case Measured(stage, epoch, times) if epoch == self._scheduler.epoch:
                    self.meters.measured(stage, times)
                    self._scheduler.pace = self.meters.pace()
                case StageLost() as lost:
                    raise lost
                case _:
                    pass  # woken, or a result of an epoch that is over

    async def _event(self) -> object:
        """The next result, loss or wake-up; with plans on their way, within the step's deadline."""
        late_at = self._heard + self.pipeline.spec.step_timeout_s if self._scheduler.in_flight else inf
        try:
            async with asyncio.timeout(min(self.housekeeper.tick_s, late_at - time.monotonic())):
                event = await self.pipeline.events.get()
        except TimeoutError:
            if time.monotonic() < late_at:
                return None  # it is only time to look again
        else:
            self._heard = time.monotonic()
            return event
        lost = TooLate(f"no stage finished a step within {self.pipeline.spec.step_timeout_s:.0f} s")
        self.pipeline.give_up(lost)
        return lost

    def _tell_reused(self, plan: StepPlan) -> None:
        # Who enters begins anew: what was laid back in an epoch that is over is of no use.
        reused = [*((admit.seq, 0) for admit in plan.admits), *((r.seq, r.end) for r in plan.restores)]
        for seq, tokens in reused:
            stream = self._streams.get(seq)
            if stream is not None and not stream.started:
                stream.cached_tokens = tokens

    def _deliver(self, result: StepResult) -> None:
        now = time.monotonic()
        if len(self._scheduler.in_flight) > 1:  # else the stages were waiting for us
            self._step_s += 0.1 * (now - self._progress - self._step_s)
            self._scheduler.ahead = look_ahead(self._step_s, len(self.pipeline.stages))
        self._progress = now
        for seq, token in self._scheduler.commit(result):
            stream = self._streams[seq]
            stream.put(token)
            if token.finish is not None:
                del self._streams[seq]

    async def _recover(self, lost: StageLost) -> None:
        """Rewind and rebuild until it holds. Raises ModelFailed after too many losses."""
        self.recovering = True
        while True:
            log.warning("stage lost", model=self.model, why=str(lost), epoch=self._scheduler.epoch)
            failures = [lost] if isinstance(lost, StepFailed) else []
            failures += await self.pipeline.roll_call()
            for failure in failures:
                self._blame(failure)
            self._scheduler.rewind()
            started = time.monotonic()
            try:
                layout = await self._place_again()
                if not failures:  # else whoever caused it is out, and it cannot come again
                    self._count_death(lost, elsewhere=not layout.runs_like(self.pipeline.layout))
                await self.pipeline.rebuild(self._scheduler.epoch, layout)
            except StageLost as again:
                lost = again
                continue
            self.recoveries += 1
            self._settled(layout, started)
            return

    async def _place_again(self) -> Layout:
        """What is lost is ended while somebody finds out where to go on."""
        lost = frozenset(stage.seat for stage in self.pipeline.stages if stage.lost is not None)
        self.pipeline.bury()
        return await self._relayout(self.layout, lost)

    async def _move(self) -> None:
        assert self._next is not None
        layout, self._next = self._next, None
        self.recovering, started = True, time.monotonic()
        self._scheduler.rewind()
        try:
            await self.pipeline.rebuild(self._scheduler.epoch, layout)
        except Refused as refused:
            log.warning("cannot move", model=self.model, why=str(refused))
            layout = self.layout
            self._scheduler.rewind()
            await self.pipeline.rebuild(self._scheduler.epoch, layout)
        self._settled(layout, started)

    def _settled(self, layout: Layout, started: float) -> None:
        """A new epoch has begun."""
        if not layout.runs_like(self.layout):
            self._adopt(layout)
        self.meters.begin(len(self.pipeline.stages), self._scheduler.limits.mixes)
        self.recovering = False
        self._progress = time.monotonic()
        log.warning(
            "pipeline rebuilt",
            model=self.model,
            epoch=self._scheduler.epoch,
            layers=[(part.node, part.start, part.end) for part in layout.parts],
            seconds=round(time.monotonic() - started, 2),
            load_seconds=round(self.pipeline.load_s, 2),
            running=len(self._scheduler.running),
        )

    def _adopt(self, layout: Layout) -> None:
        """Books for other stages; requests that are too long for them end."""
        self.layout = layout
        self._limits = replace(self._limits, stages=len(layout.parts), capacity_tokens=layout.capacity_tokens)
        self._set_limits()
        self.meters.forget()
        self._scheduler.pace = Pace()
        if self._hold is not None:
            self._hold = replace(self._hold, hot_bytes=layout.hot_bytes)
        self.housekeeper.open(self._hold)
        for seq in self._scheduler.shrink():
            self._scheduler.cancel(seq)
            if (stream := self._streams.pop(seq, None)) is not None:
                stream.put(
                    RequestFailed(
                        f"{self.model}: the machines that are left have memory for {layout.capacity_tokens} "
                        "tokens, and this request has more"
                    )
                )

    def _set_limits(self) -> None:
        limits = replace(self._limits, mixes=self.pipeline.mixes)
        self._scheduler.limits = limits if self.pipeline.batches else replace(limits, places=1)

    def _count_death(self, lost: StageLost, *, elsewhere: bool) -> None:
        if deaths := self._deaths.count(elsewhere=elsewhere):
            raise ModelFailed(
                f"{self.model}: its stages died {deaths} times within a minute, last: {lost}; "
                "restart the server to try again"
            )

    # ---------------------------------------------------------------- the streams

    def _cancel(self, seq: SeqId) -> None:
        if self._streams.pop(seq, None) is not None:
            self._scheduler.cancel(seq)
            self._wake()

    def _wake(self) -> None:
        """Whatever lies in the queue wakes the task, which then looks at everything."""
        if not self._scheduler.in_flight:
            self._progress = time.monotonic()
        if self.pipeline.events.empty():
            self.pipeline.events.put_nowait(None)

    def _give_up(self, failure: OmlxError) -> None:
        log.error("model failed", model=self.model, why=str(failure))
        self.failure = failure
        self.recovering = False
        self._fail_streams(failure)

    def _blame(self, failure: StepFailed) -> None:
        """Who was alone in a forward that cannot be computed fails; of several, each is tried alone."""
        guilty = failure.seqs if len(failure.seqs) == 1 else self._scheduler.suspect(failure.seqs)
        for seq in guilty:
            self._scheduler.cancel(seq)
            if (stream := self._streams.pop(seq, None)) is not None:
                stream.put(RequestFailed(f"{self.model} could not compute this request"))

    def _fail_streams(self, failure: OmlxError) -> None:
        streams, self._streams = self._streams, {}
        for seq, stream in streams.items():
            self._scheduler.cancel(seq)
            stream.put(failure)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task never ends by itself unless the model failed; anything else is a defect of ours,
        and nobody may wait for ever because of it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine stopped", model=self.model, exc_info=error)
            self._give_up(ModelFailed(f"{self.model}: its engine stopped; restart the server"))
