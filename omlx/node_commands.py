"""`omlx node run`, `install` and `uninstall`: this machine, announced to the cluster's coordinator."""

import asyncio
import json as json_text
import os
import signal
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from omlx.cluster.nodes import Node, is_address
from omlx.cluster.service import Account, Manager, Service, find_account, find_manager, wait_until
from omlx.errors import BadSetting, Refused
from omlx.observe import set_up_logging

if TYPE_CHECKING:
    from omlx.cluster.node_agent import Holder

HOME = Path("~/.omlx")
RUNS_WITHIN_S = 10.0
LABEL, UNIT = "ai.omlx.node", "omlx-node"
MOST_SAID = 2000
"""Bytes of the log's end that are looked at for a reason."""

app = typer.Typer(no_args_is_help=True, help="Announce this machine, now or always.")
console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

Addresses = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="IP",
        help="Announce this IPv4 address of this machine only; repeatable \\[default: all that it has].",
    ),
]
SshPort = Annotated[int, typer.Option(min=1, max=65535, help="Where this machine's SSH server listens.")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON.")]


@app.command()
def run(address: Addresses = None, ssh_port: SshPort = 22, json: Json = False) -> None:
    """Announce this machine, and run its part of the cluster, until Ctrl-C.

    A machine in no cluster opens no port. A member runs Ray, which listens: with mutual TLS and a token.

    Example: omlx node run --address 10.0.0.2
    """
    agent = import_agent()
    given = check_addresses(address or ())
    home = HOME.expanduser()
    set_up_logging("info")

    def tell(node: Node, addresses: tuple[str, ...]) -> None:
        lock.write(announced=True)
        print(start_json(node, addresses) if json else start_line(node, addresses), flush=True)

    async def until_ended() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await agent.run_agent(home, ended, tell, addresses=agent.among(given), ssh_port=ssh_port)

    with agent.only_one(home / "node.lock") as lock:
        asyncio.run(until_ended())


@app.command()
def install(address: Addresses = None, ssh_port: SshPort = 22, json: Json = False) -> None:
    """Have `omlx node run` always run here, by launchd or systemd. Again: bring that up to date.

    With sudo it runs without anybody logged in, under your account all the same.
    """
    import_agent()
    account = find_account()
    service = node_service(account, find_program(account), check_addresses(address or ()), ssh_port)
    installed = put_in(find_manager(account), service, account)
    if json:
        print(json_text.dumps(installed.as_json()))
        return
    for line in installed.lines():
        console.print(line, markup=False)


@app.command()
def uninstall(json: Json = False) -> None:
    """Stop what `install` put in, and remove it. What this machine is in a cluster, stays."""
    account = find_account()
    manager, service = find_manager(account), node_service(account, sys.executable, (), 22)
    removed, file, elsewhere = manager.take_out(service), manager.file(service), manager.elsewhere(service)
    if json:
        other = None if elsewhere is None else str(elsewhere)
        print(json_text.dumps({"removed": removed, "file": str(file), "elsewhere": other}))
        return
    what = f"stopped, and removed {file}" if removed else f"nothing was installed: there is no {file}"
    console.print(f"{what}; node.json, cluster and logs in {account.home / '.omlx'} stay", markup=False)
    if elsewhere is not None:
        console.print(f"there is {elsewhere} too: {how_to_remove(account)}", markup=False)


# ------------------------------------------------------------------ parts


def import_agent() -> ModuleType:
    """Raises BadSetting where what it needs is not installed."""
    try:
        from omlx.cluster import node_agent
    except ImportError as error:
        raise BadSetting(
            f"omlx node needs {error.name}, which is not installed; pip install 'omlx-cluster[cluster]'"
        ) from error
    return node_agent


def check_addresses(given: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        if not is_address(text) or ":" in text:
            raise BadSetting(f"--address {text[:80]!r} is no IPv4 address; write it like 10.0.0.2")
    return tuple(dict.fromkeys(given))


def node_service(account: Account, program: str, addresses: tuple[str, ...], ssh_port: int) -> Service:
    """Who installs for another account keeps out of its folders, the log included."""
    options = [word for text in addresses for word in ("--address", text)]
    if ssh_port != 22:
        options += ["--ssh-port", str(ssh_port)]
    return Service(
        LABEL,
        UNIT,
        "oMLX node: announces this machine",
        (program, "node", "run", *options),
        account.home / ".omlx/logs/node.log" if account.own else Path("/var/log/omlx-node.log"),
        None if account.own else account.name,
    )


def find_program(account: Account) -> str:
    """The `omlx` that belongs to this very Python. Raises BadSetting where a service could not use it."""
    beside = Path(sysconfig.get_path("scripts")) / "omlx"
    called = Path(sys.argv[0])
    program = beside if beside.is_file() or called.name != "omlx" else called.absolute()
    if not os.access(program, os.X_OK):
        raise BadSetting(f"there is no program {program}; install omlx with pip into a folder that stays")
    if account.system and account.name == "root":
        for path in {program, program.resolve(), Path(sys.executable).resolve()}:
            if path.stat().st_uid != 0:
                raise BadSetting(
                    f"{path} is not root's, and root's service would run it: use sudo from the account that "
                    "it shall run as, or install omlx as root"
                )
    return str(program)


@dataclass(frozen=True, slots=True)
class Installed:
    """What `install` did."""

    service: Service
    account: Account
    file: Path
    pid: int
    hint: str | None

    def lines(self) -> list[str]:
        said = [
            f"wrote {self.file}",
            f"omlx node runs as {self.account.name}, pid {self.pid}; its log is {self.service.log}",
            f"to undo it: {self.undo}",
        ]
        return said if self.hint is None else [*said, self.hint]

    @property
    def undo(self) -> str:
        return f"{'sudo ' if not self.account.own else ''}{self.service.command[0]} node uninstall"

    def as_json(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "log": str(self.service.log),
            "command": list(self.service.command),
            "account": self.account.name,
            "scope": "system" if self.account.system else "user",
            "pid": self.pid,
            "undo": self.undo,
            "hint": self.hint,
        }


def put_in(manager: Manager, service: Service, account: Account) -> Installed:
    """Raises Refused when another agent is in the way, or the service does not run within 10 s."""
    elsewhere = manager.elsewhere(service)
    if elsewhere is not None:
        raise Refused(f"it is installed as {elsewhere} already: {how_to_remove(account)}")
    agent, lock = import_agent(), account.home / ".omlx/node.lock"
    other: Holder | None = agent.holder(lock)
    if other is not None and other.pid != manager.pid(service):
        raise Refused(f"omlx node runs already, by hand: end it first (pid {other.pid or 'not known'})")
    if account.own:
        make_log_folder(service.log)
    manager.put_in(service)

    def runs() -> bool:
        now: Holder | None = agent.holder(lock)
        return now is not None and now.announced and now.pid == manager.pid(service)

    if not wait_until(runs, RUNS_WITHIN_S):
        raise Refused(
            f"wrote {manager.file(service)} and started it, but it does not run after {RUNS_WITHIN_S:g} s: "
            f"{last_line(service.log)}"
        )
    pid = manager.pid(service)
    if pid is None:
        raise Refused(f"it ended as soon as it had started: {last_line(service.log)}")
    return Installed(service, account, manager.file(service), pid, hint(account, service))


def make_log_folder(file: Path) -> None:
    try:
        for folder in (file.parent.parent, file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"log folder {file.parent}: {error.strerror}") from error


def last_line(log: Path) -> str:
    """Of what it wrote, else where it would have been."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_SAID))
            lines = file.read(MOST_SAID).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        lines = []
    said = "".join(letter for letter in lines[-1] if letter.isprintable()) if lines else ""
    return f"{said[:300]} (in {log})" if said else f"nothing in {log} says why"


def how_to_remove(account: Account) -> str:
    return "`omlx node uninstall` without sudo removes it" if account.system else "sudo omlx node uninstall"


def hint(account: Account, service: Service) -> str | None:
    """What a user's own service lacks."""
    if account.system:
        return None
    if sys.platform == "darwin":
        return (
            "it runs while you are logged in, and macOS 15 and later may keep it from the local network; "
            f"neither is so after `{service.command[0]} node uninstall` and `sudo {service.command[0]} node "
            "install`"
        )
    if (Path("/var/lib/systemd/linger") / account.name).exists():
        return None
    return f"it ends when you log out, unless: loginctl enable-linger {account.name}"


# ------------------------------------------------------------------ words


def start_line(node: Node, addresses: tuple[str, ...]) -> str:
    where = ", ".join(addresses) or "no address yet (no network is up)"
    whose = "no cluster" if node.cluster is None else f"cluster {node.cluster}"
    return f"{node.name} ({node.id}) is announced at {where}; {whose}"


def start_json(node: Node, addresses: tuple[str, ...]) -> str:
    return json_text.dumps(
        {
            "name": node.name,
            "id": node.id,
            "addresses": list(addresses),
            "ssh_port": node.ssh_port,
            "host_key_fingerprint": node.host_key_fingerprint,
            "cluster": node.cluster,
            "pid": os.getpid(),
        }
    )
