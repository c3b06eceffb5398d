"""`omlx cache stats`, `verify` and `clear`: what lies in the cache folder, is it whole, and away with it."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.cluster.planner import gigabytes
from omlx.errors import BadSetting, ModelNotFound
from omlx.ids import BlockId
from omlx.settings import load_settings
from omlx.show import LoadBars

if TYPE_CHECKING:
    from omlx.cache.folder import Usage, Verdict

SHORT_ROOT = 12
"""Digits that stand for a model whose name is not known."""

app = typer.Typer(no_args_is_help=True, help="What is kept on disk of prompts: show it, check it, delete it.")
console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

OnlyModel = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Of this model only \\[default: of all].")
]
CacheFolder = Annotated[
    Path | None, typer.Option("--paged-ssd-cache-dir", help="The folder \\[default: ~/.omlx/cache].")
]


@dataclass(frozen=True, slots=True)
class Kept:
    """What the folder has of one model, under all the identities that it has had."""

    name: str
    roots: tuple[BlockId, ...]
    blocks: int
    bytes: int
    used_at: float | None
    """Seconds since the epoch."""


@app.command()
def stats(model: OnlyModel = None, paged_ssd_cache_dir: CacheFolder = None) -> None:
    """Show what each model has there, and how much room is left. Reads only; a server may be running."""
    from omlx.cache.budget import free_floor_bytes, parse_size

    settings = load_settings(cache=True, paged_ssd_cache_dir=paged_ssd_cache_dir)
    folder = settings.paged_ssd_cache_dir
    everything = find_kept(folder)
    chosen = choose(everything, model, folder)
    if not chosen:
        return say_nothing_is_kept(folder)
    table = Table("model", "blocks", "bytes", "last used")
    for kept in chosen:
        table.add_row(escape(kept.name), f"{kept.blocks:,}", gigabytes(kept.bytes), moment(kept.used_at))
    console.print(table)
    with reading(folder):
        disk = shutil.disk_usage(folder)
    budget = parse_size(settings.paged_ssd_cache_max_size, disk.total, "paged_ssd_cache_max_size")
    floor = free_floor_bytes(disk.total)
    print(f"{gigabytes(total_bytes(everything))} of {gigabytes(budget)} used in {folder}")
    print(f"{gigabytes(disk.free)} free on its disk, {gigabytes(floor)} are always left to others")


@app.command()
def verify(model: OnlyModel = None, paged_ssd_cache_dir: CacheFolder = None) -> None:
    """Read every block and compare its checksum. Deletes nothing; a server may be running.

    Exit code 1 if a block is bad. A server finds that out by itself, and computes the block again.
    """
    folder = load_settings(cache=True, paged_ssd_cache_dir=paged_ssd_cache_dir).paged_ssd_cache_dir
    chosen = choose(find_kept(folder), model, folder)
    if not chosen:
        return say_nothing_is_kept(folder)
    good, bad, done, total = 0, 0, 0, total_bytes(chosen)
    with LoadBars(errors) as bars:
        for verdict in verdicts(folder, chosen):
            done += verdict.bytes
            if errors.is_terminal:
                bars.tell("reading", min(done, total), total)
            path = path_of(folder, verdict)
            if verdict.problem is None:
                good += 1
            elif path.exists():  # else it was given up while we read
                bad += 1
                errors.print(f"bad: {path}: {verdict.problem.removeprefix(f'{path}: ')}", markup=False)
    print(f"{good:,} blocks are good, {bad:,} bad, in {folder}")
    if bad:
        raise typer.Exit(1)


@app.command()
def clear(
    model: OnlyModel = None,
    paged_ssd_cache_dir: CacheFolder = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete what is kept, after asking. Not while a server uses the folder."""
    from omlx.cache.folder import Folder
    from omlx.cache.folder import clear as delete

    folder = load_settings(cache=True, paged_ssd_cache_dir=paged_ssd_cache_dir).paged_ssd_cache_dir
    chosen = choose(find_kept(folder), model, folder)
    if not chosen:
        return say_nothing_is_kept(folder)
    names = ", ".join(kept.name for kept in chosen)
    if not yes:
        blocks = sum(kept.blocks for kept in chosen)
        question = f"Delete {blocks:,} blocks ({gigabytes(total_bytes(chosen))}) of {names} in {folder}?"
        typer.confirm(question, abort=True)
    # Only now: to open a folder of an older version is to clear it.
    lock = Folder.open(folder)
    try:
        with reading(folder):
            for root in roots(chosen):
                delete(folder, root)
    finally:
        lock.close()
    gone = set(roots(chosen))
    left = total_bytes(kept for kept in find_kept(folder) if gone.intersection(kept.roots))
    print(f"{gigabytes(total_bytes(chosen) - left)} freed in {folder}")
    if left:
        raise BadSetting(f"{gigabytes(left)} could not be deleted in {folder}; look at its permissions")


# ------------------------------------------------------------------ what is there


def find_kept(folder: Path) -> list[Kept]:
    """By model, the one used last first; nothing where there is no folder. Raises BadSetting."""
    from omlx.cache.folder import usage

    with reading(folder):
        if not folder.exists():
            return []
        next(folder.iterdir(), None)  # what cannot be listed would look empty
        found = usage(folder)
    by_name: dict[str, list[Usage]] = {}
    for one in found:
        by_name.setdefault(one.name or one.root.hex()[:SHORT_ROOT], []).append(one)
    return [
        Kept(
            name,
            roots=tuple(one.root for one in some),
            blocks=sum(one.blocks for one in some),
            bytes=sum(one.bytes for one in some),
            used_at=some[0].used_at,
        )
        for name, some in by_name.items()
    ]


def choose(kept: list[Kept], model: str | None, folder: Path) -> list[Kept]:
    """All, or the one of that name. Raises ModelNotFound with the names where there are others only."""
    chosen = [one for one in kept if model is None or one.name == model]
    if kept and not chosen:
        names = ", ".join(one.name for one in kept)
        raise ModelNotFound(f"nothing of a model {model!r} is kept in {folder}; there are: {names}")
    return chosen


def roots(kept: Iterable[Kept]) -> list[BlockId]:
    return [root for one in kept for root in one.roots]


def total_bytes(kept: Iterable[Kept]) -> int:
    return sum(one.bytes for one in kept)


def verdicts(folder: Path, chosen: list[Kept]) -> Iterator["Verdict"]:
    from omlx.cache.folder import verify as read_all

    with reading(folder):
        for root in roots(chosen):
            yield from read_all(folder, root)


def path_of(folder: Path, verdict: "Verdict") -> Path:
    from omlx.cache.shelf import Span

    span = folder / verdict.root.hex() / f"{verdict.first}-{verdict.last}"
    return Span(span, verdict.first, verdict.last).path(verdict.id)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What the system says against it, as a line of ours."""
    try:
        yield
    except OSError as error:
        raise BadSetting(f"cache folder {folder} cannot be used ({error.strerror})") from error


# ------------------------------------------------------------------ words


def say_nothing_is_kept(folder: Path) -> None:
    print(f"nothing is kept in {folder}")


def moment(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
