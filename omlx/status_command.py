"""`omlx cluster status`: what the running server says of nodes and models; without one, what is on disk."""

import json as json_text
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from omlx.check_command import ClusterFolder
from omlx.cluster.planner import gigabytes
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.cluster.shard_map import ShardMap
from omlx.control_commands import Json, ServerPort, reach
from omlx.errors import BadSetting, Refused
from omlx.shard_bars import draw

if TYPE_CHECKING:
    from omlx.cluster.members import Joined, Members
    from omlx.cluster.trust import Trust
    from omlx.control_client import ControlClient

EVERY_S = 1.0

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help="Draw what the server says every second, until Ctrl-C.")
    ] = False,
    folder: ClusterFolder = CLUSTER_FOLDER,
    port: ServerPort = None,
    as_json: Json = False,
) -> None:
    """Show the nodes, and which of them runs which layers of which model.

    Without a running server: the nodes as they joined, and how long their certificates last.

    Example: omlx cluster status --watch
    """
    if watch and as_json:
        raise BadSetting("--watch draws for people; for a script ask again with --json")
    with reach(port) as server:
        if watch:
            keep_drawing(server)
            return
        look = server.look()
        place = server.place
    try:
        on_disk = read_disk(folder)
    except (Refused, ImportError):
        if look.map is None:  # there is neither
            raise
        on_disk = None
    if as_json:
        print(json_text.dumps(to_json(look.map, on_disk, place if look.map else None), indent=2))
        return
    if look.map is not None:
        console.print(draw(look.map))
    if on_disk is not None:
        console.print(nodes_table(*on_disk))
    if look.why is not None:
        errors.print(look.why, markup=False)


# ------------------------------------------------------------------ as the server says


def keep_drawing(server: "ControlClient") -> None:
    """Once a second until Ctrl-C; a server that is away is waited for."""
    last: ShardMap | None = None
    heard_at = time.monotonic()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                look = server.look()
                if look.map is not None:
                    last, heard_at = look.map, time.monotonic()
                live.update(watched(last, look.why, time.monotonic() - heard_at), refresh=True)
                time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
    except KeyboardInterrupt:
        return


def watched(last: ShardMap | None, why: str | None, silent_s: float) -> RenderableType:
    """The last map there was; where there is no new one, since when, and why."""
    if why is None:
        assert last is not None
        return draw(last)
    line = Text(f"no answer from the server since {silent_s:.0f} s: {why}", "bold red")
    return line if last is None else Group(draw(last), Text(), line)


# ------------------------------------------------------------------ as it is on disk


def read_disk(folder: Path) -> "tuple[Trust, Members]":
    """Raises BadSetting where this machine has made no cluster."""
    from omlx.cluster.members import read_members
    from omlx.cluster.trust import open_trust

    return open_trust(folder), read_members(folder)


def to_json(
    shown: ShardMap | None, on_disk: "tuple[Trust, Members] | None", place: str | None
) -> dict[str, object]:
    """`nodes`: those that joined, as they are on disk; `shard_map`: what the server at `server` says."""
    trust, members = on_disk or (None, ())
    return {
        "cluster_id": trust.cluster_id if trust is not None else shown.cluster_id if shown else None,
        "nodes": [as_row(trust, one) for one in members] if trust is not None else [],
        "server": place,
        "shard_map": None if shown is None else asdict(shown),
    }


def as_row(trust: "Trust", node: "Joined") -> dict[str, object]:
    """Plain values."""
    from omlx.cluster.members import now

    issued = trust.ledger().newest(node.id)
    return {
        "id": node.id,
        "name": node.name,
        "host": node.host,
        "chip": node.chip,
        "memory_bytes": node.memory_bytes,
        "addresses": list(node.addresses),
        "round_trip_s": 2 * node.fastest_link[0] if node.fastest_link else None,
        "certificate_days": (issued.until - now()).days if issued else None,
    }


def nodes_table(trust: "Trust", members: "Members") -> Table:
    from omlx.cluster.members import now
    from omlx.cluster.membership import open_member
    from omlx.cluster.node_identity import chip

    table = Table(
        "node", "host", "chip", "memory", "round trip", "certificate", title=f"cluster {trust.cluster_id}"
    )
    memory, days = int(psutil.virtual_memory().total), open_member(trust.folder).days_left(now())
    table.add_row(
        escape(socket.gethostname()),
        "this machine",
        escape(chip() or ""),
        gigabytes(memory),
        "",
        f"{days} days",
    )
    for node in members:
        row = as_row(trust, node)
        trip = row["round_trip_s"]
        table.add_row(
            escape(node.name),
            escape(f"{node.user}@{node.host}"),
            escape(node.chip),
            gigabytes(node.memory_bytes),
            f"{float(trip) * 1e3:.2f} ms" if isinstance(trip, float) else "not measured",
            f"{row['certificate_days']} days" if row["certificate_days"] is not None else "none",
        )
    return table
