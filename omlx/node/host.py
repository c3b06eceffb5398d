"""StageHost: what runs in a stage's process, between the control socket and the stage.

The main thread computes; one thread reads the control socket and answers pings at once, so that a
stage in a long step is told from a dead one. When the head's end closes, the process ends.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import NoReturn

import mlx.core as mx
import msgspec

from omlx.errors import BadModel, StageLost, StepFailed
from omlx.ids import Epoch
from omlx.node.links import Link, MxLink, TcpLink
from omlx.node.loader import Held, held_weights, load_span
from omlx.node.memory import Memory, free_bytes, peak_rss_bytes
from omlx.node.rows import can_share
from omlx.node.slab import has_states, places_of, storable, trimmable
from omlx.node.slicing import Cut
from omlx.node.stage import Finished, Stage
from omlx.node.step import StepPlan, StepResult
from omlx.node.store import Store
from omlx.node.tls import Security
from omlx.node.wire import (
    Begin,
    Begun,
    Broken,
    Busy,
    CacheSpec,
    Catalogue,
    Conversation,
    Done,
    Failed,
    Fetch,
    Holds,
    Leave,
    Load,
    Loaded,
    Loading,
    Ping,
    PlanTimes,
    Pong,
    Purge,
    Refusal,
    Spill,
    Step,
    ToHead,
    ToStage,
    control_frame,
    read_for_stage,
)

MakeStage = Callable[[Cut, Callable[[Finished], None]], Stage]
INBOX = 1024
"""Control messages that may wait; the head has a few plans in flight for each stage."""
TELL_BUSY_EVERY_S = 0.05
"""A fit needs samples, not each of them at once."""
LOOK_FOR_HEAD_EVERY_S = 1.0
NEIGHBOURS = 128
"""Connections that may wait to be looked at: one is the neighbour's, and strangers may call."""


class StageHost:
    """Owns the control socket, the listener for the neighbour before, and the stage.

    `security`: what it shows its neighbours and wants of them; None: plain sockets. `head_silent_s`: how
    long a head on another machine may say nothing, which has pings to send; None: its end is always seen.
    """

    def __init__(
        self,
        control: Conversation,
        make_stage: MakeStage = Stage,
        security: Security | None = None,
        head_silent_s: float | None = None,
    ) -> None:
        self._control = control
        self._security = security
        self._head_silent_s = head_silent_s
        self._heard: float | None = time.monotonic()
        """When the head last said something; None while it owes no word, because the weights are read."""
        self._make_stage = make_stage
        self._sending = threading.Lock()
        self._inbox: Queue[ToStage] = Queue(INBOX)
        self._listener: socket.socket | None = None
        self._stage: Stage | None = None
        self._store: Store | None = None
        self._group: mx.distributed.Group | None = None
        self._links: tuple[Link, ...] = ()
        self._busy: list[PlanTimes] = []
        self._busy_told = 0.0
        self._memory = Memory()
        self._newest: Epoch = Epoch(0)
        """That the socket thread has seen the beginning of; the compute thread may be behind."""

    def run(self) -> None:
        """Serve until the head says Leave or goes away."""
        threading.Thread(target=self._read, name="control-in", daemon=True).start()
        if self._head_silent_s is not None:
            args = (self._head_silent_s,)
            threading.Thread(target=self._watch_head, args=args, name="head-watch", daemon=True).start()
        while True:
            try:
                message = self._inbox.get(timeout=TELL_BUSY_EVERY_S if self._busy else None)
            except Empty:
                self._tell_busy(time.monotonic())
                self._memory.rest()
                continue
            match message:
                case Load():
                    self._load(message)
                    self._heard = time.monotonic()
                case Begin():
                    self._begin(message)
                case Step(plan):
                    self._step(plan)
                case Leave():
                    return
                case Ping() | Fetch() | Spill() | Purge():
                    raise AssertionError("the socket thread takes these")

    # ---------------------------------------------------------------- the socket thread

    def _read(self) -> None:
        try:
            while True:
                message = read_for_stage(self._control)
                self._heard = None if isinstance(message, Load) else time.monotonic()
                if isinstance(message, Ping):
                    self._send(self._pong(message))
                    continue
                if isinstance(message, Fetch | Spill | Purge):
                    if self._store is not None:
                        self._store.ask(message)
                    continue
                if isinstance(message, Begin | Load):
                    # The compute thread may wait for a neighbour of an epoch that is over now.
                    self._newest = message.epoch if isinstance(message, Begin) else Epoch(self._newest + 1)
                    for link in self._links:
                        link.close()
                self._inbox.put(message)
        except StageLost:
            # The head is gone, and with it everybody whom an answer would reach. The compute thread
            # may be deep in a step or a hung group: only the process's end is certain.
            os._exit(0)

    def _watch_head(self, silent_s: float) -> None:
        """A cable pulled out ends no connection; without this, the weights would stay here for hours."""
        while True:
            time.sleep(LOOK_FOR_HEAD_EVERY_S)
            if (heard := self._heard) is not None and time.monotonic() - heard > silent_s:
                sys.stderr.write(f"stage: nothing came from the head for {silent_s:.0f} s\n")
                os._exit(0)

    def _pong(self, ping: Ping) -> Pong:
        held = mx.get_active_memory() + mx.get_cache_memory()
        return Pong(ping.number, peak_rss_bytes(), held, free_bytes(), ping.ballast)

    def _send(self, message: ToHead) -> None:
        with self._sending:
            try:
                self._control.sendall(control_frame(message))
            except OSError:
                os._exit(0)

    # ---------------------------------------------------------------- the compute thread

    def _load(self, load: Load) -> None:
        self._memory.share(load.memory_share)
        try:
            if load.ring:
                self._group = join_group(load.ring, load.rank, load.backend)
            held = self._give_up_stage()
            folder = Path(load.folder).expanduser()
            cut = load_span(folder, load.start, load.end, self._loading, load.kv_bits, held)
        except BadModel as error:
            self._send(Refusal(type(error).__name__, str(error)))
            return
        del held
        self._stage = self._make_stage(cut, self._finished)
        if load.cache is not None and storable(cut.prototypes):
            self._stage.blocks.store = self._store = open_store(load.cache, places_of(cut), self._send)
        if self._listener is None:
            self._listener = socket.create_server((load.listen_host, 0), backlog=NEIGHBOURS)
        port: int = self._listener.getsockname()[1]
        mixes = self._stage.mixed is not None
        self._send(
            Loaded(
                port,
                mx.get_active_memory(),
                peak_rss_bytes(),
                mixes or can_share(cut.prototypes),
                mixes,
                storable=self._store is not None,
                trimmable=trimmable(cut.prototypes),
                recurrent=has_states(cut.prototypes),
            )
        )
        if self._store is not None:
            self._store.tell_catalogue()

    def _give_up_stage(self) -> Held:
        """Of a stage that is to hold another span: its weights, and nothing else."""
        if self._stage is None:
            return {}
        self._end_epoch()
        if self._store is not None:
            self._store.close()
            self._store = None
        held = held_weights(self._stage.cut)
        self._stage = None
        return held

    def _loading(self, done: int, total: int) -> None:
        self._send(Loading(done, total))

    def _begin(self, begin: Begin) -> None:
        assert self._stage is not None
        self._end_epoch()
        try:
            source, sink = self._neighbours(begin)
        except StageLost as lost:
            self._send(Broken(begin.epoch, str(lost)))
            return
        self._links = tuple(link for link in (source, sink) if link is not None)
        self._stage.begin(begin.epoch, source, sink)
        self._send(Begun(begin.epoch))

    def _neighbours(self, begin: Begin) -> tuple[Link | None, Link | None]:
        if begin.downstream is None:
            return None, None
        if (group := self._group) is not None:
            rank, size, stream = group.rank(), group.size(), mx.new_stream(mx.cpu)
            before, behind = (rank - 1) % size, (rank + 1) % size
            return MxLink(group, before, stream, give_up), MxLink(group, behind, stream, give_up)
        # Connect first, into the neighbour's backlog: so nobody waits in a circle.
        assert self._listener is not None
        sink = TcpLink.connect(begin.downstream, begin, self._security, begin.behind)
        try:
            over = partial(self._is_over, begin.epoch)
            return TcpLink.accept(self._listener, begin, over, self._security, begin.before), sink
        except StageLost:
            sink.close()
            raise

    def _is_over(self, epoch: Epoch) -> bool:
        return self._newest > epoch

    def _step(self, plan: StepPlan) -> None:
        """Carry out one plan; where no other one waits, down to its end."""
        assert self._stage is not None
        if plan.epoch != self._stage.epoch:
            return  # sent before the head knew that this epoch was over
        try:
            self._stage.step(plan)
            self._memory.trim(plan.id)
            if self._inbox.empty():
                self._stage.settle()
        except StepFailed as failed:
            # Said before the neighbours can notice: the head must hear the reason first.
            log_traceback(failed)
            self._send(Failed(plan.epoch, failed.seqs, str(failed)))
            self._end_epoch()
        except StageLost as lost:
            self._end_epoch()
            self._send(Broken(plan.epoch, str(lost)))

    def _finished(self, finished: Finished) -> None:
        """What the stage has carried out: drawn tokens at once, times now and then.

        The stage's second thread calls it too; it is idle while the compute thread waits for a message.
        """
        assert self._stage is not None
        plan = finished.plan
        if self._stage.cut.last:
            self._send(Done(StepResult(plan.id, plan.epoch, finished.sampled)))
        self._busy.append(finished.times)
        if (now := time.monotonic()) - self._busy_told > TELL_BUSY_EVERY_S:
            self._tell_busy(now)

    def _tell_busy(self, now: float) -> None:
        assert self._stage is not None and self._stage.epoch is not None
        self._send(Busy(self._stage.epoch, tuple(self._busy)))
        self._busy_told = now
        self._busy.clear()

    def _end_epoch(self) -> None:
        assert self._stage is not None
        self._stage.close()  # first: until then its second thread may tell of plans
        self._busy.clear()
        self._links = ()


def open_store(spec: CacheSpec, places: list[int], tell: Callable[[Holds | Catalogue], None]) -> Store:
    """In RAM alone where the SSD's folder is of no use."""
    try:
        return Store(spec, places, tell)
    except OSError as error:
        sys.stderr.write(f"stage: nothing is kept on the SSD: {error}\n")
        return Store(msgspec.structs.replace(spec, folder=None), places, tell)


def log_traceback(error: StageLost) -> None:
    """Where MLX or a model raised, for whoever looks into it; without values, so without prompts."""
    traceback.print_exception(error)


def give_up(lost: StageLost) -> NoReturn:
    """A broken mx.distributed group cannot be mended in its process."""
    sys.stderr.write(f"stage: {lost}\n")
    os._exit(3)


def join_group(ring: tuple[str, ...], rank: int, backend: str) -> mx.distributed.Group:
    """Waits without limit and holds the GIL: the head's load deadline ends a group that never forms."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as hosts:
        json.dump([[address] for address in ring], hosts)
    os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"] = hosts.name, str(rank)
    try:
        return mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise BadModel(f"link {backend}: mx.distributed cannot start it here: {error}") from error
    finally:
        Path(hosts.name).unlink()
