"""Files that hold secrets: made 0600, written whole or not at all, refused when others can read them."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from omlx.errors import BadSetting
from omlx.node.tls import check_private

CLUSTER_FOLDER = Path("~/.omlx/cluster")
"""Of this machine, whether it made the cluster or joined it."""
LOCK_WITHIN_S = 5.0
LOOK_AGAIN_S = 0.02


def read_private(path: Path) -> bytes:
    """Raises BadSetting when it is missing, or others than its owner can read or write it."""
    check_private(path)
    return path.read_bytes()


def own_folder(folder: Path) -> Path:
    """The folder, made where it is missing, for its owner alone. Raises BadSetting."""
    folder = folder.expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise BadSetting(f"cluster folder {folder}: {error.strerror}") from None
    return folder


def check_folder(folder: Path) -> None:
    """Raises BadSetting when others may put files there."""
    if folder.stat().st_mode & 0o022:
        raise BadSetting(f"others can write into {folder}: look what is in it, then `chmod 700 {folder}`")


def new_folder(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A folder of that name and a random ending, with these files, 0600 each."""
    made = folder / f"{name}-{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    for file, data in files.items():
        _create(made / file, data)
    return made


def _create(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, data: bytes) -> None:
    """Replace or make the file, 0600, by one rename."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    _create(beside, data)
    beside.replace(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time, of all processes. Raises BadSetting when another one does not let go."""
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BadSetting(f"cluster folder {folder}: {error.strerror}") from None
    try:
        end = time.monotonic() + LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise BadSetting(f"another process holds {folder / 'lock'}; try again") from None
                time.sleep(LOOK_AGAIN_S)
        yield
    finally:
        os.close(handle)


_T = TypeVar("_T")


def decoded(data: bytes, into: type[_T], what: str) -> _T:
    """JSON that a file or another machine gave; `what` names it. Raises BadSetting."""
    try:
        return msgspec.json.decode(data, type=into)
    except msgspec.MsgspecError as error:
        raise BadSetting(f"{what} cannot be read: {error}") from None
