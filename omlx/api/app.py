"""The HTTP application: the checks at the door, the routes, the errors."""

from fastapi import FastAPI
from starlette.middleware import Middleware

from omlx.api import errors, health, metrics
from omlx.api.auth import Auth
from omlx.api.body import BodyGate
from omlx.api.control import Control
from omlx.api.control import router as control_router
from omlx.api.door import Door, RequestId
from omlx.api.models import Models
from omlx.api.openai import routes as openai


def create_app(  # noqa: PLR0913 (what a server is made of)
    models: Models,
    *,
    api_key: str | None,
    allowed_hosts: tuple[str, ...],
    max_body_bytes: int,
    keepalive_s: float,
    body_timeout_s: float = 60.0,
    control: Control | None = None,
) -> FastAPI:
    """Everything that is served, over `models`; it opens nothing and closes nothing.

    `allowed_hosts` are names beyond this machine's loopback names and the address a client came to,
    `control` carries out what is asked at /omlx/v1; without it there are no such routes.

    A request passes the middleware from top to bottom, so that nothing is read of an unknown caller's
    body. There are no CORS headers and no documentation pages that would fetch scripts.
    """
    app = FastAPI(
        title="oMLX",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(RequestId),
            Middleware(Door, allowed_hosts=allowed_hosts),
            Middleware(Auth, api_key=api_key),
            Middleware(BodyGate, max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s),
        ],
    )
    errors.install(app)
    app.include_router(health.router(models))
    app.include_router(metrics.router(models))
    app.include_router(openai.router(models, keepalive_s=keepalive_s))
    if control is not None:
        app.include_router(control_router(models, control))
    return app
