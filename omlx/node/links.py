"""How an array gets from one stage to the next: `give` here, `take` there.

Hidden states go from each stage to the one behind it, drawn tokens from the last to the first.

Three ways behind the same two methods: `TcpLink`, framed sockets with a thread each; `QueueLink`, in
memory, for stages in one process; `MxLink`, over mx.distributed (ring, or JACCL on Thunderbolt RDMA).
"""

import hmac
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np
import structlog

from omlx.errors import LinkLost, OutOfStep, StageLost, TooLate
from omlx.ids import Epoch, PlanId
from omlx.node.door import Door
from omlx.node.tls import WELCOME, Security, hang_up, introduce, wrap
from omlx.node.wire import (
    DTYPES,
    HELLO,
    HIDDEN,
    Begin,
    Header,
    Tag,
    pack_header,
    parse_header,
    read_exactly,
    read_frame,
)
from omlx.node.wire import HEADER as HEADER_LAYOUT

log = structlog.get_logger()

CONNECT_WITHIN_S = 10.0
AGAIN_WITHIN_S = 2.0
"""So long a neighbour that hangs up is tried again: it leaves the door of an epoch that is over within a
tenth of a second of hearing so, and opens the next one."""
DEPTH = 4
"""Hidden states that may lie on each side of a link: a slow neighbour pushes back, nothing piles up."""


class Link(Protocol):
    """One direction between two neighbours."""

    def give(self, tag: Tag, hidden: mx.array) -> None:
        """Hand over an evaluated array [B, L, hidden], or [B, 1, 1] tokens. Raises LinkLost, TooLate."""

    def ready(self) -> bool:
        """Whether `take` would not wait; where that cannot be told, False."""

    def take(self, tag: Tag) -> mx.array:
        """Wait for the array with this tag. Raises LinkLost, TooLate, OutOfStep."""

    def close(self) -> None:
        """Let go of this end; safe to call twice, and from another thread than the one that waits in
        `give` or `take`, which then ends with LinkLost."""


def _same(tag: Tag, wanted: Tag) -> None:
    if tag != wanted:
        raise OutOfStep(f"a hidden state of {tag} came where {wanted} was due")


@dataclass(slots=True)
class QueueLink:
    """Both ends in one process; bounded, with the same deadline rules as a socket."""

    deadline_s: float
    _items: Queue[tuple[Tag, mx.array]] = field(default_factory=lambda: Queue(DEPTH))

    def give(self, tag: Tag, hidden: mx.array) -> None:
        try:
            self._items.put((tag, hidden), timeout=self.deadline_s)
        except Full:
            raise TooLate("the next stage takes nothing") from None

    def ready(self) -> bool:
        return not self._items.empty()

    def take(self, tag: Tag) -> mx.array:
        try:
            found, hidden = self._items.get(timeout=self.deadline_s)
        except Empty:
            raise TooLate("the stage before gives nothing") from None
        _same(found, tag)
        return hidden

    def close(self) -> None:
        pass


# ------------------------------------------------------------------ our own framed sockets


class TcpLink:
    """One TCP connection and one thread: a writer on the giving side, a reader on the taking side.

    Bytes of a hidden state are copied once on the way in and not at all on the way out.
    """

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._out: Queue[tuple[bytes, memoryview] | None] = Queue(DEPTH)
        self._in: Queue[tuple[Header, bytearray] | StageLost] = Queue(DEPTH)
        self._lost: StageLost | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        begin: Begin,
        security: Security | None = None,
        peer: str | None = None,
    ) -> "TcpLink":
        """The giving side, to node `peer` (None: any of the cluster). Shows the epoch and the secret first.

        The neighbour may be connecting itself before it looks at us, in a circle: so the handshake is the
        thread's, and what it finds wrong is raised by `give`.
        """

        def reach() -> socket.socket:
            return _reach(address, security, begin.join_within_s)

        link = cls(reach(), begin.step_within_s)
        where = f"{address[0]}:{address[1]}"
        return link._started("link-out", lambda: link._write(begin, peer, reach, where))

    @classmethod
    def accept(
        cls,
        listener: socket.socket,
        begin: Begin,
        over: Callable[[], bool],
        security: Security | None = None,
        peer: str | None = None,
    ) -> "TcpLink":
        """The taking side. Who does not show this epoch and the secret, or with `security` that it is
        node `peer` (None: any of the cluster), is hung up on.

        Raises TooLate when nobody did before the deadline, or when `over` says that the epoch is.
        """
        with Door(listener, security, peer, lambda sock, _: _shown(sock, begin)) as door:
            sock = door.wait(time.monotonic() + begin.join_within_s, over)
        if sock is None:
            raise TooLate("the stage before did not connect")
        try:
            sock.sendall(WELCOME)
        except OSError as error:
            sock.close()
            raise LinkLost(f"the stage before is gone: {error}") from error
        link = cls(sock, begin.step_within_s)
        return link._started("link-in", link._read)

    def _started(self, name: str, work: Callable[[], None]) -> "TcpLink":
        threading.Thread(target=work, name=name, daemon=True).start()
        return self

    def give(self, tag: Tag, hidden: mx.array) -> None:
        if self._lost is not None:
            raise self._lost
        name = str(hidden.dtype).removeprefix("mlx.core.")
        # numpy's protocol knows no bfloat16, and a strided view no plain bytes.
        plain = mx.contiguous(hidden.view(mx.uint16) if name == "bfloat16" else hidden)
        mx.eval(plain)
        body = memoryview(cast(Any, plain)).cast("B")  # its stub does not show the buffer protocol
        b, n, h = hidden.shape
        header = pack_header(HIDDEN, tag, len(body), DTYPES.index(name), (b, n, h))
        try:
            self._out.put((header, body), timeout=self._deadline_s)
        except Full:
            raise TooLate("the next stage takes nothing") from None
        if self._lost is not None:  # while it waited for room
            raise self._lost

    def ready(self) -> bool:
        return not self._in.empty()

    def take(self, tag: Tag) -> mx.array:
        try:
            item = self._in.get(timeout=self._deadline_s)
        except Empty:
            raise TooLate("the stage before gives nothing") from None
        if isinstance(item, StageLost):
            raise item
        header, body = item
        _same(header.tag, tag)
        return _array(header, body)

    def close(self) -> None:
        # First: `_join` looks at it once it has taken another socket.
        self._lost = self._lost or LinkLost("this end was closed")
        hang_up(self._sock)  # its thread closes it: until then the number must not be another file's
        _drain(self._in)  # a thread that waits for room there sees the closed socket next
        _drain(self._out)
        with suppress(Full):  # and one that waits for an item sees this
            self._in.put_nowait(self._lost)
        with suppress(Full):
            self._out.put_nowait(None)

    def _join(self, begin: Begin, peer: str | None, reach: Callable[[], socket.socket]) -> None:
        """Returns once the neighbour has seen epoch and secret. Raises LinkLost, OSError.

        It may still wait at the door of the epoch before, and hang up on us together with that: so it is
        tried again for a while.
        """
        hello = pack_header(HELLO, Tag(begin.epoch, PlanId(0), 0), len(begin.secret)) + begin.secret
        end, pause_s = None, 0.05
        while True:
            try:
                introduce(self._sock, peer)
                _be_seen(self._sock, hello)
            except (OSError, LinkLost):
                now = time.monotonic()
                end = end or now + AGAIN_WITHIN_S
                if self._lost is not None or now > end:
                    raise
            else:
                return
            self._sock.close()
            time.sleep(pause_s)
            pause_s *= 2
            self._sock = reach()
            if self._lost is not None:  # closed meanwhile, and that hung up the socket before
                raise self._lost

    def _write(self, begin: Begin, peer: str | None, reach: Callable[[], socket.socket], where: str) -> None:
        try:
            self._join(begin, peer, reach)
            self._sock.settimeout(None)
            while (item := self._out.get()) is not None:
                header, body = item
                if len(body) < 65536:
                    self._sock.sendall(header + body)
                else:
                    self._sock.sendall(header)
                    self._sock.sendall(body)
        except OSError as error:
            self._lost = self._lost or LinkLost(f"the next stage is gone: {error}")
        except LinkLost as lost:
            if self._lost is None:
                self._lost = LinkLost(f"the next stage at {where}: {lost}")
                log.warning("link refused", address=where, why=str(lost))
        finally:
            self._sock.close()
            _drain(self._out)  # who waits in `give` for room is told now, not at its deadline

    def _read(self) -> None:
        self._sock.settimeout(None)
        try:
            while True:
                self._in.put(read_frame(self._sock))
        except StageLost as lost:
            self._in.put(lost)
        finally:
            self._sock.close()


def _drain(queue: Queue[Any]) -> None:
    with suppress(Empty):
        while True:
            queue.get_nowait()


def _reach(address: tuple[str, int], security: Security | None, within_s: float) -> socket.socket:
    """Raises LinkLost."""
    try:
        sock = wrap(socket.create_connection(address, timeout=CONNECT_WITHIN_S), security, server=False)
    except OSError as error:
        raise LinkLost(f"cannot reach the next stage at {address[0]}:{address[1]}: {error}") from error
    sock.settimeout(within_s)
    return sock


def _be_seen(sock: socket.socket, hello: bytes) -> None:
    sock.sendall(hello)
    if sock.recv(1) != WELCOME:
        raise LinkLost("it hung up on us")


def _shown(sock: socket.socket, begin: Begin) -> socket.socket | None:
    """None unless the one who connected shows the epoch and the secret. Raises LinkLost, TooLate."""
    head = bytearray(HEADER_LAYOUT.size)
    read_exactly(sock, memoryview(head))
    header = parse_header(head)
    if header.kind != HELLO or header.tag.epoch != begin.epoch or header.length != len(begin.secret):
        return None
    shown = bytearray(header.length)
    read_exactly(sock, memoryview(shown))
    return sock if hmac.compare_digest(bytes(shown), begin.secret) else None


def _array(header: Header, body: bytearray) -> mx.array:
    name = DTYPES[header.dtype]
    numpy_name = "uint16" if name == "bfloat16" else name
    array = mx.array(np.frombuffer(body, dtype=numpy_name).reshape(header.shape))
    return array.view(mx.bfloat16) if name == "bfloat16" else array


# ------------------------------------------------------------------ mx.distributed


@dataclass(slots=True)
class MxLink:
    """Over an mx.distributed group, on the compute thread.

    The group has no framing, so a header of seven int32 travels first. It has no deadline either: a peer
    that vanishes hangs the process, and the head, which misses the step's result, kills it. The first
    error is fatal to the process: a second receive on a broken group hangs for ever.
    """

    group: mx.distributed.Group
    peer: int
    """The neighbour's rank."""
    stream: mx.Stream
    fatal: Callable[[StageLost], None]
    """Called with the first error; ends the process."""

    def give(self, tag: Tag, hidden: mx.array) -> None:
        name = str(hidden.dtype).removeprefix("mlx.core.")
        head = mx.array([tag.epoch, tag.plan, tag.part, DTYPES.index(name), *hidden.shape], mx.int32)
        try:
            for array in (head, hidden):
                mx.eval(mx.distributed.send(array, self.peer, group=self.group, stream=self.stream))
        except RuntimeError as error:
            self.fatal(LinkLost(f"mx.distributed: {error}"))

    def ready(self) -> bool:
        return False

    def take(self, tag: Tag) -> mx.array:
        try:
            head = mx.distributed.recv((7,), mx.int32, self.peer, group=self.group, stream=self.stream)
            fields: list[int] = head.tolist()  # type: ignore[assignment]
            epoch, plan, part, dtype, b, n, h = fields
            _same(Tag(Epoch(epoch), PlanId(plan), part), tag)
            hidden = mx.distributed.recv(
                (b, n, h), getattr(mx, DTYPES[dtype]), self.peer, group=self.group, stream=self.stream
            )
            mx.eval(hidden)
        except RuntimeError as error:
            self.fatal(LinkLost(f"mx.distributed: {error}"))
            raise
        return hidden

    def close(self) -> None:
        pass
