"""The cache folder as a whole: who uses it, what lies in it, and what is given up when it grows too large.

    VERSION, lock, <root>/model.json, <root>/<first>-<last>/manifest.jsonl, .../<xx>/<id>.safetensors

Only files of these names are ever counted or deleted, so that a folder with other things in it is safe.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from omlx.cache.block_file import BadBlock, Buffers, Line, parse_lines, read_block, write_whole
from omlx.cache.shelf import FAN, LEFT_OVER, MANIFEST, Stored, entries, spans, stored
from omlx.errors import BadSetting
from omlx.ids import BlockId

VERSION = 1
"""Of the folder's layout and of its files. A folder of an older one is cleared."""
ROOT = re.compile(r"[0-9a-f]{32}")
MODEL = "model.json"
INSTEAD = "give another --paged-ssd-cache-dir, or --no-cache"


class _Model(msgspec.Struct):
    name: str
    identity: dict[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one model has in the folder."""

    root: BlockId
    name: str | None
    """None: nobody has said it."""
    blocks: int
    bytes: int
    """Of blocks and manifests."""
    used_at: float | None
    """When a block was last stored or loaded, in seconds since the epoch; None without blocks."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What a trim has deleted."""

    bytes: int
    gone: Mapping[BlockId, tuple[BlockId, ...]]
    """By root, the blocks of which no file is left, in whatever span."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One block's file, read and checked."""

    root: BlockId
    first: int
    last: int
    id: BlockId
    bytes: int
    problem: str | None


# ------------------------------------------------------------------ who uses it


class Folder:
    """The folder, locked for one server; its stages' shelves need no lock of their own."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> "Folder":
        """Makes the folder if there is none, and clears one of an older version.

        Raises BadSetting if it cannot be written, is another process's, or was made by a newer version.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadSetting(f"cache folder {path} cannot be written ({error.strerror}); {INSTEAD}") from None
        try:
            _take(path, lock)
            _bring_up_to_date(path)
        except OSError as error:
            os.close(lock)
            raise BadSetting(f"cache folder {path} cannot be used ({error.strerror}); {INSTEAD}") from None
        except BadSetting:
            os.close(lock)
            raise
        return cls(path, lock)

    def describe(self, root: BlockId, name: str, identity: Mapping[str, str]) -> None:
        """Writes down which model `root` is, for people. Raises OSError."""
        folder = self.path / root.hex()
        folder.mkdir(mode=0o700, exist_ok=True)
        write_whole(folder / MODEL, [msgspec.json.encode(_Model(name, dict(identity)))])

    def close(self) -> None:
        os.close(self._lock)


def _take(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        who = f"process {holder}" if holder else "another process"
        raise BadSetting(f"cache folder {path} is in use by {who}; stop that one, {INSTEAD}") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _bring_up_to_date(path: Path) -> None:
    try:
        text = (path / "VERSION").read_text(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    found = int(text) if text.isdecimal() else 0
    if found > VERSION:
        raise BadSetting(f"cache folder {path} was made by a newer oMLX (version {found}); {INSTEAD}")
    if found < VERSION:
        clear(path)
        write_whole(path / "VERSION", [f"{VERSION}\n".encode()])


# ------------------------------------------------------------------ what lies in it


def usage(dir: Path) -> list[Usage]:
    """What each model has in the folder, the one used last first. Raises OSError."""
    found = []
    for root in _roots(dir):
        files = _files(dir, root)
        found.append(
            Usage(
                root=root,
                name=_name(dir / root.hex()),
                blocks=len({file.id for file in files if file.id is not None}),
                bytes=sum(file.bytes for file in files) + _manifest_bytes(dir / root.hex()),
                used_at=max((file.used_at for file in files), default=None),
            )
        )
    return sorted(found, key=lambda model: model.used_at or 0.0, reverse=True)


def verify(dir: Path, root: BlockId | None = None) -> Iterator[Verdict]:
    """Reads every block of the folder, or of one model, and says what is wrong with it; changes nothing.

    A line whose file was given up, and a file whose line was never written, are no blocks. Raises OSError.
    """
    buffers = Buffers()
    for model in [root] if root is not None else _roots(dir):
        for span in spans(dir / model.hex()):
            there = {file.id for file in stored(span.folder)}
            for line in parse_lines(span.manifest()).values():
                if line.id not in there:
                    continue
                problem = None
                try:
                    read_block(span.path(line.id), line, buffers)
                except (BadBlock, OSError) as error:
                    problem = str(error)
                yield Verdict(model, span.first, span.last, line.id, line.bytes, problem)


def _roots(dir: Path) -> list[BlockId]:
    names = sorted(
        entry.name
        for entry in entries(dir)
        if ROOT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )
    return [BlockId(bytes.fromhex(name)) for name in names]


def _files(dir: Path, root: BlockId) -> list[Stored]:
    return [file for span in spans(dir / root.hex()) for file in stored(span.folder)]


def _name(root_folder: Path) -> str | None:
    try:
        return msgspec.json.decode((root_folder / MODEL).read_bytes(), type=_Model).name
    except (OSError, msgspec.DecodeError):
        return None


def _manifest_bytes(root_folder: Path) -> int:
    total = 0
    for span in spans(root_folder):
        with suppress(FileNotFoundError):
            total += (span.folder / MANIFEST).stat().st_size
    return total


# ------------------------------------------------------------------ what is given up


@dataclass(slots=True)
class _Block:
    """A block's files in all spans of a model: where one of them is gone, the others are worth little."""

    root: BlockId
    id: BlockId
    files: list[Stored]
    used_at: float
    start: int = 0
    """Tokens before it."""


def trim(dir: Path, budget_bytes: int, floor_bytes: int, keep_roots: Collection[BlockId]) -> Trimmed:
    """Deletes blocks until the folder has `budget_bytes` at most and its volume `floor_bytes` free.

    Models outside `keep_roots` (those loaded, or being loaded) first; of both kinds first what nothing can
    read any more, then what was used longest ago. A block counts as used when one that goes on from it is, so
    that leaves go before roots. A file that cannot be deleted is passed over. Raises OSError.
    """
    files = {root: _files(dir, root) for root in _roots(dir)}
    used = sum(file.bytes for some in files.values() for file in some)
    used += sum(_manifest_bytes(dir / root.hex()) for root in files)
    excess = max(used - budget_bytes, floor_bytes - shutil.disk_usage(dir).free)
    unloaded = {root: some for root, some in files.items() if root not in keep_roots}
    loaded = {root: some for root, some in files.items() if root in keep_roots}
    freed = sum(_delete(file) for some in unloaded.values() for file in some if file.id is None)
    gone: dict[BlockId, list[BlockId]] = defaultdict(list)
    order = chain(_order(dir, unloaded, loaded=False), _order(dir, loaded, loaded=True))
    while freed < excess and (block := next(order, None)):
        bytes = sum(_delete(file) for file in block.files)
        if bytes:
            freed += bytes
            gone[block.root].append(block.id)
    for root, some in unloaded.items():
        if not any(file.path.exists() for file in some):
            freed += _remove_root(dir / root.hex())
    return Trimmed(freed, {root: tuple(ids) for root, ids in gone.items()})


def _order(dir: Path, files: Mapping[BlockId, list[Stored]], *, loaded: bool) -> Iterator[_Block]:
    """The blocks of these models in the order in which they are given up."""
    blocks = [block for root, some in files.items() for block in _blocks(dir, root, some, loaded)]
    yield from sorted(blocks, key=lambda block: (block.used_at, -block.start))


def _blocks(dir: Path, root: BlockId, files: Iterable[Stored], loaded: bool) -> list[_Block]:
    """The model's blocks, with the time of last use of all that go on from them."""
    blocks: dict[BlockId, _Block] = {}
    for file in files:
        if file.id is not None:
            block = blocks.setdefault(file.id, _Block(root, file.id, [], file.used_at))
            block.files.append(file)
            block.used_at = max(block.used_at, file.used_at)
    lines: dict[BlockId, Line] = {}
    for span in spans(dir / root.hex()):
        lines.update(parse_lines(span.manifest()))
    for block in blocks.values():
        if block.id in lines:
            block.start = lines[block.id].start
        elif not loaded:  # in a model that is loaded, the line may be about to be written
            block.used_at = 0.0
    for block in sorted(blocks.values(), key=lambda block: block.start, reverse=True):
        line = lines.get(block.id)
        parent = blocks.get(line.parent) if line else None
        if parent:
            parent.used_at = max(parent.used_at, block.used_at)
    return list(blocks.values())


def clear(dir: Path, root: BlockId | None = None) -> int:
    """Deletes all models' blocks, or one model's; returns the bytes. The folder must be locked by the caller:
    a server would go on writing. Raises OSError."""
    freed = 0
    for model in [root] if root is not None else _roots(dir):
        for span in spans(dir / model.hex()):
            freed += sum(_delete(file) for file in stored(span.folder))
        freed += _remove_root(dir / model.hex())
    return freed


def _delete(file: Stored) -> int:
    """The bytes that it has no more: 0 if it cannot be deleted."""
    try:
        file.path.unlink(missing_ok=True)
    except OSError:
        return 0
    return file.bytes


def _remove_root(root_folder: Path) -> int:
    """Removes what is left of a model without blocks, and of its folders those that are empty then."""
    freed = _manifest_bytes(root_folder)
    for span in spans(root_folder):
        with suppress(OSError):
            (span.folder / MANIFEST).unlink()
        for entry in entries(span.folder):
            if FAN.fullmatch(entry.name):
                _remove_if_empty(Path(entry.path))
        _remove_if_empty(span.folder)
    for entry in entries(root_folder):
        if entry.name == MODEL or LEFT_OVER.fullmatch(entry.name):
            with suppress(OSError):
                Path(entry.path).unlink()
    _remove_if_empty(root_folder)
    return freed


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
