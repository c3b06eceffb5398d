"""The user's cache folder, and folders in it that are whole or absent whoever builds them."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omlx.errors import BadSetting

RECIPE_FILE = "omlx-recipe.txt"
"""Written last into a built folder: how it was made. A folder made another way is built anew."""


def default_cache(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where downloads and built models lie: $OMLX_CACHE_DIR, or the platform's place for caches.

    Raises BadSetting if OMLX_CACHE_DIR is not absolute: it would mean another folder in each process.
    """
    if chosen := environment.get("OMLX_CACHE_DIR"):
        folder = Path(chosen).expanduser()
        if not folder.is_absolute():
            raise BadSetting(f"OMLX_CACHE_DIR = {chosen!r}: must be an absolute path")
        return folder
    if platform == "darwin":
        return Path("~/Library/Caches/omlx").expanduser()
    # The XDG specification says to ignore a relative path.
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return base / "omlx" if base.is_absolute() else Path("~/.cache/omlx").expanduser()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process (and one thread) at a time for what is built at `path`; waits for its turn.

    The lock file stays: removing it would let a third builder lock a fresh one beside a waiting second.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_whole(folder: Path, recipe: str) -> bool:
    """Whether `folder` was finished, by this very recipe."""
    stamp = folder / RECIPE_FILE
    return stamp.is_file() and stamp.read_text() == recipe


def build_whole(folder: Path, recipe: str, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make(beside)` and renamed into place, unless it is there already.

    Safe for several builders at once; a builder that dies leaves nothing that anyone takes for whole.
    """
    if is_whole(folder, recipe):
        return folder
    with alone(folder):
        if is_whole(folder, recipe):
            return folder
        beside = folder.parent / f".{folder.name}.building"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        make(beside)
        (beside / RECIPE_FILE).write_text(recipe)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    return folder
