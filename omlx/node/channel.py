"""The control connection between two machines: two TLS connections, one for each direction.

OpenSSL's objects do not bear a read and a write at once from two threads, and a stage reads its control
socket in one thread while it answers in others. `Channel` is the stage's end, blocking; `Streams` the
head's, on asyncio.
"""

import asyncio
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from omlx.errors import LinkLost, TooLate
from omlx.node.door import VISITORS, Door
from omlx.node.tls import (
    HANDSHAKE_WITHIN_S,
    WELCOME,
    Security,
    Stranger,
    hang_up,
    introduce,
    no_entry,
    node_shown,
    usable,
    wrap,
)
from omlx.node.wire import read_exactly

TO_SERVER, FROM_SERVER = b"oMLX>", b"oMLX<"
"""The first bytes of each half, seen from the one who connects; its nonce follows."""
NONCE_BYTES = 16
PAIRED = b"\x11"
"""The server's word, on the half that it writes, that both halves are here."""
CLOSE_WITHIN_S = 1.0


class Channel:
    """Two TLS sockets that look like one: what read_for_stage and a sender need of a socket.

    One thread may read while another writes; two that write must take turns, as on any socket.
    """

    def __init__(self, inward: socket.socket, outward: socket.socket, peer: str | None) -> None:
        self.peer = peer
        """The node id that the other side's certificates show."""
        self._inward = inward
        self._outward = outward
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self.settimeout(None)
        for sock in (inward, outward):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        security: Security,
        peer: str | None,
        within_s: float = HANDSHAKE_WITHIN_S,
    ) -> "Channel":
        """To node `peer` (None: any of the cluster); back once the other side has both halves.

        Raises LinkLost with the reason.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        end = time.monotonic() + within_s
        with ExitStack() as opened:
            try:
                outward, found = _half(address, security, peer, TO_SERVER + nonce, end)
                opened.callback(outward.close)
                inward, _ = _half(address, security, found, FROM_SERVER + nonce, end)
                opened.callback(inward.close)
                word = bytearray(1)
                read_exactly(inward, memoryview(word))
                _check_paired(word)
                channel = cls(inward, outward, found)
            except (LinkLost, TooLate) as error:
                raise LinkLost(f"{address[0]}:{address[1]}: {error}") from error
            except (Stranger, OSError) as error:
                raise LinkLost(f"{address[0]}:{address[1]}: {no_entry(error)}") from error
            opened.pop_all()
        return channel

    @classmethod
    def accept(
        cls,
        listener: socket.socket,
        security: Security,
        peer: str | None,
        within_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> "Channel":
        """The first one that node `peer` (None: any of the cluster) opens. Strangers are turned away and
        logged meanwhile.

        Raises TooLate when nobody came in time, or when `over` says so; LinkLost for a dead listener.
        """
        end = time.monotonic() + within_s
        halves = _Halves()
        try:
            with Door(listener, security, peer, _announced) as door:
                while (half := door.wait(end, over)) is not None:
                    if (pair := halves.pair(half)) is None:
                        continue
                    inward, outward = pair
                    with suppress(OSError):  # it went away again: wait for the next one
                        outward.sock.sendall(PAIRED)
                        return cls(inward.sock, outward.sock, half.peer)
                    inward.sock.close()
                    outward.sock.close()
        finally:
            halves.close()
        raise TooLate("nobody opened the control connection")

    def recv_into(self, view: memoryview) -> int:
        """As a socket's; 0 at the end. Raises OSError, TimeoutError among them."""
        with self._reading:
            return self._inward.recv_into(view)

    def sendall(self, data: bytes | memoryview) -> None:
        """As a socket's."""
        with self._writing:
            self._outward.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        """Of each single read and write; None: none."""
        self._inward.settimeout(seconds)
        self._outward.settimeout(seconds)

    def close(self) -> None:
        """Wakes who waits in another thread; safe to call twice."""
        for sock, using in ((self._inward, self._reading), (self._outward, self._writing)):
            hang_up(sock)
            # Its number must not become another file's while a thread is still inside OpenSSL.
            if using.acquire(timeout=CLOSE_WITHIN_S):
                sock.close()
                using.release()


def _half(
    address: tuple[str, int], security: Security, peer: str | None, shows: bytes, end: float
) -> tuple[socket.socket, str | None]:
    """A socket that is let in and has said what it is, with what is left until `end` as its timeout."""
    plain = socket.create_connection(address, timeout=_left(end))
    sock = wrap(plain, security, server=False)
    try:
        sock.settimeout(_left(end))
        found = introduce(sock, peer)
        sock.sendall(shows)
        sock.settimeout(_left(end))
    except BaseException:
        sock.close()
        raise
    return sock, found


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)  # 0 would mean: do not wait at all


def _check_paired(word: bytes | bytearray) -> None:
    if word != PAIRED:
        raise LinkLost("it is not the end of a control connection")


# ------------------------------------------------------------------ the side that listens


@dataclass(frozen=True, slots=True)
class _Half:
    sock: socket.socket
    peer: str | None
    inward: bool
    nonce: bytes
    since: float = field(default_factory=time.monotonic)


def _announced(sock: socket.socket, peer: str | None) -> _Half | None:
    shown = bytearray(len(TO_SERVER) + NONCE_BYTES)
    read_exactly(sock, memoryview(shown))
    way, nonce = bytes(shown[: len(TO_SERVER)]), bytes(shown[len(TO_SERVER) :])
    return _Half(sock, peer, way == TO_SERVER, nonce) if way in (TO_SERVER, FROM_SERVER) else None


class _Halves:
    """Those whose other half is not there yet."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str | None, bytes], _Half] = {}

    def pair(self, half: _Half) -> tuple[_Half, _Half] | None:
        """(inward, outward) once both are here: of one node, with one nonce."""
        self._let_go(time.monotonic() - HANDSHAKE_WITHIN_S)
        other = self._waiting.pop((half.peer, half.nonce), None)
        if other is None:
            self._waiting[half.peer, half.nonce] = half
            return None
        if other.inward == half.inward:
            other.sock.close()
            half.sock.close()
            return None
        return (half, other) if half.inward else (other, half)

    def close(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].sock.close()

    def _let_go(self, before: float) -> None:
        for key, half in list(self._waiting.items()):
            if half.since < before or len(self._waiting) >= VISITORS:
                self._waiting.pop(key).sock.close()


# ------------------------------------------------------------------ the head's end, on asyncio


@dataclass(frozen=True, slots=True)
class Streams:
    """A Channel's other end: read from `reader`, write to `writer`, `close` both halves."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: str
    _inward: asyncio.StreamWriter

    def close(self) -> None:
        """At once: a peer that is gone would never answer a goodbye."""
        self.writer.transport.abort()
        self._inward.transport.abort()


async def open_streams(
    address: tuple[str, int], security: Security, peer: str | None, within_s: float = HANDSHAKE_WITHIN_S
) -> Streams:
    """Open a Channel to a stage that waits in `Channel.accept`. Raises LinkLost with the reason."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    where = f"{address[0]}:{address[1]}"
    opened: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(within_s):
            context = usable(security, server=False)
            _, writer, found = await _half_stream(address, context, peer, TO_SERVER + nonce, opened)
            reader, inward, _ = await _half_stream(address, context, found, FROM_SERVER + nonce, opened)
            _check_paired(await reader.readexactly(1))
            opened.clear()
            return Streams(reader, writer, found, inward)
    except TimeoutError as error:
        raise LinkLost(f"{where}: no control connection within {within_s:g} s") from error
    except asyncio.IncompleteReadError as error:
        raise LinkLost(f"{where}: the other side does not let us in") from error
    except LinkLost as error:
        raise LinkLost(f"{where}: {error}") from error
    except (Stranger, OSError) as error:
        raise LinkLost(f"{where}: {no_entry(error)}") from error
    finally:
        for half in opened:
            half.transport.abort()


async def _half_stream(
    address: tuple[str, int],
    context: ssl.SSLContext,
    peer: str | None,
    shows: bytes,
    opened: list[asyncio.StreamWriter],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Whatever it raises, the connection is in `opened`."""
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="")
    opened.append(writer)
    found = node_shown(writer.get_extra_info("peercert"), peer)
    if await reader.readexactly(1) != WELCOME:
        raise LinkLost("the other side does not let us in")
    writer.write(shows)
    return reader, writer, found
