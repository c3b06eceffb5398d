"""`omlx cluster discover`: which machines announce themselves here, as they are heard of."""

import asyncio
import json as json_text
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from omlx.cluster.node_identity import own_addresses, versions
from omlx.cluster.nodes import Node, Versions, cluster_mark
from omlx.cluster.planner import gigabytes
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.cluster.roster import Known, Roster, fold
from omlx.errors import BadSetting, Refused

MOST_SHOWN = 4
"""Addresses in a cell."""

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

NOBODY = (
    "nobody announced itself within {seconds:g} s. On each other Mac, is `omlx node run` running (or "
    "`omlx node install` done)? Networks may filter multicast (guest Wi-Fi, VLANs): then name the machines, "
    "--host studio.local. On macOS 15 and later the program that runs this needs System Settings > Privacy "
    "& Security > Local Network."
)


def discover(
    seconds: Annotated[float, typer.Option(min=0.5, max=600.0, help="How long to listen.")] = 3.0,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Ask this host directly too; repeatable.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object at the end, no table.")] = False,
) -> None:
    """List the machines that announce themselves. Whoever is listed is not trusted by that.

    Example: omlx cluster discover --seconds 5 --host studio.local
    """
    ours, mark = versions(), own_cluster()
    if json:
        roster = asyncio.run(listen(seconds, host or (), lambda _: None))
        print(json_text.dumps(as_json(roster, ours, mark), indent=2))
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(roster: Roster) -> None:
            live.update(table(roster, ours, mark), refresh=True)

        roster = asyncio.run(listen(seconds, host or (), show))
    if not any(known.node.identified for known in roster):
        errors.print(NOBODY.format(seconds=seconds), markup=False)
    for sentence in conflicts(roster):
        errors.print(sentence, markup=False)


async def listen(
    seconds: float,
    hosts: Iterable[str],
    show: Callable[[Roster], None],
    addresses: Callable[[], tuple[str, ...]] = own_addresses,
) -> Roster:
    """What is heard within `seconds`; `show` is called with each new state. Raises Refused, BadSetting."""
    try:
        from omlx.cluster.discovery import browsing, multicast
    except ImportError as error:
        raise BadSetting(
            f"discover needs {error.name}, which is not installed; pip install 'omlx-cluster[cluster]'"
        ) from error
    roster = Roster()
    async with AsyncExitStack() as stack:
        sockets = await stack.enter_async_context(multicast(addresses))
        browser = await stack.enter_async_context(browsing(sockets, hosts))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for event in browser:
                    roster = fold(roster, event)
                    show(roster)
    return roster


def own_cluster(folder: Path = CLUSTER_FOLDER) -> str | None:
    """The mark of the cluster that this machine belongs to; None for none, or for one that cannot be read,
    which is said."""
    if not (folder.expanduser() / "node").is_symlink():
        return None
    try:
        from omlx.cluster.membership import open_member

        return cluster_mark(open_member(folder).cluster_id)
    except (ImportError, Refused) as error:
        errors.print(f"which cluster is ours is not known: {error}", markup=False)
        return None


# ------------------------------------------------------------------ words


def table(roster: Roster, ours: Versions, mark: str | None) -> Table:
    found = Table("name", "addresses", "chip", "memory", "versions", "cluster")
    here = set(own_addresses())
    for known in roster:
        node = known.node
        name = f"{node.name} (this machine)" if here.intersection(node.addresses) else node.name
        found.add_row(
            escape(f"{name} (said goodbye)" if known.gone else name),
            escape("\n".join(node.addresses[:MOST_SHOWN])),
            escape(node.chip or "?"),
            gigabytes(node.memory_bytes) if node.memory_bytes else "?",
            shown_versions(node, ours) if node.identified else "has not answered",
            whose(known, mark),
        )
    return found


def shown_versions(node: Node, ours: Versions) -> str:
    """Those that differ from this machine's, in red; there they must be equal before it can join."""
    names = node.versions.differing(ours)
    if not names:
        return "as here"
    return "\n".join(
        f"[red]{name.replace('_', '-')} {escape(getattr(node.versions, name) or 'missing')}[/red]"
        f" (here {escape(getattr(ours, name) or 'missing')})"
        for name in names
    )


def whose(known: Known, mark: str | None) -> str:
    said = known.node.cluster
    if known.impostors:
        return "[red]two machines claim its id[/red]"
    return "none" if said is None else "ours" if said == mark else "another"


def conflicts(roster: Roster) -> Iterator[str]:
    for known in roster.conflicts:
        others = ", ".join(
            f"{', '.join(other.addresses[:MOST_SHOWN])} with host key {other.host_key_fingerprint}"
            for other in known.impostors
        )
        yield (
            f"two machines claim the id of {known.node.name} ({', '.join(known.addresses[:MOST_SHOWN])}, "
            f"host key {known.node.host_key_fingerprint}): also {others}. If one is a copy of the other's "
            "disk, delete ~/.omlx/node.json there and restart its `omlx node`"
        )


def as_json(roster: Roster, ours: Versions, mark: str | None) -> dict[str, Any]:
    """`nodes`: one object each, with what it says of itself and how that compares with this machine."""
    return {"nodes": [node_json(known, ours, mark) for known in roster]}


def node_json(known: Known, ours: Versions, mark: str | None) -> dict[str, Any]:
    node = known.node
    return {
        "id": node.id if node.identified else None,
        "name": node.name,
        "addresses": list(node.addresses),
        "ssh_port": node.ssh_port,
        "agent_port": node.agent_port,
        "chip": node.chip,
        "memory_bytes": node.memory_bytes,
        "versions": asdict(node.versions),
        "differing_versions": list(node.versions.differing(ours)) if node.identified else [],
        "host_key_fingerprint": node.host_key_fingerprint,
        "cluster": "none" if node.cluster is None else "ours" if node.cluster == mark else "another",
        "source": node.source,
        "asked_as": node.asked_as,
        "seen_at": node.seen_at,
        "said_goodbye": known.gone,
        "claimed_by_others": [
            {"addresses": list(other.addresses), "host_key_fingerprint": other.host_key_fingerprint}
            for other in known.impostors
        ],
    }
