"""Models of the Hugging Face hub: their names, where they lie here, and how one that is not here is fetched.

They lie as in the hub's own cache, which `library.py` reads: `models--org--name/snapshots/COMMIT`, and `refs`
that say which commit a revision is. Both are made last, when all files are there and checked. The hub's own
library runs in another process (`hub_download.py`): it is heavy, and Ctrl-C must end what it does at once.
"""

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Literal

import msgspec

from omlx.errors import ModelNotFound, Refused
from omlx.node.library import HUB_PREFIX

MAIN = "main"
NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)"
    r"(?:@(?P<revision>\w[\w.-]*(?:/\w[\w.-]*)*))?",
    re.ASCII,
)
MOST_CHARACTERS = 96
COMMIT = re.compile(r"[0-9a-f]{40}")
DOWNLOAD = (sys.executable, "-m", "omlx.node.hub_download")
SILENT_S = 90.0
"""The process says several times a second how far it is; before that it asks the hub once."""
READ_BYTES = 1 << 16

Progress = Callable[[str, int, int], None]
"""`progress(what, bytes that are here, bytes in all)`"""


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, at a branch, a tag or a commit."""

    repository: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN else f"{self.repository}@{self.revision}"

    @property
    def folder_name(self) -> str:
        return HUB_PREFIX + self.repository.replace("/", "--")


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """How far the process is."""

    done: int
    total: int


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The end: all of it is in this folder."""

    folder: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The end, and half a sentence why. `unknown`: the hub has no such model."""

    why: str
    unknown: bool = False


Message = Arrived | Fetched | Failed


def parse_name(word: str) -> HubName | None:
    """None for what can be no name of the hub's: anything but `org/name` and `org/name@revision`."""
    found = NAME.fullmatch(word)
    if found is None:
        return None
    repository = found["repository"]
    odd = "--" in repository or ".." in repository or repository.endswith((".", "-", ".git"))
    if odd or len(repository) > MOST_CHARACTERS:
        return None
    return HubName(repository, found["revision"] or MAIN)


def find_here(name: HubName, models: Path) -> Path | None:
    """Its folder below `models`, fetched or put there by hand. Asks nobody."""
    plain = models / name.repository
    if name.revision == MAIN and (plain / "config.json").exists():
        return plain
    kept = models / name.folder_name
    commit = name.revision if COMMIT.fullmatch(name.revision) else _commit(kept / "refs" / name.revision)
    snapshot = kept / "snapshots" / commit if commit is not None else None
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def fetch(name: HubName, models: Path, progress: Progress) -> Path:
    """Its folder below `models`, with all files that a stage or a tokenizer reads, once they are there.

    What an earlier call began is gone on with. Raises ModelNotFound where the hub has no such model, Refused
    for all else that is in the way: no network, no permission, no room, another one at it.
    """
    return _run("whole", name, models, progress)


@contextmanager
def fetched_headers(name: HubName) -> Iterator[Path]:
    """A folder, until the context ends, that `read_manifest` can read: weights are headers and then a hole.

    Raises as `fetch`.
    """
    with TemporaryDirectory(prefix="omlx-hub-") as folder:
        yield _run("headers", name, Path(folder), lambda what, done, total: None)


def _commit(ref: Path) -> str | None:
    """The file may hold anything; only a commit may become part of a path."""
    try:
        text = ref.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if COMMIT.fullmatch(text) else None


def _run(what: Literal["whole", "headers"], name: HubName, folder: Path, progress: Progress) -> Path:
    command = (*DOWNLOAD, what, name.repository, name.revision, str(folder))
    with (
        TemporaryFile() as complaints,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints
        ) as process,
    ):
        try:
            for message in _messages(process):
                match message:
                    case Arrived(done, total):
                        progress(f"fetching {name}", done, total)
                    case Fetched(place):
                        return Path(place)
                    case Failed(why, unknown):
                        sentence = f"{name} is no folder here, and {why}"
                        raise ModelNotFound(sentence) if unknown else Refused(sentence)
            last = _last_line(complaints)
        finally:
            # A download that was given up on must not go on behind it.
            process.kill()
    raise Refused(
        f"{name} is no folder here, and could not be fetched ({last}); try again: it goes on from there"
    )


def _messages(process: "subprocess.Popen[bytes]") -> Iterator[Message]:
    """Until the process has no more to say, or says nothing for too long."""
    assert process.stdout is not None
    heard = b""
    while select.select([process.stdout], [], [], SILENT_S)[0]:
        got = os.read(process.stdout.fileno(), READ_BYTES)
        if not got:
            return
        *lines, heard = (heard + got).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Message)


def _last_line(complaints: IO[bytes]) -> str:
    """Of a traceback, that is the error itself."""
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
