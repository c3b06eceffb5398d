"""/omlx/v1: what runs where, and the orders of whoever runs the server, which the coordinator carries out."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import structlog
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omlx.api.connection import while_connected
from omlx.api.errors import INTERNAL, error_body, fault_of, request_id_of
from omlx.api.models import Models, find_card
from omlx.api.openai.fields import Strict
from omlx.api.parse import parse_body
from omlx.cluster.offer import Offer
from omlx.cluster.shard_map import ShardMap
from omlx.errors import OmlxError, Refused
from omlx.ids import ModelId

log = structlog.get_logger(__name__)

LONGEST_WITHIN_S = 3600.0


class Control(Protocol):
    """A running server's levers.

    Each call raises Refused, with the sentence, for what cannot be, and another OmlxError for what went
    wrong. A client that goes away cancels `activate` and `drain`; what else it asked for is carried out.
    """

    async def shard_map(self) -> ShardMap: ...
    async def offer(self, model: str | None) -> Offer:
        """What a plan is made of now, for the loaded model of that id or folder, else for one beside them;
        nothing is opened by that name."""

    async def activate(self, model_id: ModelId) -> None:
        """Load it; returns once it answers. A caller that is cancelled stops no load."""

    async def deactivate(self, model_id: ModelId, within_s: float) -> None:
        """Take no new requests, let running ones end within so many seconds, then end its stages."""

    async def rebalance(self, model_id: ModelId, dry_run: bool) -> Mapping[str, Any]:
        """Move layers where that pays. Plain values: `lines`, sentences for a person; `moved`, whether it
        did; and whatever else a script may want."""

    async def drain(self, node_id: str) -> None:
        """Give the node no new stages and move those that it has; returns once it holds none. Refused or
        cancelled, it is in use again."""

    async def undrain(self, node_id: str) -> None:
        """Use it again."""


class Order(Strict):
    """Its path says everything."""


class Deactivation(Strict):
    within_s: float = Field(30.0, ge=0, le=LONGEST_WITHIN_S)


class Rebalancing(Strict):
    dry_run: bool = False


def router(models: Models, control: Control) -> APIRouter:
    """The routes over `control`; `models` tells which ids there are."""
    routes = APIRouter(prefix="/omlx/v1", route_class=_OperatorRoute)

    @routes.get("/cluster")
    async def cluster() -> Response:
        return JSONResponse(asdict(await control.shard_map()))

    @routes.get("/offer")
    async def offer(model: str | None = None) -> Response:
        return JSONResponse(asdict(await control.offer(model)))

    @routes.post("/models/{model_id:path}/activate")
    async def activate(request: Request, model_id: str) -> Response:
        await parse_body(request, Order)
        card = find_card(models, model_id)
        await while_connected(request.receive, control.activate(card.id))
        return _state(models, card.id)

    @routes.post("/models/{model_id:path}/deactivate")
    async def deactivate(request: Request, model_id: str) -> Response:
        body = await parse_body(request, Deactivation)
        card = find_card(models, model_id)
        await control.deactivate(card.id, body.within_s)
        return _state(models, card.id)

    @routes.post("/models/{model_id:path}/rebalance")
    async def rebalance(request: Request, model_id: str) -> Response:
        body = await parse_body(request, Rebalancing)
        card = find_card(models, model_id)
        return JSONResponse(dict(await control.rebalance(card.id, body.dry_run)))

    @routes.post("/nodes/{node_id}/drain")
    async def drain(request: Request, node_id: str) -> Response:
        await parse_body(request, Order)
        if (refusal := _unknown(await control.shard_map(), node_id)) is not None:
            return refusal
        await while_connected(request.receive, control.drain(node_id))
        return JSONResponse({"node_id": node_id, "drained": True})

    @routes.post("/nodes/{node_id}/undrain")
    async def undrain(request: Request, node_id: str) -> Response:
        await parse_body(request, Order)
        if (refusal := _unknown(await control.shard_map(), node_id)) is not None:
            return refusal
        await control.undrain(node_id)
        return JSONResponse({"node_id": node_id, "drained": False})

    return routes


class _OperatorRoute(APIRoute):
    """Tells in full what the table of errors keeps from clients: who runs the server must know it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except OmlxError as error:
                if fault_of(error) is not INTERNAL:
                    raise
                log.warning("not done", path=request.url.path, why=str(error), id=request_id_of(request))
                if isinstance(error, Refused):
                    return JSONResponse(error_body(str(error), "invalid_request_error", "refused"), 409)
                return JSONResponse(error_body(str(error), "server_error", "not_done"), 502)

        return told


def _state(models: Models, id: ModelId) -> Response:
    return JSONResponse({"id": id, "state": find_card(models, id).state})


def _unknown(now: ShardMap, node_id: str) -> Response | None:
    """The answer where no node has that id."""
    if now.node(node_id) is not None:
        return None
    known = ", ".join(f"{node.node_id} ({node.name})" for node in now.nodes if node.node_id) or "none"
    message = f"no node {node_id[:64]!r} in this server's cluster; known nodes: {known}"
    return JSONResponse(error_body(message, "invalid_request_error", "node_not_found", "node"), 404)
