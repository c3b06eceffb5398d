"""Server-sent events: a writer that keeps a stream alive by the clock and ends it when the client is gone."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omlx.api.connection import ClientGone, while_connected
from omlx.api.errors import body_of, note
from omlx.errors import OmlxError

log = structlog.get_logger(__name__)

OPEN = b""
"""An event of no bytes: from here on the stream stands, and the headers go out."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def data(event: object) -> bytes:
    """One event. ASCII, because some clients also break lines at U+2028 and U+0085."""
    return b"data: " + json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends the bytes that `events` yields, each at once.

    The status is decided by the first of them or after `keepalive_s`, whatever comes first: an error
    before that is raised and answered with its true status; a later one is the stream's last event,
    `data: {"error": ...}`, without a [DONE]. While nothing else is sent, a comment goes out every
    `keepalive_s`, whatever `events` waits for. When the client goes away `events` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], *, keepalive_s: float, request_id: str) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keepalive_s = keepalive_s
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Writer(send, self)
        try:
            await while_connected(receive, self._write(out))
        except ClientGone:
            log.info("client gone", request_id=self._request_id)

    async def _write(self, out: "_Writer") -> None:
        heart = asyncio.create_task(out.beat(self._keepalive_s))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await out.write(event)
        except OmlxError as error:
            if not out.started:
                raise
            note(error, self._request_id)
            await out.write(data(body_of(error, self._request_id)))
        except Exception as error:
            # Nobody above can answer any more once the headers are out; they still log it.
            if out.started:
                await out.write(data(body_of(error, self._request_id)))
            raise
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
        await out.end()


class _Writer:
    """The one hand that sends: events and heartbeats never mix."""

    def __init__(self, send: Send, response: Response) -> None:
        self._send = send
        self._response = response
        self._turn = asyncio.Lock()
        self._sent_at = monotonic()
        self.started = False

    async def write(self, event: bytes) -> None:
        async with self._turn:
            if not self.started:
                self.started = True
                await self._send(
                    {
                        "type": "http.response.start",
                        "status": self._response.status_code,
                        "headers": self._response.raw_headers,
                    }
                )
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self._sent_at = monotonic()

    async def beat(self, every_s: float) -> None:
        """A comment whenever nothing was sent for `every_s`; runs until it is cancelled."""
        while True:
            rest_s = self._sent_at + every_s - monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self.write(KEEP_ALIVE)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
