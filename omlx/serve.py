"""From settings to a running server: the port first, then models and HTTP side by side, and all of it back.

The composition of coordinator and web server; the command line shows what it does.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import psutil

from omlx.cluster.control import Levers
from omlx.cluster.coordinator import Coordinator, LoadProgress
from omlx.cluster.keeping import keeping
from omlx.cluster.local_actor import Spare, discard_all, place_from
from omlx.cluster.local_site import LocalSite
from omlx.cluster.machine import memory_available_bytes, memory_ceiling_bytes
from omlx.cluster.members import read_members
from omlx.cluster.offer import Terms
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.errors import BadModel, BadSetting
from omlx.node.client import Placement
from omlx.node.library import Library, scan
from omlx.settings import Settings

if TYPE_CHECKING:
    from omlx.web import Server

SWITCH_S = 0.0005
"""How long the event loop waits for a thread that computes in Python; by default it is ten times that."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
JACCL_NEEDS = ("MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR")


def check_door(settings: Settings) -> None:
    """Raises BadSetting where anyone on the network could walk in."""
    if settings.host not in LOOPBACK and settings.api_key is None:
        raise BadSetting(
            f"host {settings.host} opens the server to the network: give it an --api-key "
            "(or OMLX_API_KEY), or stay on 127.0.0.1"
        )


def check_link(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Raises BadSetting where mx.distributed would miss what only the operator can know."""
    missing = [name for name in JACCL_NEEDS if name not in environment]
    if settings.link == "jaccl" and missing:
        raise BadSetting(f"link jaccl needs {' and '.join(missing)} in the environment; or use --link tcp")


def own_names(settings: Settings) -> tuple[str, ...]:
    """What clients may call this server: a page that rebinds a name of its own is none of these."""
    name = socket.gethostname()
    local = name if name.endswith(".local") else f"{name}.local"
    return (*settings.allowed_hosts, settings.host, name, local)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises BadSetting naming the port, and who holds it where that can be told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listening, not only bound: a second start must fail now, not after it has loaded a model.
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise BadSetting(
            f"cannot listen on {host}:{port}: {error.strerror}{_holder(port)}; choose another --port"
        ) from error
    return sock


def _holder(port: int) -> str:
    try:
        pids = {
            c.pid
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == "LISTEN"
        }
    except psutil.AccessDenied:
        return ""
    known = sorted(pid for pid in pids if pid is not None)
    return f" (held by process {known[0]})" if known else ""


def find_models(settings: Settings) -> Library:
    """Raises BadSetting or BadModel where nothing could be served."""
    library = scan(settings.models)
    if not library.entries:
        raise BadSetting(f"no models in {settings.models}: put model folders there, or name one")
    usable = [entry for entry in library.entries if entry.problem is None]
    if not usable:
        raise BadModel(str(library.entries[0].problem))
    return library


@asynccontextmanager
async def running(
    settings: Settings, library: Library, place: Placement, progress: LoadProgress
) -> AsyncIterator[Levers]:
    """A coordinator for `library` with its levers, closed in the end. `place` starts stages where this
    machine is alone.

    Raises BadSetting for a cache folder of no use, and what opening a cluster raises.
    """
    async with AsyncExitStack() as stack:
        kept = stack.enter_context(keeping(settings, memory_ceiling_bytes()))
        if not has_nodes(settings):
            alone = LocalSite(settings, kept.ceiling_bytes, memory_available_bytes, place)
            coordinator = Coordinator(library, settings, alone, kept, progress)
            stack.push_async_callback(coordinator.close)
            yield Levers(coordinator, alone, Terms.of(settings))
            return
        # Imported where there is a cluster: its libraries need not be installed elsewhere.
        from omlx.cluster.cluster_site import open_cluster_site
        from omlx.cluster.reconcile import reconciling

        site = await stack.enter_async_context(open_cluster_site(settings, kept.ceiling_bytes))
        coordinator = Coordinator(library, settings, site, kept, progress)
        stack.push_async_callback(coordinator.close)
        reconciler = await stack.enter_async_context(reconciling(coordinator, site))
        terms, cluster_id = Terms.of(settings), site.rays.trust.cluster_id
        yield Levers(coordinator, site, terms, reconciler, cluster_id)


def has_nodes(settings: Settings) -> bool:
    """Whether this machine made a cluster, and others joined it."""
    made = (CLUSTER_FOLDER / "authority").expanduser().exists()
    if not (settings.cluster and settings.stages == 1 and made):
        return False
    return len(read_members(CLUSTER_FOLDER).joined) > 0


async def serve(
    settings: Settings,
    spares: list[Spare],
    progress: LoadProgress,
    beside: Callable[["Server", Library], Awaitable[None]],
) -> None:
    """Serve until SIGINT, SIGTERM or `should_exit`; `beside` runs as soon as requests are taken.

    A single model is loaded before that, by the processes in `spares` first; several are loaded on first use.
    Raises Refused before anything is loaded where it cannot work.
    """
    check_door(settings)
    check_link(settings)
    sys.setswitchinterval(SWITCH_S)
    library = await asyncio.to_thread(find_models, settings)
    with bind(settings.host, settings.port) as sock:
        async with running(settings, library, place_from(spares), progress) as levers:
            _, server = await asyncio.gather(
                _load_only_model(levers.coordinator), asyncio.to_thread(_server, settings, levers)
            )
            discard_all(spares)
            company = asyncio.create_task(_company(server, beside(server, library)), name="beside")
            try:
                await server.serve(sockets=[sock])
            finally:
                company.cancel()
                await asyncio.gather(company, return_exceptions=True)
            if not company.cancelled() and (error := company.exception()) is not None:
                raise error


async def _load_only_model(coordinator: Coordinator) -> None:
    cards = coordinator.cards()
    if len(cards) == 1:
        await coordinator.chat_model(cards[0].id)


def _server(settings: Settings, levers: Levers) -> "Server":
    # Imported here, for that takes as long as the stages need for a good part of the weights.
    from omlx.web import make_server

    return make_server(settings, levers, own_names(settings))


async def _company(server: "Server", work: Awaitable[None]) -> None:
    """Whatever runs beside the server takes it down when it fails."""
    try:
        await work
    except BaseException:
        server.should_exit = True
        raise
