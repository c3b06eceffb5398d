"""`omlx cluster doctor`: what keeps the cluster from serving: keys, machines, Ray's port, the server."""

import json as json_text
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.check_command import STYLES, ClusterFolder, look, seen, show
from omlx.cluster.findings import Finding, Level, Report, sort_findings, to_json
from omlx.cluster.members import now, read_members
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.control_commands import Json, ServerPort, reach
from omlx.errors import BadSetting
from omlx.settings import load_settings

if TYPE_CHECKING:
    from omlx.cluster.trust import Trust
    from omlx.control_client import Look

console = Console()


def doctor(folder: ClusterFolder = CLUSTER_FOLDER, port: ServerPort = None, as_json: Json = False) -> None:
    """Look for what keeps the cluster from serving. Changes nothing.

    Keys and certificates, each node over SSH (clock, versions, ports, memory), the port of Ray's head, and
    what the running server says of its stages. Exit code 1 if anything blocks.

    Example: omlx cluster doctor
    """
    with reach(port) as server:
        asked, place = server.look(), server.place
    trust, keys = look_at_keys(folder)
    ray = look_at_ray(load_settings(port=port).ray_port, asked.map is not None)
    here = sort_findings([*keys, *look_at_server(asked, place), ray])
    reports = look_at_nodes(trust) if trust is not None else []
    fit = not any(finding.blocking for finding in here) and all(report.fit for report in reports)
    if as_json:
        said = {"fit": fit, "here": msgspec.to_builtins(here), "nodes": [to_json(one) for one in reports]}
        print(json_text.dumps(said, indent=2))
    else:
        console.print(own_table(here))
        for report in reports:
            show(report, "can serve", "cannot serve")
        if fit:
            console.print("nothing stands in the way", style="green")
    if not fit:
        raise typer.Exit(1)


# ------------------------------------------------------------------ what is looked at


def look_at_keys(folder: Path) -> "tuple[Trust | None, list[Finding]]":
    """The cluster that was made here, if any, and what is wrong with its keys."""
    from omlx.cluster.membership import open_member
    from omlx.cluster.trust import open_trust

    folder = folder.expanduser()
    founded = (folder / "authority").is_dir()
    if not founded and not (folder / "node").is_symlink():
        fix = "`omlx cluster init` here, or `omlx cluster join` from its coordinator"
        return None, [Finding("cluster", "blocking", f"none in {folder}", "one", fix)]
    try:
        trust = open_trust(folder) if founded else None
        member = open_member(folder)
        nodes = list(certificates(trust)) if trust is not None else []
    except BadSetting as error:
        return None, [Finding("keys", "blocking", str(error), "files that can be used", "as it says")]
    role = "the coordinator" if founded else "a node; its coordinator looks at all of them"
    cluster = Finding("cluster", "fact", f"{member.cluster_id}, and this machine is {role}")
    fix = "omlx cluster join this machine again, from its coordinator" if not founded else "as it says"
    own = certificate(f"node {member.node_id}", member.until, member.warning(now()), fix)
    return trust, [cluster, own, *nodes]


def certificates(trust: "Trust") -> Iterator[Finding]:
    """Of the nodes that joined, as the ledger has them."""
    from omlx.cluster.membership import WARN_BEFORE

    ledger = trust.ledger()
    for node in read_members(trust.folder):
        issued, fix = ledger.newest(node.id), f"omlx cluster join {node.host}"
        if issued is None or issued.revoked:
            wrong = "none was issued" if issued is None else "it is revoked"
            yield Finding(f"certificate of {node.name}", "blocking", wrong, "a valid one", fix)
            continue
        late = issued.until - now() < WARN_BEFORE
        yield certificate(node.name, issued.until, f"until {issued.until:%Y-%m-%d}" if late else None, fix)


def certificate(whose: str, until: datetime, warning: str | None, fix: str) -> Finding:
    """`warning`: None where it lasts long enough."""
    what, days = f"certificate of {whose}", (until - now()).days
    if warning is None:
        return Finding(what, "fact", f"{days} days left")
    return Finding(what, "blocking" if days < 0 else "warning", warning, "more than 30 days left", fix)


def look_at_nodes(trust: "Trust") -> list[Report]:
    """Each over SSH, by the same rules as before it joined."""
    from omlx.cluster.known_hosts import KnownHosts
    from omlx.cluster.ssh import Access, target
    from omlx.cluster.validation import Asked, Wanted

    access = Access(trust.ssh_key, KnownHosts(trust.folder / "known_hosts"))
    asked = [Asked(target(node.host, node.user, node.port)) for node in read_members(trust.folder)]
    return look(asked, access, Wanted(), ask=False) if asked else []


def look_at_server(asked: "Look", place: str) -> Iterator[Finding]:
    """A server that is not there stands in nobody's way; one that cannot compute does."""
    if asked.map is None:
        level: Level = "blocking" if asked.heard else "warning"
        yield Finding("server", level, asked.why or "no answer", f"an omlx server at {place}")
        return
    yield Finding("server", "fact", f"answers at {place}")
    for node in asked.map.nodes:
        if node.state != "up":
            said = f"{node.state}: {node.why}" if node.why else node.state
            yield Finding(f"node {node.name}", "warning", said, "up")
    for model in asked.map.models:
        if model.state in ("failed", "stalled"):
            fix = "look into the server's log; `omlx cluster activate` loads it again"
            yield Finding(f"model {model.id}", "blocking", model.why or model.state, "ready", fix)
        for stage in model.lost:
            said = f"layers {stage.start} to {stage.end - 1} on {stage.node} are lost"
            fix = f"look at {stage.node}: does it run, and `omlx node` on it?"
            yield Finding(f"model {model.id}", "blocking", said, "every stage ready", fix)


def look_at_ray(port: int, served: bool) -> Finding:
    """Whether Ray's head has its port, or can have it."""
    what = "port of Ray's head"
    if is_free(port):
        return Finding(what, "fact", f"{port} is free")
    holder = find_holder(port)
    if holder is None:
        level: Level = "warning" if served else "blocking"
        fix = f"`sudo lsof -i :{port}` names it; end it if it is not our server's"
        return Finding(what, level, f"{port} is held by a process that cannot be seen", "free, or ours", fix)
    said = f"{port} is held by {name_of(holder)} (process {holder.pid})"
    if not is_ours(holder):
        return Finding(what, "blocking", said, "free, or ours", "end it, and start the server again")
    if served:
        return Finding(what, "fact", f"{said}, our server's")
    return Finding(
        what, "warning", f"{said}, of a server that is gone", "free", "the next `omlx serve` ends it"
    )


# ------------------------------------------------------------------ this machine's ports


def is_free(port: int) -> bool:
    """Whether a process here could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def find_holder(port: int) -> psutil.Process | None:
    """Who listens there, among this user's processes: those of others a Mac does not show."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real != os.getuid():
                continue
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                    return process
    return None


def is_ours(process: psutil.Process) -> bool:
    """Whether one of our sessions started it."""
    from omlx.cluster.ray_processes import MARK

    with suppress(psutil.Error):
        return MARK in process.environ()
    return False


def name_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.name()
    return "?"


def own_table(findings: tuple[Finding, ...]) -> Table:
    """As a machine's report, the worst first."""
    table = Table("what", "seen", "wanted", title="this machine", title_justify="left")
    for finding in findings:
        style = STYLES[finding.level]
        table.add_row(f"[{style}]{escape(finding.what)}[/{style}]", seen(finding), escape(finding.wanted))
    return table
