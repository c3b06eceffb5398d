"""`omlx cluster check`: look at other machines over SSH, and say what keeps them from joining."""

import asyncio
import getpass
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.cluster.findings import Finding, Report, to_json
from omlx.cluster.known_hosts import KnownHosts, check_fingerprint
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.errors import BadSetting

if TYPE_CHECKING:
    from omlx.cluster.ssh import Access
    from omlx.cluster.validation import Asked, Wanted

MOST_HOSTS = 64
STYLES = {"blocking": "bold red", "warning": "yellow", "fact": "dim"}

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

Hosts = Annotated[list[str], typer.Argument(metavar="HOST...", help="Names or addresses of the machines.")]
Fingerprint = Annotated[
    str | None,
    typer.Option(
        metavar="SHA256:...", help="Of the one HOST's key, as `ssh-keygen -lf` prints it on that machine."
    ),
]
User = Annotated[str | None, typer.Option(help="Who logs in there \\[default: your name here].")]
SshPort = Annotated[int, typer.Option(help="Where sshd listens there.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="A model's folder, the same on each machine, to compare its files."),
]
ClusterFolder = Annotated[Path, typer.Option("--folder", help="Where the cluster's keys are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON array, a report each.")]


def check(  # noqa: PLR0913 (one parameter a flag)
    hosts: Hosts,
    fingerprint: Fingerprint = None,
    user: User = None,
    port: SshPort = 22,
    model: Model = None,
    folder: ClusterFolder = CLUSTER_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Look at other machines before they join the cluster. Changes nothing there.

    A machine that is not known yet shows its key's fingerprint, to be compared once. Exit code 1 if anything
    keeps one of them from joining.
    """
    from omlx.cluster.validation import Wanted

    asked, access = asked_of(hosts, fingerprint, user, port, folder)
    reports = look(asked, access, Wanted(model=model), ask=sys.stdin.isatty() and not as_json)
    if as_json:
        print(json.dumps([to_json(report) for report in reports], indent=2))
    else:
        for report in reports:
            show(report)
    if not all(report.fit for report in reports):
        raise typer.Exit(1)


def asked_of(
    hosts: list[str], fingerprint: str | None, user: str | None, port: int, folder: Path
) -> "tuple[list[Asked], Access]":
    """Whom to look at, and with which keys. Raises BadSetting for what is no host, or for too many."""
    from omlx.cluster.ssh import Access, target
    from omlx.cluster.trust import open_trust
    from omlx.cluster.validation import Asked

    if len(hosts) > MOST_HOSTS:
        raise BadSetting(f"{len(hosts)} hosts at once; check {MOST_HOSTS} at most")
    if fingerprint is not None and len(hosts) != 1:
        raise BadSetting("--fingerprint is of one machine; name that HOST alone")
    vouched = check_fingerprint(fingerprint) if fingerprint is not None else None
    folder = folder.expanduser()
    access = Access(open_trust(folder).ssh_key, KnownHosts(folder / "known_hosts"), own_keys=True)
    name = user or getpass.getuser()
    return [Asked(target(host, name, port), vouched) for host in dict.fromkeys(hosts)], access


def look(asked: "list[Asked]", access: "Access", wanted: "Wanted", ask: bool) -> list[Report]:
    """A report each. `ask`: a person may vouch for machines not known yet; these are checked again."""
    from omlx.cluster.validation import Asked, check_hosts

    with errors.status("looking at the machines"):
        reports = asyncio.run(check_hosts(asked, access, wanted))
    if not ask:
        return reports
    again = {
        index: Asked(asked[index].target, report.fingerprint)
        for index, report in enumerate(reports)
        if is_unknown(report) and vouches(report)
    }
    if again:
        with errors.status("looking at the machines"):
            checked = asyncio.run(check_hosts(list(again.values()), access, wanted))
        for index, report in zip(again, checked, strict=True):
            reports[index] = report
    return reports


def is_unknown(report: Report) -> bool:
    return any(finding.what == "host key unknown" for finding in report.findings)


def vouches(report: Report) -> bool:
    """Whether the person here says that the key is the machine's own."""
    errors.print(f"{report.host} is not known yet. Its host key is {report.fingerprint}", markup=False)
    errors.print("Compare it on that machine: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", markup=False)
    return typer.confirm("Is it the same?", default=False, err=True)


def show(report: Report, fit: str = "can join", unfit: str = "cannot join") -> None:
    """A table, the worst first; what to do stands below what it is about. `fit`, `unfit`: what it is called
    by whether anything blocks."""
    state = f"[green]{fit}[/green]" if report.fit else f"[bold red]{unfit}[/bold red]"
    place = escape(f"{report.user}@{report.host}")
    table = Table("what", "seen", "wanted", title=f"{place}: {state}", title_justify="left")
    for finding in report.findings:
        style = STYLES[finding.level]
        table.add_row(f"[{style}]{escape(finding.what)}[/{style}]", seen(finding), escape(finding.wanted))
    console.print(table)


def seen(finding: Finding) -> str:
    fix = f"\n-> {escape(finding.fix)}" if finding.fix else ""
    return escape(finding.seen) + fix
