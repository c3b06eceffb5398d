"""A link with delay, jitter, loss, a rate or without multicast: frames carried in user space (AF_PACKET).

Kernels without netem have nothing else for it. Run by its path with the standard library
alone, in the switch's namespace: `relay.py ONE OTHER TTL_S`. A line of JSON is a `Link` to be from then on.
"""

import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

HEADER_BYTES = 10
"""virtio's header before every frame, which keeps offloaded checksums and segments right."""
FRAMES_AT_ONCE = 64
LEAST_BUFFER_BYTES = 1 << 18
MOST_BUFFER_BYTES = 1 << 26
BUFFER_S = 0.2
"""How much of its rate a link keeps waiting before it loses what comes last."""

# <linux/if_packet.h>, <asm/socket.h>, <linux/if_ether.h>: the socket module lacks them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE, ETH_P_ALL = 33, 3


@dataclass(frozen=True, slots=True)
class Link:
    """What a host's link is like, each way."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    """Share of the frames, 0 to 1. A frame may be a segment of 64 KiB that a wire would have cut up."""
    rate_bytes_s: float = 0.0
    """0: as fast as it goes."""
    multicast: bool = True

    @property
    def plain(self) -> bool:
        return self == Link()

    @property
    def buffer_bytes(self) -> float:
        if not self.rate_bytes_s:
            return MOST_BUFFER_BYTES
        return min(MOST_BUFFER_BYTES, max(LEAST_BUFFER_BYTES, self.rate_bytes_s * (BUFFER_S + self.delay_s)))

    def lets_through(self, frame: bytes, draw: Callable[[], float]) -> bool:
        """False where multicast is filtered (broadcast passes: ARP needs it) or the dice lose the frame."""
        target = frame[HEADER_BYTES : HEADER_BYTES + 6]
        if not self.multicast and target and target[0] & 1 and target != b"\xff" * 6:
            return False
        return not self.loss or draw() >= self.loss


class Out(Protocol):
    def send(self, frame: bytes, /) -> int: ...


@dataclass(slots=True)
class Lane:
    """One direction of the link. Frames leave in the order in which they came."""

    out: Out
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When to send, and what."""
    waiting_bytes: int = 0
    _free_at: float = 0.0
    """When the wire has sent all that it was given."""
    _last_at: float = 0.0

    def take(self, frame: bytes, now: float, link: Link, draw: Callable[[], float]) -> None:
        """Queues the frame, or loses it. `draw` gives numbers in [0, 1)."""
        if not link.lets_through(frame, draw) or self.waiting_bytes > link.buffer_bytes:
            return
        at = now
        if link.rate_bytes_s:
            at = self._free_at = max(now, self._free_at) + (len(frame) - HEADER_BYTES) / link.rate_bytes_s
        if link.jitter_s:
            at += (2 * draw() - 1) * link.jitter_s
        self._last_at = max(at + link.delay_s, self._last_at)
        self.waiting.append((self._last_at, frame))
        self.waiting_bytes += len(frame)

    def give(self, now: float) -> None:
        """Sends what is due."""
        while self.waiting and self.waiting[0][0] <= now:
            _, frame = self.waiting.popleft()
            self.waiting_bytes -= len(frame)
            try:
                self.out.send(frame)
            except OSError:  # a link that is down loses it, as a real one does
                continue

    def idle_s(self, now: float, most: float) -> float:
        """Until the next frame is due, `most` at the most."""
        return min(most, max(0.0, self.waiting[0][0] - now)) if self.waiting else most


def tap(device: str) -> socket.socket:
    """All frames that come in at the device, and a way out of it."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    frames.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    frames.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    frames.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    frames.bind((device, ETH_P_ALL))
    frames.setblocking(False)
    return frames


def take_all(frames: socket.socket, lane: Lane, link: Link) -> None:
    now = time.monotonic()
    for _ in range(FRAMES_AT_ONCE):
        try:
            frame = frames.recv(70_000)
        except OSError:  # none left, or the device went down
            return
        lane.take(frame, now, link, random.random)


def carry(one: str, other: str, ttl_s: float) -> None:
    """Until standard input ends or the time is up."""
    left, right = tap(one), tap(other)
    lanes = {left: Lane(right), right: Lane(left)}
    link, text = Link(), b""
    os.set_blocking(0, False)
    print("ready", flush=True)
    end = time.monotonic() + ttl_s
    while (now := time.monotonic()) < end:
        for lane in lanes.values():
            lane.give(now)
        idle = min(lane.idle_s(now, 0.5) for lane in lanes.values())
        ready = select.select([0, left.fileno(), right.fileno()], [], [], idle)[0]
        for frames, lane in lanes.items():
            if frames.fileno() in ready:
                take_all(frames, lane, link)
        if 0 in ready:
            if not (more := os.read(0, 4096)):
                return
            *lines, text = (text + more).split(b"\n")
            if lines:
                link = Link(**json.loads(lines[-1]))
                print("set", flush=True)


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]))
