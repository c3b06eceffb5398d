"""The API key: asked of every request when one is set, compared in constant time."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from omlx.api.errors import error_body

OPEN_PATHS = frozenset({"/health"})
"""Served without a key, too; the route then says less."""


class Auth:
    """Answers 401 before anything of the body is read; leaves `authorized` in the request's state."""

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorized = self._authorized(Headers(scope=scope))
        scope["state"]["authorized"] = authorized
        if authorized or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        body = error_body(
            "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            "authentication_error",
            "invalid_api_key",
        )
        await JSONResponse(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _authorized(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        offered = _offered(headers)
        # All of them: two headers of which one is wrong come from nobody we know.
        right = [hmac.compare_digest(_digest(key), self._key) for key in offered]
        return bool(right) and all(right)


def _offered(headers: Headers) -> list[str]:
    """Every key that the request carries; an Authorization of another scheme counts as an empty one."""
    keys = headers.getlist("x-api-key")
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        keys.append(key.strip() if scheme.lower() == "bearer" else "")
    return keys


def _digest(key: str) -> bytes:
    # Digests have one length, so that the comparison does not tell the key's.
    return hashlib.sha256(key.encode()).digest()
