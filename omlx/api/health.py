"""GET /health: whether the models make progress, not just whether the process lives."""

from typing import Literal, TypeAlias

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omlx.api.models import Models
from omlx.node.health import ModelHealth

Word: TypeAlias = Literal["ok", "loading", "degraded"]
BROKEN = frozenset({"stalled", "failed"})


def verdict(models: tuple[ModelHealth, ...]) -> tuple[Word, int]:
    """The status word and the HTTP status.

    ok        nothing is wrong; an idle model is loaded by its first request
    loading   nothing is wrong, but no model answers before its load has ended
    degraded  a model recovers, is stalled or has failed

    503 only when every model is stalled or failed: then another server should be asked. A model that
    loads or recovers keeps its requests waiting and will answer them.
    """
    states = {model.state for model in models}
    if states and states <= BROKEN:
        return "degraded", 503
    if states & (BROKEN | {"recovering"}):
        return "degraded", 200
    if states == {"loading"}:
        return "loading", 200
    return "ok", 200


def router(models: Models) -> APIRouter:
    """The route over `models`. Without the key, where one is set, it says the word alone."""
    routes = APIRouter()

    @routes.get("/health")
    async def health(request: Request) -> Response:
        now = models.health()
        word, status = verdict(now)
        if not request.scope["state"]["authorized"]:
            return JSONResponse({"status": word}, status)
        return JSONResponse({"status": word, "models": [_shown(model) for model in now]}, status)

    return routes


def _shown(model: ModelHealth) -> dict[str, str | int | float | None]:
    seconds = model.seconds_since_progress
    return {
        "id": model.id,
        "state": model.state,
        "running": model.running,
        "waiting": model.waiting,
        "seconds_since_progress": None if seconds is None else round(seconds, 3),
    }
