"""A listener's door: whoever connects is looked at in a thread of its own, and strangers are turned away.

A port scanner, a silent connection or a wrong certificate costs the right one nothing: handshakes go on
side by side, each within its deadline, and the listener goes on all the while.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Generic, TypeVar

import structlog

from omlx.errors import LinkLost, StageLost
from omlx.node.tls import HANDSHAKE_WITHIN_S, Security, Stranger, greet, hang_up, said, wrap

log = structlog.get_logger()

VISITORS = 32
"""Looked at side by side. For one more, the one that has been there longest goes: a friend is through in
milliseconds."""
LOOK_UP_EVERY_S = 0.1

Guest = TypeVar("Guest")
Admit = Callable[[socket.socket, str | None], Guest | None]
"""After the handshake: the socket, with a timeout, and the node id its certificate shows (None: a plain
socket). None, StageLost or Stranger turns it away."""


@dataclass(slots=True)
class _Visitor:
    sock: socket.socket
    address: str
    since: float = field(default_factory=time.monotonic)
    expelled: str | None = None
    """Why it had to go before it was looked at to the end."""

    def expel(self, why: str) -> None:
        self.expelled = self.expelled or why
        hang_up(self.sock)


class Door(Generic[Guest]):
    """Open for a while at somebody else's listener; lets in who shows the right thing, one at a time.

    `peer`: the node id that must be shown; None: any node of the cluster.
    """

    def __init__(
        self, listener: socket.socket, security: Security | None, peer: str | None, admit: Admit[Guest]
    ) -> None:
        self._listener = listener
        self._security = security
        self._peer = peer
        self._admit = admit
        self._visitors: dict[int, _Visitor] = {}
        self._changing = threading.Lock()
        self._guests: Queue[tuple[socket.socket, Guest]] = Queue(2 * VISITORS)
        """Never full: `wait` lets nobody in while one lies here."""
        self._closed = False
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        listener.setblocking(False)
        self._eyes = selectors.DefaultSelector()
        self._eyes.register(listener, selectors.EVENT_READ)
        self._eyes.register(self._woken, selectors.EVENT_READ)

    def __enter__(self) -> "Door[Guest]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, end: float, over: Callable[[], bool]) -> Guest | None:
        """The next one to be let in; None at `end` (monotonic clock), or once `over` says so.

        Raises LinkLost when the listener is of no use any more.
        """
        while (now := time.monotonic()) < end and not over():
            try:
                return self._guests.get_nowait()[1]
            except Empty:
                pass
            for key, _ in self._eyes.select(min(end - now, LOOK_UP_EVERY_S)):
                if key.fileobj is self._listener:
                    self._let_in()
                else:
                    self._woken.recv(4096)
            self._hurry(time.monotonic())
        return None

    def close(self) -> None:
        """Turn away who is still being looked at; the listener stays."""
        with self._changing:
            self._closed = True
            for visitor in self._visitors.values():
                visitor.expel("the door was closed")
            while not self._guests.empty():
                self._guests.get_nowait()[0].close()
        self._eyes.close()
        self._woken.close()
        self._waker.close()

    def _let_in(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it went away again
        except OSError as error:
            raise LinkLost(f"the listener takes no connections: {said(error)}") from error
        where = f"{address[0]}:{address[1]}"
        try:
            sock = wrap(sock, self._security, server=True)
        except OSError as error:
            _refused(where, said(error))
            return
        visitor = _Visitor(sock, where)
        with self._changing:
            here = [other for other in self._visitors.values() if other.expelled is None]
            if len(here) >= VISITORS:
                here[0].expel("others came, and it had been looked at longest")
            self._visitors[id(visitor)] = visitor
        threading.Thread(target=self._look_at, args=(visitor,), name="door", daemon=True).start()

    def _hurry(self, now: float) -> None:
        """A drop at a time keeps every single read in time; the whole must be, too."""
        with self._changing:
            for visitor in self._visitors.values():
                if now - visitor.since > HANDSHAKE_WITHIN_S:
                    visitor.expel(f"it was not through after {HANDSHAKE_WITHIN_S:g} s")

    def _look_at(self, visitor: _Visitor) -> None:
        guest, why = None, ""
        try:
            visitor.sock.settimeout(HANDSHAKE_WITHIN_S)
            guest = self._admit(visitor.sock, greet(visitor.sock, self._peer))
            why = "it did not show what it had to"
        except (Stranger, StageLost) as error:
            why = str(error)
        except OSError as error:
            why = said(error)
        finally:
            self._done(visitor, guest)
        if guest is None:
            _refused(visitor.address, visitor.expelled or why)

    def _done(self, visitor: _Visitor, guest: Guest | None) -> None:
        with self._changing:
            del self._visitors[id(visitor)]
            if guest is None or self._closed:
                visitor.sock.close()
            else:
                self._guests.put((visitor.sock, guest))
            if not self._closed:
                self._waker.send(b".")


def _refused(address: str, why: str) -> None:
    log.warning("connection refused", address=address, why=why)
