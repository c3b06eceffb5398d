"""`omlx cluster ...`: make a cluster, look for machines, let them join and leave, plan a model over them."""

import asyncio
import json as json_text
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.check_command import (
    AsJson,
    ClusterFolder,
    Fingerprint,
    Hosts,
    SshPort,
    User,
    asked_of,
    check,
    look,
    show,
)
from omlx.cluster.planner import gigabytes
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.discover_command import discover
from omlx.errors import SshFailed
from omlx.observe import set_up_logging
from omlx.plan_command import plan

if TYPE_CHECKING:
    from omlx.cluster.members import Joined, Members
    from omlx.cluster.trust import Trust

NodeWord = Annotated[str, typer.Argument(metavar="NODE", help="Its name, host, or the beginning of its id.")]

app = typer.Typer(
    no_args_is_help=True, help="Several machines as one: who belongs to it, and what runs where."
)
console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

app.command()(discover)
app.command()(check)
app.command()(plan)


@app.command()
def init(folder: ClusterFolder = CLUSTER_FOLDER, as_json: AsJson = False) -> None:
    """Make a cluster with this machine in it, and the keys that the others will trust."""
    from omlx.cluster.node_identity import node_id, own_addresses
    from omlx.cluster.trust import init_trust

    trust = init_trust(folder, node_id(), (), tuple(own_addresses()))
    if as_json:
        print(
            json_text.dumps(
                {"cluster_id": trust.cluster_id, "node_id": trust.node_id, "folder": str(trust.folder)}
            )
        )
        return
    console.print(
        f"cluster {trust.cluster_id}, with {socket.gethostname()} in it, in {escape(str(trust.folder))}"
    )
    console.print("\nOn each other machine, let this one in (once):", highlight=False)
    console.print(
        f"  echo '{escape(trust.ssh_public_key())}' >> ~/.ssh/authorized_keys",
        soft_wrap=True,
        highlight=False,
    )
    console.print("\nThen, here: omlx cluster discover, omlx cluster join HOST...", highlight=False)


@app.command()
def join(
    hosts: Hosts,
    fingerprint: Fingerprint = None,
    user: User = None,
    port: SshPort = 22,
    folder: ClusterFolder = CLUSTER_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Check machines, and make those that pass nodes of the cluster.

    Each gets a certificate over SSH. Exit code 1 if one of them did not join; the others did.
    """
    from omlx.cluster.joining import join as take_in
    from omlx.cluster.trust import open_trust
    from omlx.cluster.validation import Wanted

    set_up_logging("warning")
    trust = open_trust(folder)
    asked, access = asked_of(hosts, fingerprint, user, port, folder)
    reports = look(asked, access, Wanted(), ask=sys.stdin.isatty() and not as_json)
    told: list[dict[str, object]] = []
    for report in reports:
        if not report.fit:
            told.append(
                {"host": report.host, "joined": False, "why": [f.what for f in report.findings if f.blocking]}
            )
            if not as_json:
                show(report)
            continue
        try:
            joined = asyncio.run(take_in(trust, report))
        except SshFailed as error:
            told.append({"host": report.host, "joined": False, "why": [str(error)]})
            errors.print(f"omlx: {report.host}: {error}", markup=False, style="red")
            continue
        told.append({"host": report.host, "joined": True, "node_id": joined.id})
        if not as_json:
            what = f"{escape(joined.chip)}, {gigabytes(joined.memory_bytes)}"
            console.print(f"[green]{escape(joined.name)}[/green] joined: {what}")
    if as_json:
        print(json_text.dumps(told, indent=2))
    if not all(one["joined"] for one in told):
        raise typer.Exit(1)


@app.command()
def leave(node: NodeWord, folder: ClusterFolder = CLUSTER_FOLDER, as_json: AsJson = False) -> None:
    """Take a node's trust away, here and on every other node, and delete its keys on it."""
    from omlx.cluster.joining import leave as let_go
    from omlx.cluster.members import read_members
    from omlx.cluster.trust import open_trust

    set_up_logging("warning")
    trust = open_trust(folder)
    left = asyncio.run(let_go(trust, read_members(folder).find(node)))
    if as_json:
        print(json_text.dumps({"node_id": left.node.id, "name": left.node.name, "unreached": left.unreached}))
        return
    console.print(f"{escape(left.node.name)} is no node of this cluster any more")
    for name, why in left.unreached.items():
        errors.print(f"{name} was not told: {why}", markup=False, style="yellow")


@app.command()
def status(folder: ClusterFolder = CLUSTER_FOLDER, as_json: AsJson = False) -> None:
    """Show the nodes: what they are, how far away, and how long their certificates last."""
    from omlx.cluster.members import read_members
    from omlx.cluster.trust import open_trust

    trust = open_trust(folder)
    members = read_members(folder)
    if as_json:
        print(
            json_text.dumps(
                {"cluster_id": trust.cluster_id, "nodes": [as_row(trust, one) for one in members]}, indent=2
            )
        )
        return
    console.print(nodes_table(trust, members))


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
