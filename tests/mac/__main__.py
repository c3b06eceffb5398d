"""The checklist on two Macs, from the one that made the cluster; exit code 1 where a step failed."""

import argparse
import getpass
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mac.cable import cable
from tests.mac.ending import ended
from tests.mac.machines import Failed, Mlx
from tests.mac.meeting import checked, member, seen, this_machine
from tests.mac.server import TOKENS
from tests.mac.splitting import killed, memory, split
from tests.mac.steps import Asked, Planned, Run, Step

STEPS: tuple[Planned, ...] = (
    this_machine,
    seen,
    checked,
    member,
    memory,
    split,
    killed,
    cable,
    ended,
)
STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mac",
        description="What only two real Macs can show. Run it on the Mac that made the cluster.",
    )
    parser.add_argument("host", metavar="HOST", help="the other Mac, with `omlx node install` done")
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="a model's folder on this Mac")
    parser.add_argument(
        "--user", default=getpass.getuser(), help="who logs in there (default: your name here)"
    )
    parser.add_argument(
        "--fingerprint", metavar="SHA256:...", help="of HOST's key, if HOST has not joined yet"
    )
    parser.add_argument("--no-hands", action="store_true", help="skip what asks for a cable to be pulled")
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help="of each answer (%(default)s); those in which something happens must last a second or two",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def carry_out(run: Run) -> list[Step]:
    """Every step, told as it ends. Servers end with it, however it ends."""
    steps = []
    try:
        for planned in STEPS:
            errors.print(f"... {planned.what}", markup=False, style="dim")
            steps.append(done := planned(run))
            errors.print(
                f"{done.outcome}: {done.what}: {done.detail}", markup=False, style=STYLES[done.outcome]
            )
    finally:
        try:
            run.close()
        except Failed as failed:
            errors.print(str(failed), markup=False)
    return steps


def head_line(here: Mlx | None) -> str:
    if here is not None and here.shows_macos:
        return f"on macOS {here.release}, {here.name}"
    system = f"{here.system} on {here.machine}" if here is not None else "a machine without MLX"
    return f"this is {system}: nothing below shows anything about macOS, Metal or Thunderbolt"


def show(steps: list[Step], here: Mlx | None) -> None:
    table = Table("", "step", "outcome", "detail", title=escape(head_line(here)), title_justify="left")
    for number, one in enumerate(steps, 1):
        style = STYLES[one.outcome]
        table.add_row(str(number), escape(one.what), f"[{style}]{one.outcome}[/{style}]", escape(one.detail))
    console.print(table)


def main(words: list[str]) -> int:
    parser = options()
    given = parser.parse_args(words)
    model = given.model.expanduser().absolute()
    if not (model / "config.json").is_file():
        parser.error(f"{model} is no model's folder: it has no config.json")
    asked = Asked(given.host, model, given.user, given.fingerprint, not given.no_hands, given.tokens)
    # So that what was started ends with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="omlx-mac-"))
    run = Run(asked, folder, lambda line: errors.print(line, markup=False, style="bold"))
    steps = carry_out(run)
    failed = any(one.outcome == "fail" for one in steps)
    if given.json:
        macos = run.here is not None and run.here.shows_macos
        told = {"host": given.host, "shows_macos": macos, "steps": [asdict(one) for one in steps]}
        print(json.dumps(told, indent=2))
    else:
        show(steps, run.here)
    if failed:
        errors.print(f"the servers' logs are in {folder}", markup=False)
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
