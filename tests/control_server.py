"""A real server whose control does what a test says, in a thread of its own: commands have their own loop."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn

from omlx.api.app import create_app
from omlx.cluster.fleet import Machine
from omlx.cluster.offer import Offer, Offered, Terms
from omlx.cluster.rates import LinkRate, NodeRates, rates_by_chip
from omlx.cluster.shard_map import ModelView, NodeView, ShardMap, StageView
from omlx.errors import OmlxError
from omlx.ids import ModelId
from tests.api.fakes import STOP, FakeModels, ScriptedModel

GB = 10**9
STUDIO, MINI = "a" * 32, "b" * 32


def stage(node: str, id: str, start: int, end: int) -> StageView:
    return StageView(node, id, start, end, (end - start) * GB, "ready", 2 * GB, 0.25)


MODEL = ModelView(
    id="Org/Name",
    state="ready",
    epoch=2,
    recoveries=1,
    running=3,
    waiting=4,
    layers=24,
    stages=(stage("studio", STUDIO, 0, 16), stage("mini", MINI, 16, 24)),
    why=None,
)
IDLE = ModelView("tiny", "idle", 0, 0, 0, 0, 4, (), None)
NODES = (
    NodeView("studio", STUDIO, True, "up", None, 64 * GB, 40 * GB),
    NodeView("mini", MINI, False, "up", None, 16 * GB, 10 * GB),
)
MAP = ShardMap("c1", NODES, (MODEL, IDLE))
OFFER = Offer(
    (
        Offered(
            Machine(STUDIO, "studio", 64 * GB, 40 * GB, rates_by_chip("m4 max"), None),
            NodeRates(200e9, 5e12),
            free_bytes=48 * GB,
        ),
        Offered(
            Machine(MINI, "mini", 16 * GB, 10 * GB, rates_by_chip("m4"), LinkRate(2e-4, 1e9), "mini.local"),
            NodeRates(60e9, 2e12),
        ),
    ),
    (("mini", "studio", LinkRate(1e-4, 1e9)),),
    Terms(),
)


def with_lost_stage(map: ShardMap) -> ShardMap:
    """Mini is away, and with it the second stage."""
    studio, mini = map.nodes
    away = replace(mini, state="away", why="no answer since 5 s")
    first, second = MODEL.stages
    model = replace(MODEL, state="recovering", stages=(first, replace(second, state="lost")))
    return replace(map, nodes=(studio, away), models=(model, IDLE))


@dataclass
class ScriptedControl:
    """Writes down what it was asked, and fails where `failure` is set."""

    map: ShardMap = MAP
    failure: OmlxError | None = None
    offered: Offer = OFFER
    asked: list[tuple[object, ...]] = field(default_factory=list)
    loading: asyncio.Event | None = None
    """Where there is one, a load and a drain wait for it."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    proposal: Mapping[str, Any] = field(
        default_factory=lambda: {"lines": ["studio 0-15 -> 0-19 (+4 layers)"], "moved": True, "gain": 1.5}
    )

    async def shard_map(self) -> ShardMap:
        return self.map

    async def offer(self, model: str | None) -> Offer:
        self._note("offer", model)
        return self.offered

    async def activate(self, model_id: ModelId) -> None:
        self._note("activate", model_id)
        await self._take_time()

    async def deactivate(self, model_id: ModelId, within_s: float) -> None:
        self._note("deactivate", model_id, within_s)

    async def rebalance(self, model_id: ModelId, dry_run: bool) -> Mapping[str, Any]:
        self._note("rebalance", model_id, dry_run)
        return {**self.proposal, "moved": not dry_run}

    async def drain(self, node_id: str) -> None:
        self._note("drain", node_id)
        await self._take_time()

    async def undrain(self, node_id: str) -> None:
        self._note("undrain", node_id)

    async def _take_time(self) -> None:
        self.began.set()
        try:
            if self.loading is not None:
                await self.loading.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _note(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def controlled(
    control: ScriptedControl | None, *, api_key: str | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Gives the port; `control` None: a server without such routes."""
    app = create_app(
        FakeModels(ScriptedModel([STOP])),
        api_key=api_key,
        allowed_hosts=(),
        max_body_bytes=2**20,
        keepalive_s=30.0,
        control=control,
    )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # a client that comes before the server accepts waits here
        # A request that hangs fails its test, not the whole run.
        config = uvicorn.Config(
            app, http="h11", lifespan="off", log_level="critical", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@contextmanager
def in_a_thread(
    control: ScriptedControl | None, *, api_key: str | None = None, port: int = 0
) -> Iterator[int]:
    """`controlled`, for who blocks."""
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    ports: list[int] = []

    async def serve() -> None:
        async with controlled(control, api_key=api_key, port=port) as found:
            ports.append(found)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()
