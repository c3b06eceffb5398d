"""From errors to HTTP: one table, one shape of body, and the handlers that use them.

Only sentences of our own error tree leave the server; any other exception is logged and answered with
a fixed message and the request's id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias

import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omlx.api.connection import ClientGone
from omlx.errors import (
    BadModel,
    BadRequest,
    Closed,
    DoesNotFit,
    Full,
    ModelFailed,
    ModelNotFound,
    OmlxError,
    RequestFailed,
)

log = structlog.get_logger(__name__)

Body: TypeAlias = dict[str, Any]
MODEL_FAILED_RETRY_S = 30


@dataclass(frozen=True, slots=True)
class Fault:
    """How a kind of error looks from outside."""

    status: int
    type: str
    code: str | None
    message: str | None = None
    """Said instead of the error's own sentence, where that may name a path."""


INTERNAL = Fault(500, "server_error", "internal_error", "the server failed while it answered this request")

FAULTS: Mapping[type[OmlxError], Fault] = {
    BadRequest: Fault(400, "invalid_request_error", None),
    ModelNotFound: Fault(404, "invalid_request_error", "model_not_found"),
    BadModel: Fault(
        400,
        "invalid_request_error",
        "bad_model",
        "this model's folder cannot be served; see the server's log",
    ),
    DoesNotFit: Fault(400, "invalid_request_error", "model_does_not_fit"),
    Full: Fault(503, "server_error", "overloaded"),
    ModelFailed: Fault(503, "server_error", "model_failed"),
    RequestFailed: Fault(500, "server_error", "request_failed"),
    Closed: Fault(503, "server_error", "closing", "the server or this model is being closed"),
}
"""The nearest class in the error's family decides; what is not here is INTERNAL."""


def fault_of(error: BaseException) -> Fault:
    """The line of the table for `error`."""
    for kind in type(error).__mro__:
        if kind in FAULTS:
            return FAULTS[kind]
    return INTERNAL


def error_body(message: str, type_: str, code: str | None, param: str | None = None) -> Body:
    """The one shape of an error."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def body_of(error: BaseException, request_id: str) -> Body:
    """What a client may know about `error`; `note` has the rest."""
    fault = fault_of(error)
    message = fault.message or str(error)
    if fault is INTERNAL:
        message = f"{message} (request id {request_id})"
    if isinstance(error, BadRequest):
        return error_body(message, fault.type, error.code, error.param)
    param = "model" if fault.status < 500 else None
    return error_body(message, fault.type, fault.code, param)


def note(error: BaseException, request_id: str) -> None:
    """Logs what a client is not told."""
    if fault_of(error).message is not None:
        log.error("request failed", request_id=request_id, exc_info=error)


def retry_after_s(error: BaseException) -> int | None:
    """When to come back, in seconds; None where it makes no difference."""
    match error:
        case Full():
            return error.retry_after_s
        case ModelFailed():
            return MODEL_FAILED_RETRY_S
        case _:
            return None


def request_id_of(request: Request) -> str:
    """The id that the RequestId middleware gave."""
    return str(request.scope["state"]["request_id"])


async def _on_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    note(error, request_id)
    headers: dict[str, str] = {}
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers["retry-after"] = str(wait_s)
    if not isinstance(error, OmlxError):
        # This answer is made outside of the middleware that adds the header to all others.
        headers["x-request-id"] = request_id
    return JSONResponse(body_of(error, request_id), fault_of(error).status, headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    match error.status_code:
        case 404:
            body = error_body(f"there is no route {path}", "invalid_request_error", "unknown_url")
        case 405:
            message = f"{request.method} is not allowed for {path}"
            body = error_body(message, "invalid_request_error", "method_not_allowed")
        case status:
            body = error_body(HTTPStatus(status).phrase, "invalid_request_error", None)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    # Nobody reads it; the number is for the access log.
    return Response(status_code=499)


def install(app: FastAPI) -> None:
    """Every error of every route is answered here."""
    app.add_exception_handler(OmlxError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_error)
