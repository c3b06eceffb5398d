"""The web server: uvicorn around the API. Most of what the head imports is imported here."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from omlx.api.app import create_app
from omlx.cluster.control import Levers
from omlx.cluster.coordinator import Coordinator
from omlx.settings import Settings

GRACE_S = 5
"""How long connections may take to end once the server stops; their streams end at once."""


class Server(uvicorn.Server):
    """Ends the streams before it waits for the connections to close."""

    def __init__(self, config: uvicorn.Config, coordinator: Coordinator) -> None:
        super().__init__(config)
        self._coordinator = coordinator

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises a signal again once it has shut down: SIGTERM would end the process there and then,
        and whatever is still to be ended around the server, Ray for one, would stay."""
        with super().capture_signals():
            yield
            self._captured_signals = [one for one in self._captured_signals if one != signal.SIGTERM]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._coordinator.close()
        await super().shutdown(sockets)


def make_server(settings: Settings, levers: Levers, names: tuple[str, ...]) -> Server:
    """Ready to serve, not yet serving; `names` are what clients may call it."""
    coordinator = levers.coordinator
    app = create_app(
        coordinator,
        api_key=settings.api_key,
        allowed_hosts=names,
        max_body_bytes=settings.max_body_bytes,
        keepalive_s=settings.keepalive_s,
        control=levers,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    config.load()  # uvicorn would import its protocols only when it starts
    return Server(config, coordinator)
