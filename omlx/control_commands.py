"""`omlx cluster activate`, `deactivate` and `rebalance`: orders to the running server of this machine.

Ctrl-C ends the waiting, not what the server has begun.
"""

import json as json_text
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from omlx.settings import load_settings

if TYPE_CHECKING:
    from omlx.control_client import ControlClient

console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)

ServerPort = Annotated[
    int | None, typer.Option("--port", help="Where the server of this machine listens \\[default: 8000].")
]
ModelWord = Annotated[str, typer.Argument(metavar="MODEL", help="Its id, as `omlx models` lists it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def reach(port: int | None) -> "ControlClient":
    """The server of this machine, by the settings; nothing is sent yet. Raises BadSetting."""
    from omlx.control_client import ControlClient

    return ControlClient(load_settings(port=port))


def activate(model: ModelWord, port: ServerPort = None, as_json: Json = False) -> None:
    """Load a model on the running server, and wait until it can answer.

    Example: omlx cluster activate Qwen3-32B-4bit
    """
    started = time.monotonic()
    with reach(port) as server, errors.status(f"loading {escape(model)}"):
        said = server.activate(model)
    if as_json:
        print(json_text.dumps(said))
        return
    console.print(f"{model} is {said.get('state')}, after {time.monotonic() - started:.1f} s", markup=False)


def deactivate(
    model: ModelWord,
    within: Annotated[
        float,
        typer.Option(min=0.0, max=3600.0, metavar="SECONDS", help="How long answers may take to end."),
    ] = 30.0,
    port: ServerPort = None,
    as_json: Json = False,
) -> None:
    """Take a model off the running server: no new requests, running ones end, its memory is free.

    Example: omlx cluster deactivate Qwen3-32B-4bit --within 60
    """
    with reach(port) as server, errors.status(f"{escape(model)}: waiting for its answers to end"):
        said = server.deactivate(model, within)
    if as_json:
        print(json_text.dumps(said))
        return
    console.print(f"{model} is not loaded any more", markup=False)


def rebalance(
    model: ModelWord,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would move, and what it would bring.")
    ] = False,
    port: ServerPort = None,
    as_json: Json = False,
) -> None:
    """Move a model's layers to where they run faster, by what was measured; requests go on.

    Example: omlx cluster rebalance Qwen3-32B-4bit --dry-run
    """
    with reach(port) as server, errors.status(f"{escape(model)}: comparing plans"):
        said = server.rebalance(model, dry_run=dry_run)
    if as_json:
        print(json_text.dumps(said, indent=2))
        return
    for line in said.get("lines") or ():
        console.print(str(line), markup=False)
    if said.get("moved"):
        console.print("moved")
    else:
        console.print("nothing was moved (--dry-run)" if dry_run else "nothing was moved")
