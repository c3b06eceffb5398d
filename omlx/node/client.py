"""The head's end of one stage: a conversation over the control socket, and the watch over its life.

It knows a process only by its socket; how the process came to be there is the placement's business.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from omlx.errors import BadModel, CannotSplit, LinkLost, Refused, StageLost, StepFailed, TooLate
from omlx.ids import Epoch
from omlx.node.step import StepResult
from omlx.node.wire import (
    Begin,
    Begun,
    Broken,
    Busy,
    Catalogue,
    Done,
    Failed,
    Holds,
    Leave,
    Load,
    Loaded,
    Loading,
    Ping,
    PlanTimes,
    Pong,
    Refusal,
    ToStage,
    control_frame,
    read_for_head,
)

PING_EVERY_S = 0.4
SILENT_ROUNDS = 5
"""A stage from which so many rounds bring no answer is taken for dead: in 2.4 s."""
LEAVE_WITHIN_S = 5.0

LoadProgress = Callable[[int, int], None]
"""(bytes read, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What plans took a stage."""

    stage: int
    epoch: Epoch
    times: tuple[PlanTimes, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a stage holds of blocks."""

    stage: int
    message: Holds | Catalogue


Event = StepResult | Measured | Kept | StageLost


class StageProcess(Protocol):
    """A started process that runs a StageHost."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str
    """Where its neighbours reach it."""
    node: str | None
    """The node id in the certificate that it shows its neighbours; None: their links are plain sockets."""

    @property
    def pid(self) -> int:
        """On its own machine."""

    async def end(self, within_s: float) -> None:
        """Wait for its end for so long, then kill it; returns when it is gone."""


Placement = Callable[[int, str], Awaitable[StageProcess]]
"""Starts the process of the stage with this index, on the node with this id ("": here)."""


class StageClient:
    """One stage, from its start to its end. `lost` says that it is gone for good."""

    def __init__(self, index: int, seat: str, process: StageProcess, report: Callable[[Event], None]) -> None:
        self.index = index
        """It may change from one epoch to the next."""
        self.seat = seat
        self.process = process
        self.loaded: Loaded | None = None
        self.pong: Pong | None = None
        self.round_trip_s: float | None = None
        """Of the latest ping; what else both processes do is in it."""
        self.lost: StageLost | None = None
        self._report = report
        self._answer: asyncio.Future[Loaded | Begun] | None = None
        self._progress: LoadProgress = lambda done, total: None
        self._epoch: Epoch | None = None
        self._loading = False
        self._pings = 0
        self._pinged = 0.0
        self._news = asyncio.Event()
        """Set by a pong and by the loss."""
        self._on = f" on node {process.node[:8]}" if process.node is not None else ""
        self._listening = asyncio.create_task(self._listen(), name=f"stage-{seat}-listen")
        self._pinging: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"stage {self.index}{self._on}"

    async def load(self, message: Load, progress: LoadProgress, within_s: float) -> Loaded:
        """Read a span; one that holds another span keeps the layers that are in both.

        Raises BadModel or CannotSplit as the stage says, StageLost when it dies or dawdles.
        """
        self._progress = progress
        self._loading = True
        self._epoch = None  # what it still says of the one before is of no interest
        self.loaded = None
        answer = await self._ask(message, within_s)
        assert isinstance(answer, Loaded)
        self.loaded = answer
        if self._pinging is None:
            self._pinging = asyncio.create_task(self._watch(), name=f"stage-{self.seat}-ping")
        return answer

    async def begin(self, message: Begin, within_s: float) -> None:
        """Enter an epoch. Raises StageLost when the stage or one of its neighbours does not get there."""
        self._epoch = message.epoch
        answer = await self._ask(message, within_s)
        assert isinstance(answer, Begun)

    async def alive(self) -> bool:
        """Whether its process answers. A neighbour's complaint may arrive before the end of the one that
        it complains about."""
        try:
            async with asyncio.timeout(SILENT_ROUNDS * PING_EVERY_S):
                await self._answered(self._ping())
        except TimeoutError:
            self._lose(TooLate(f"{self.name} does not answer", self.index))
        return self.lost is None

    async def carries(self, size: int, within_s: float) -> float | None:
        """Bytes/s of the link, there and back, by a ping that weighs `size` bytes; None where that is late.

        What else both processes do counts, so it is of use in idle moments alone, and more is carried than is
        told where a round trip varies by more than the ballast takes.
        """
        empty_s, sent = self.round_trip_s, time.monotonic()
        try:
            async with asyncio.timeout(within_s):
                await self._answered(self._ping(bytes(size)))
        except TimeoutError:
            return None
        if self.lost is not None or empty_s is None:
            return None
        took_s = time.monotonic() - sent - empty_s
        return 2 * size / took_s if took_s > 0 else None

    async def _answered(self, number: int) -> None:
        """Until that ping has come back, or the stage is lost."""
        while self.lost is None and (self.pong is None or self.pong.number < number):
            self._news.clear()
            await self._news.wait()

    def send(self, message: ToStage) -> None:
        """Queue a message for the stage; its loss is reported as an event, not here."""
        self._write(message)

    async def close(self, within_s: float = LEAVE_WITHIN_S) -> None:
        """Ask the process to leave, kill it when it does not, wait until it is gone."""
        if self.lost is None:
            self._write(Leave())
        await self.process.end(within_s if self.lost is None else 0.0)
        tasks = [task for task in (self._listening, self._pinging) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.process.writer.close()

    async def _ask(self, message: ToStage, within_s: float) -> Loaded | Begun:
        if self.lost is not None:
            raise self.lost
        self._answer = asyncio.get_running_loop().create_future()
        self._write(message)
        try:
            async with asyncio.timeout(within_s):
                return await self._answer
        except TimeoutError:
            late = TooLate(f"{self.name} did not answer within {within_s:.0f} s", self.index)
            self._lose(late)
            raise late from None
        finally:
            self._answer = None

    def _write(self, message: ToStage) -> None:
        if not self.process.writer.is_closing():
            self.process.writer.write(control_frame(message))

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await read_for_head(self.process.reader))
        except StageLost as lost:
            self._lose(LinkLost(f"{self.name}: {lost}", self.index))

    def _take(self, message: object) -> None:
        match message:
            case Done(result):
                self._report(result)
            case Busy(epoch, times):
                self._report(Measured(self.index, epoch, times))
            case Holds() | Catalogue():
                self._keep(message)
            case Pong():
                self._hear(message)
            case Loading(done, total):
                self._progress(done, total)
            case Loaded() | Begun():
                self._settle(message)
            case Refusal(error, text):
                self._settle(_refused(error, text))
            case Broken(epoch, text):
                self._break(epoch, LinkLost(f"{self.name}, epoch {epoch}: {text}", self.index))
            case Failed(epoch, seqs, text):
                self._break(epoch, StepFailed(f"{self.name}: {text}", seqs, self.index))

    def _hear(self, pong: Pong) -> None:
        self.pong = pong
        if pong.number == self._pings and not pong.ballast:
            self.round_trip_s = time.monotonic() - self._pinged
        self._news.set()

    def _keep(self, message: Holds | Catalogue) -> None:
        if not self._loading:  # else it is about layers that it gives up
            self._report(Kept(self.index, message))

    def _break(self, epoch: Epoch, broken: StageLost) -> None:
        if epoch == self._epoch:  # else a late word about an epoch that is over
            self._settle(broken)
            self._report(broken)

    def _settle(self, answer: Loaded | Begun | Exception) -> None:
        self._loading = self._loading and not isinstance(answer, Loaded)
        if self._answer is None or self._answer.done():
            return
        if isinstance(answer, Exception):
            self._answer.set_exception(answer)
        else:
            self._answer.set_result(answer)

    def _lose(self, lost: StageLost) -> None:
        if self.lost is None:
            self.lost = lost
            self._news.set()
            self._settle(lost)
            self._report(lost)

    def _ping(self, ballast: bytes = b"") -> int:
        self._pings += 1
        self._pinged = time.monotonic()
        self._write(Ping(self._pings, ballast))
        return self._pings

    async def _watch(self) -> None:
        """Counts rounds without an answer, not seconds: a head that was busy itself accuses nobody."""
        silent = answered = 0
        while self.lost is None:
            self._ping()
            await asyncio.sleep(PING_EVERY_S)
            newest = self.pong.number if self.pong is not None else 0
            silent = 0 if newest > answered else silent + 1
            answered = newest
            if silent >= SILENT_ROUNDS:
                silent_s = silent * PING_EVERY_S
                self._lose(TooLate(f"{self.name} has been silent for {silent_s:.0f} s", self.index))


def _refused(name: str, message: str) -> Refused:
    return CannotSplit(message) if name == "CannotSplit" else BadModel(message)
