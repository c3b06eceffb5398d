"""What runs on the machine that weights are copied to: it says what is there, makes files, and reads back.

Started over SSH by `weights.py`, which writes the bytes by SFTP. One line of JSON in, one out.
"""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from omlx.cache.identity import weights_digest
from omlx.cluster.private_files import CLUSTER_FOLDER, locked, own_folder, write
from omlx.errors import BadModel, OmlxError
from omlx.node.present import PRESENT, Present, PresentFile, Range, Stretch, read_present

MARK = b"omlx-answer "
READ_BYTES = 8 << 20
IDLE_S = 1800
"""Without a question. A connection that was cut silently may stay open here for hours."""

Stamp = tuple[int, int, int, int]
"""Inode, size, mtime_ns, ctime_ns: while they stay, nobody wrote to the file."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """What of a model is here? `root` names its contents (cache/identity.py).

    places: paths of folders, ~ is the home here, where the whole model may be; sizes: of all its
    *.safetensors. files: of a copy, by name, with the bytes of each.
    """

    root: str
    places: list[bytes]
    sizes: dict[str, int]
    files: dict[str, int]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Make the files of a copy, as one hole each where they are not there."""

    root: str
    files: dict[str, int]


class Check(msgspec.Struct, frozen=True, tag=True):
    """Read back what was written, and note what is as it should be."""

    root: str
    stretches: list[tuple[str, Stretch]]
    """Each with its file's name."""


class Found(msgspec.Struct, frozen=True, tag=True):
    """folder: the whole model, or the place of its copy; ranges: what of each file the copy has."""

    folder: bytes
    whole: bool
    ranges: dict[str, list[Range]]
    free_bytes: int
    volume_bytes: int


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The files can be written to."""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Which of the stretches are not as they should be, by number."""

    wrong: list[int]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """One line."""

    why: str


Question = Look | Begin | Check
Answer = Found | Begun | Checked | Failed


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Until the other side ends, or is silent for IDLE_S."""
    signal.alarm(IDLE_S)
    for line in questions:
        signal.alarm(0)
        answers.write(MARK + msgspec.json.encode(_answer(line)) + b"\n")
        answers.flush()
        signal.alarm(IDLE_S)


def _answer(line: bytes) -> Answer:
    try:
        question: Question = msgspec.json.decode(line, type=Question)
        match question:
            case Look():
                return _look(question)
            case Begin():
                return _begin(question)
            case Check():
                return _check(question)
    except (OmlxError, msgspec.MsgspecError) as error:
        return Failed(str(error))
    except OSError as error:
        return Failed(f"{error.filename}: {error.strerror}")


def copy_folder(root: str) -> Path:
    """Where the copy of a model lies on a node."""
    return (CLUSTER_FOLDER / "weights" / root).expanduser()


def stamp_of(file: Path) -> Stamp:
    """Raises OSError."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _look(asked: Look) -> Found:
    for place in asked.places:
        folder = Path(os.fsdecode(place)).expanduser()
        if _is_whole(folder, asked):
            return Found(os.fsencode(folder), True, {}, 0, 0)
    folder = copy_folder(asked.root)
    present = _still_present(folder, asked.files)
    ranges = {name: file.ranges for name, file in present.files.items()}
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    usage = shutil.disk_usage(nearest)
    return Found(os.fsencode(folder), False, ranges, usage.free, usage.total)


def _is_whole(folder: Path, asked: Look) -> bool:
    """Sizes first: files are read only where they may be the model. A copy with holes is not whole."""
    try:
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
        if sizes != asked.sizes or (folder / PRESENT).exists():
            return False
        return weights_digest(folder, CLUSTER_FOLDER.expanduser() / "digests.json") == asked.root
    except (OSError, BadModel):
        return False  # whatever it is, it is not that model


def _still_present(folder: Path, sizes: Mapping[str, int]) -> Present:
    """What is noted as there, less what is not right any more. Files that were written to since are read."""
    if not folder.exists():
        return Present({})
    with locked(folder):
        noted = _noted(folder)
        present = Present(
            {
                name: right
                for name, file in noted.files.items()
                if name in sizes and (right := _still_right(folder / name, file, sizes[name])) is not None
            }
        )
        if present != noted:
            write(folder / PRESENT, msgspec.json.encode(present))
    return present


def _noted(folder: Path) -> Present:
    """Nothing where it cannot be read: then all is copied again."""
    try:
        return read_present(folder) or Present({})
    except BadModel:
        return Present({})


def _still_right(path: Path, file: PresentFile, size: int) -> PresentFile | None:
    try:
        stamp = stamp_of(path)
    except FileNotFoundError:
        return None
    if stamp == file.stamp and stamp[1] == size:
        return file
    right = tuple(one for one in file.stretches if one.end <= size and _fits(path, one))
    return PresentFile(stamp, right)


def _begin(asked: Begin) -> Begun:
    folder = own_folder(copy_folder(asked.root))
    with locked(folder):
        if not (folder / PRESENT).exists():  # before any hole is
            write(folder / PRESENT, msgspec.json.encode(Present({})))
    for name, size in asked.files.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
        finally:
            os.close(handle)
    return Begun()


def _check(asked: Check) -> Checked:
    folder = copy_folder(asked.root)
    wrong: list[int] = []
    right: dict[str, list[Stretch]] = {}
    stamps: dict[str, Stamp] = {}
    for number, (name, stretch) in enumerate(asked.stretches):
        if name not in stamps:
            _flush(folder / name)
            stamps[name] = stamp_of(folder / name)
        if _fits(folder / name, stretch):
            right.setdefault(name, []).append(stretch)
        else:
            wrong.append(number)
    with locked(folder):
        files = _noted(folder).files
        for name, stretches in right.items():
            old = files[name].stretches if name in files else ()
            # Two copies at a time may have noted the same bytes, cut in other places.
            each = {(one.start, one.end): one for one in (*old, *stretches)}
            files[name] = PresentFile(stamps[name], tuple(each[place] for place in sorted(each)))
        write(folder / PRESENT, msgspec.json.encode(Present(files)))
    return Checked(wrong)


def _flush(path: Path) -> None:
    """To the disk, whoever wrote it: what is noted as there must outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)
    finally:
        os.close(handle)


def _fits(path: Path, stretch: Stretch) -> bool:
    """Whether the bytes that are read there have the digest."""
    hasher = blake3()
    left = stretch.end - stretch.start
    with path.open("rb") as file:
        file.seek(stretch.start)
        while left > 0 and (data := file.read(min(left, READ_BYTES))):
            hasher.update(data)
            left -= len(data)
    return left == 0 and hasher.hexdigest() == stretch.blake3
