"""`omlx cluster ...`: make a cluster, let machines join and leave; the other commands are gathered here."""

import asyncio
import json as json_text
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

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
from omlx.control_commands import Json, ServerPort, activate, deactivate, reach, rebalance
from omlx.discover_command import discover
from omlx.doctor_command import doctor
from omlx.errors import OmlxError, Refused, SshFailed
from omlx.plan_command import plan
from omlx.status_command import status

if TYPE_CHECKING:
    from omlx.cluster.members import Joined
    from omlx.cluster.trust import Trust
    from omlx.control_client import ControlClient

NodeWord = Annotated[str, typer.Argument(metavar="NODE", help="Its name, host, or the beginning of its id.")]

app = typer.Typer(
    no_args_is_help=True, help="Several machines as one: who belongs to it, and what runs where."
)
console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

app.command()(discover)
app.command()(check)
app.command()(plan)
app.command()(status)
app.command()(rebalance)
app.command()(activate)
app.command()(deactivate)
app.command()(doctor)


@app.command()
def init(folder: ClusterFolder = CLUSTER_FOLDER, as_json: AsJson = False) -> None:
    """Make a cluster with this machine in it, and the keys that the others will trust.

    Example: omlx cluster init
    """
    trust = make(folder)
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
    console.print("\nA machine that you can log into by a key of yours joins as it is:", highlight=False)
    console.print("  omlx cluster join HOST...", highlight=False)
    console.print("\nOn any other, let this one in (once):", highlight=False)
    console.print(
        f"  echo '{escape(trust.ssh_public_key())}' >> ~/.ssh/authorized_keys",
        soft_wrap=True,
        highlight=False,
    )


def make(folder: Path) -> "Trust":
    """Raises BadSetting where there is a cluster, or this machine is in another one."""
    from omlx.cluster.node_identity import node_id, own_addresses
    from omlx.cluster.trust import init_trust

    return init_trust(folder, node_id(), (), tuple(own_addresses()))


def open_or_make(folder: Path) -> "Trust":
    from omlx.cluster.trust import open_trust

    if (folder.expanduser() / "authority").exists():
        return open_trust(folder)
    trust = make(folder)
    errors.print(f"made cluster {trust.cluster_id}, with this machine in it", markup=False)
    return trust


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

    Each gets a certificate over SSH, and lets the cluster's key in from then on; for the first login your own
    keys are tried too. Where there is no cluster yet, it is made first. Exit code 1 if one of them did not
    join; the others did.

    Example: omlx cluster join studio.local mini.local
    """
    from omlx.cluster.joining import join as take_in
    from omlx.cluster.validation import Wanted

    trust = open_or_make(folder)
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
        names = ("bytes_per_s", "flop_per_s")
        speed = None if joined.speed is None else dict(zip(names, joined.speed, strict=True))
        told.append({"host": report.host, "joined": True, "node_id": joined.id, "speed": speed})
        if not as_json:
            what = f"{escape(joined.chip)}, {gigabytes(joined.memory_bytes)}"
            if joined.speed is not None:
                timed = "a small model was timed: its chip is in no table"
                what += f", {joined.speed[0] / 1e9:.0f} GB/s ({timed})"
            console.print(f"[green]{escape(joined.name)}[/green] joined: {what}")
    if as_json:
        print(json_text.dumps(told, indent=2))
    if not all(one["joined"] for one in told):
        raise typer.Exit(1)


@app.command()
def leave(
    node: NodeWord,
    at_once: Annotated[
        bool, typer.Option("--now", help="Go on even where the server cannot take its work away first.")
    ] = False,
    folder: ClusterFolder = CLUSTER_FOLDER,
    port: ServerPort = None,
    as_json: Json = False,
) -> None:
    """Take a node's trust away, here and on every other node, and delete its keys on it.

    A running server moves its layers to other nodes first, while requests go on.

    Example: omlx cluster leave mini
    """
    from omlx.cluster.joining import leave as let_go
    from omlx.cluster.members import read_members
    from omlx.cluster.trust import open_trust

    trust = open_trust(folder)
    gone = read_members(folder).find(node)
    with reach(port) as server, without_layers(server, gone, folder, at_once) as drained:
        if drained and not as_json:
            console.print(f"{escape(gone.name)} holds no layers any more: other nodes have them")
        left = asyncio.run(let_go(trust, gone))
    if as_json:
        told = {"node_id": gone.id, "name": gone.name, "drained": drained, "unreached": left.unreached}
        print(json_text.dumps(told))
        return
    console.print(f"{escape(gone.name)} is no node of this cluster any more")
    for name, why in left.unreached.items():
        errors.print(f"{name} was not told: {why}", markup=False, style="yellow")


@contextmanager
def without_layers(server: "ControlClient", node: "Joined", folder: Path, at_once: bool) -> Iterator[bool]:
    """Drained meanwhile, where a server runs that has it in use; that is said. Whatever keeps it from leaving
    then, Ctrl-C too, it is given back to use. Raises as `drain`."""
    from omlx.cluster.members import read_members

    drained = drain(server, node, at_once)
    try:
        yield drained
    finally:
        if drained and any(one.id == node.id for one in read_members(folder)):
            give_back(server, node)


def give_back(server: "ControlClient", node: "Joined") -> None:
    try:
        server.undrain(node.id)
    except OmlxError as error:
        told = f"{node.name} gets no layers until `omlx serve` is started again: {error}"
        errors.print(told, markup=False, style="yellow")
    else:
        errors.print(f"{node.name} has not left, and is in use again", markup=False)


def drain(server: "ControlClient", node: "Joined", at_once: bool) -> bool:
    """Whether a running server had the node in use, and has it no more.

    Raises Refused where that cannot be, unless it leaves `at_once`: then it is said and False.
    """
    look = server.look()
    if not look.heard or (look.map is not None and look.map.node(node.id) is None):
        return False
    try:
        with errors.status(f"{escape(node.name)}: the server takes its layers to other nodes"):
            server.drain(node.id)
    except OmlxError as error:
        if not at_once:
            raise Refused(f"{node.name} stays: {error}; --now lets it go all the same") from error
        errors.print(f"{node.name} was not drained: {error}", markup=False, style="yellow")
        return False
    return True
