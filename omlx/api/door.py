"""Who may knock: the request id, and the checks that keep foreign web pages out.

A page in a browser on this machine can send requests to a local server. It cannot choose the Host
header of a name that it does not own (so DNS rebinding shows), nor hide its Origin, nor send JSON
across origins without a preflight, which is never allowed here: there are no CORS headers.
"""

import ipaddress
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.api.errors import error_body

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestId:
    """Gives each request an id: in its state, and in the answer's x-request-id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Door:
    """Answers 403 to a Host that is not ours, and to a write that a foreign page asks for."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: tuple[str, ...]) -> None:
        self._app = app
        self._names = LOOPBACK_NAMES | {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        body = error_body(refusal, "invalid_request_error", "forbidden")
        await JSONResponse(body, 403)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> str | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(_name(hosts[0]), scope):
            return "this Host is not served here; the setting allowed_hosts names further ones"
        if scope["method"] in SAFE_METHODS:
            return None
        origins = headers.getlist("origin")
        if any(not self._may_write(origin, hosts[0]) for origin in origins):
            return "pages of another origin are refused; the setting allowed_hosts names further ones"
        if not origins and headers.get("sec-fetch-site") == "cross-site":
            return "requests from pages of another site are refused"
        return None

    def _is_ours(self, name: str | None, scope: Scope) -> bool:
        """A name on the list, or the very address that this connection came to."""
        if name is None:
            return False
        server = scope.get("server")
        return name in self._names or (server is not None and _same_address(name, server[0]))

    def _may_write(self, origin: str, host: str) -> bool:
        scheme, _, authority = origin.lower().partition("://")
        if scheme not in {"http", "https"}:
            return False
        # Another port of this machine is another program's page, so loopback names alone are not enough.
        return authority == host.lower() or _name(authority) in self._names - LOOPBACK_NAMES


def _name(host: str) -> str | None:
    """The name or address in `name:port` or `[address]:port`, in lower case; None if it is neither."""
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname, parts.port
    except ValueError:
        return None
    if name is None or parts.netloc != host or parts.username is not None:
        return None
    return name.removesuffix(".")


def _same_address(name: str, address: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(address)
    except ValueError:
        return False
