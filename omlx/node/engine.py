"""One model's engine: requests in, tokens out. It keeps the pipeline full and outlives its stages.

A lost stage ends the epoch: the scheduler rewinds, the pipeline is rebuilt, and every running sequence
goes on to the same tokens. Clients see a pause.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf

import structlog

from omlx.errors import Closed, ModelFailed, OmlxError, Refused, RequestFailed, StageLost, StepFailed, TooLate
from omlx.ids import ModelId, SeqId
from omlx.node.cache_figures import cache_figures
from omlx.node.client import Measured
from omlx.node.health import ModelHealth, ModelState
from omlx.node.hold import Hold
from omlx.node.housekeeping import Housekeeper
from omlx.node.meters import Meters, ModelFigures
from omlx.node.pipeline import Pipeline
from omlx.node.scheduler import Scheduler
from omlx.node.sequence import Request, Token
from omlx.node.step import StepPlan, StepResult
from omlx.node.timeline import Timeline

log = structlog.get_logger()

DEATHS = 3
WITHIN_S = 60.0
"""So many lost epochs within so many seconds mark the model as failed."""
STALLED_AFTER_S = 30.0
"""Work on its way without a result for so long is reported as stalled."""


def look_ahead(step_s: float, stages: int) -> int:
    """Plans of one group to keep in flight, so that the stages never wait for the head.

    The head needs about a millisecond for a result and the next plan. Two hide it behind a step of tens of
    milliseconds of one stage; short steps need more, and stages that wait for each other. Each costs a row
    that is thrown away when an answer stops, and a newcomer a step of waiting.
    """
    if step_s > 0.02 and stages == 1:
        return 2
    return 3 if step_s > 0.008 else 4


class Stream:
    """One sequence's tokens, in order; an async iterator that ends after the token with a finish.

    Raises RequestFailed when this sequence cannot be computed, ModelFailed or Closed when the engine
    cannot go on. `aclose` cancels the sequence.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._items: asyncio.Queue[Token | OmlxError] = asyncio.Queue()  # bounded by max_tokens
        self._ended = False
        self.started = False
        self.cached_tokens = 0
        """Of the prompt, those that were laid back instead of computed; certain with the first token."""

    def put(self, item: Token | OmlxError) -> None:
        self.started = True
        self._items.put_nowait(item)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Token:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, OmlxError):
            self._ended = True
            raise item
        self._ended = item.finish is not None
        return item

    async def aclose(self) -> None:
        """Nobody wants the rest; safe to call at any time."""
        self._ended = True
        self._cancel()


class Engine:
    """Owns the scheduler, the pipeline and the streams; one task moves all three."""

    def __init__(
        self,
        model: ModelId,
        scheduler: Scheduler,
        pipeline: Pipeline,
        timeline: Timeline | None = None,
        hold: Hold | None = None,
    ) -> None:
        """`hold`: what may be kept, where the pipeline has a place for it."""
        self.model = model
        self.pipeline = pipeline
        self.failure: OmlxError | None = None
        self.recovering = False
        self.recoveries = 0
        self.meters = Meters(timeline)
        self.housekeeper = Housekeeper(pipeline, scheduler)
        self._hold = hold
        self._scheduler = scheduler
        self._streams: dict[SeqId, Stream] = {}
        self._deaths: deque[float] = deque()
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
        limits = replace(self._scheduler.limits, mixes=self.pipeline.mixes)
        self._scheduler.limits = limits if self.pipeline.batches else replace(limits, places=1)
        self.meters.begin(len(self.pipeline.stages), limits.mixes)
        self.housekeeper.open(self._hold)
        self._task = asyncio.create_task(self._run(), name=f"engine-{self.model}")
        self._task.add_done_callback(self._ended)

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises Full, ModelFailed or Closed at once."""
        if self.failure is not None:
            raise self.failure
        seq = self._scheduler.add(request)
        stream = Stream(lambda: self._cancel(seq))
        self._streams[seq] = stream
        self._wake()
        return stream

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
                except StageLost as lost:
                    await self._recover(lost)
        except (ModelFailed, Refused) as failure:
            self._give_up(failure)
            await self.pipeline.close()

    async def _serve(self) -> None:
        """Choose, run, account, until a stage is lost."""
        while True:
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
            if not failures:  # else whoever caused it is out, and it cannot come again
                self._count_death(lost)
            self._scheduler.rewind()
            started = time.monotonic()
            try:
                await self.pipeline.rebuild(self._scheduler.epoch)
            except StageLost as again:
                lost = again
                continue
            self.recovering = False
            self.recoveries += 1
            self.meters.begin(len(self.pipeline.stages), self._scheduler.limits.mixes)
            self._progress = time.monotonic()
            log.warning(
                "pipeline rebuilt",
                model=self.model,
                epoch=self._scheduler.epoch,
                seconds=round(time.monotonic() - started, 2),
                running=len(self._scheduler.running),
            )
            return

    def _count_death(self, lost: StageLost) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) >= DEATHS:
            raise ModelFailed(
                f"{self.model}: its stages died {DEATHS} times within {WITHIN_S:.0f} s, last: {lost}; "
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
