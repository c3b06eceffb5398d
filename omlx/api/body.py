"""The gate for bodies: JSON only, never more bytes or seconds than agreed, read before any route runs."""

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.api.errors import error_body

WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
DRAIN_S = 0.5
"""How long a refused client may go on sending: cut off at once it might never read the answer."""


class Refusal(Exception):
    """A body that is not wanted."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BodyGate:
    """Answers 400, 408, 413 or 415; hands on whole bodies of at most `max_body_bytes`."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        self._timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in WITH_BODY:
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
            body = await self._read(receive)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send)
        except ClientDisconnect:
            return
        else:
            await self._app(scope, _replay(body, receive), send)

    def _check(self, headers: Headers) -> None:
        """What the headers alone tell."""
        media_type, _, parameters = headers.get("content-type", "").partition(";")
        charset = parameters.lower().replace(" ", "").removeprefix("charset=").strip('"')
        if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8", "utf8"}:
            raise Refusal(
                415, "the body must be JSON: Content-Type: application/json", "unsupported_media_type"
            )
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Refusal(415, "compressed bodies are not accepted", "unsupported_content_encoding")
        length = headers.get("content-length")
        if length is not None and "transfer-encoding" in headers:
            raise Refusal(400, "Content-Length and Transfer-Encoding contradict each other", "bad_framing")
        if length is not None and int(length) > self._max_bytes:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._max_bytes:
                        raise self._too_large()
        except TimeoutError:
            message_text = f"the body did not arrive within {self._timeout_s:g} s"
            raise Refusal(408, message_text, "body_timeout") from None
        return bytes(body)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is larger than {self._max_bytes} bytes", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that starts with the body that was read already."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the whole answer, then reads on for a moment, then lets the connection go."""
    body = error_body(str(refusal), "invalid_request_error", refusal.code)
    response = JSONResponse(body, refusal.status, {"connection": "close"})
    await send({"type": "http.response.start", "status": refusal.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(DRAIN_S):
            more = True
            while more:
                more = (await receive()).get("more_body", False)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
