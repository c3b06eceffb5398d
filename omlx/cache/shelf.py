"""The blocks of one span of one model's layers in the cache folder, owned by one process; and that span's
layers wherever else they lie, if the model was split in other ways before.

A block is written as a file (written beside, fsynced, renamed) and then as a line of the manifest. A file
without a line and a line without a file count for nothing, so there is no moment at which a kill does harm.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from omlx.cache.block_file import (
    BadBlock,
    Buffers,
    Label,
    Line,
    Tensor,
    line_text,
    parse_lines,
    read_block,
    write_block,
    write_whole,
)
from omlx.ids import BlockId

log = structlog.get_logger()

MANIFEST = "manifest.jsonl"
SPAN = re.compile(r"(?P<first>\d+)-(?P<last>\d+)")
FAN = re.compile(r"[0-9a-f]{2}")
BLOCK = re.compile(r"(?P<id>[0-9a-f]{32})\.safetensors")
LEFT_OVER = re.compile(r"\.([0-9a-f]{32}\.safetensors|manifest\.jsonl|model\.json|VERSION)\.\d+\.part")
"""What a writer that was killed leaves behind."""
LEAST_DEAD_LINES = 64
"""Up to so many no manifest is written anew."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of ours in a span's folder."""

    path: Path
    id: BlockId | None
    """None: left over by a writer that was killed."""
    bytes: int
    used_at: float
    """Last stored or loaded, in seconds since the epoch."""


def stored(span: Path) -> Iterator[Stored]:
    """Our files in a span's folder, but for the manifest. What is not ours is passed over, and so is what
    vanishes meanwhile or may not be listed. Raises OSError."""
    for entry in entries(span):
        if FAN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            for file in entries(Path(entry.path)):
                block = BLOCK.fullmatch(file.name)
                if block and block["id"].startswith(entry.name):
                    yield from _stored(file, BlockId(bytes.fromhex(block["id"])))
                elif LEFT_OVER.fullmatch(file.name):
                    yield from _stored(file, None)
        elif LEFT_OVER.fullmatch(entry.name):
            yield from _stored(entry, None)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Nothing where there is no folder or it may not be listed. Raises OSError."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _stored(entry: os.DirEntry[str], id: BlockId | None) -> Iterator[Stored]:
    with suppress(FileNotFoundError, PermissionError):
        facts = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(facts.st_mode):
            yield Stored(Path(entry.path), id, facts.st_size, facts.st_mtime)


@dataclass(slots=True)
class Span:
    """Layers [first, last) of a model: its folder, and the blocks that lie there as far as this process
    knows. It changes files only when told to."""

    folder: Path
    first: int
    last: int
    lines: dict[BlockId, Line] = field(default_factory=dict)

    @property
    def layers(self) -> range:
        return range(self.first, self.last)

    def path(self, id: BlockId) -> Path:
        return self.folder / id.hex()[:2] / f"{id.hex()}.safetensors"

    def manifest(self) -> bytes:
        """Empty if there is none or it may not be read. Raises OSError."""
        try:
            return (self.folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return b""

    def load(self, id: BlockId, buffers: Buffers) -> list[Tensor]:
        """Raises BadBlock, and then the block is gone; OSError for a read that failed."""
        line = self.lines.get(id)
        if line is None:
            raise BadBlock(f"block {id.hex()} is not in {self.folder}")
        path = self.path(id)
        try:
            tensors = read_block(path, line, buffers)
        except BadBlock as error:
            log.warning("a cached block is of no use and was removed", why=str(error))
            self.remove(id)
            raise
        with suppress(OSError):  # the time of last use is a hint, and the folder may be read-only by now
            os.utime(path)
        return tensors

    def remove(self, id: BlockId) -> None:
        """Forgets the block, and deletes its file if that can be done."""
        self.lines.pop(id, None)
        with suppress(OSError):
            self.path(id).unlink()


def spans(root_folder: Path) -> list[Span]:
    """The spans that have a folder there, by name; without their lines."""
    found = []
    for entry in entries(root_folder):
        name = SPAN.fullmatch(entry.name)
        if name and entry.is_dir(follow_symlinks=False):
            found.append(Span(Path(entry.path), int(name["first"]), int(name["last"])))
    return sorted(found, key=lambda span: (span.first, span.last))


def cover(layers: Collection[int], offers: Sequence[Span]) -> list[Span] | None:
    """Of `offers` those that hold all of `layers`, few of them and the first ones where it is all the same;
    None if some layer is in none."""
    missing = set(layers)
    taken = []
    while missing:
        best = max(offers, key=lambda span: len(missing.intersection(span.layers)), default=None)
        if best is None or missing.isdisjoint(best.layers):
            return None
        taken.append(best)
        missing.difference_update(best.layers)
    return taken


class Shelf:
    """One span's blocks on disk. One process writes to a span; its threads may store, load, gather and remove
    different blocks at the same time."""

    def __init__(self, own: Span, others: Sequence[Span]) -> None:
        self._own = own
        self._spans = (own, *others)
        self._buffers = Buffers()
        self.lines = own.lines
        """Of the span's own files."""

    @classmethod
    def open(cls, dir: Path, root: BlockId, first: int, last: int) -> "Shelf":
        """The shelf for layers [first, last) of the model `root` in the cache folder `dir`.

        Clears up after a writer that was killed, in its own span only. Raises OSError.
        """
        root_folder = dir / root.hex()
        own = Span(root_folder / f"{first}-{last}", first, last)
        own.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(own)
        others = [span for span in spans(root_folder) if span.folder != own.folder and _overlap(span, own)]
        for span in others:
            sizes = {file.id: file.bytes for file in stored(span.folder)}
            known = parse_lines(span.manifest())
            span.lines = {id: line for id, line in known.items() if sizes.get(id) == line.bytes}
        return cls(own, others)

    def store(self, label: Label, tensors: Sequence[Tensor]) -> Line:
        """Writes a block; one of that id is replaced. Raises OSError, and then the block is not here."""
        path = self._own.path(label.id)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            line = write_block(path, label, tensors)
            _append(self._own.folder / MANIFEST, line_text(line))
        except OSError:
            self._own.remove(label.id)
            raise
        self.lines[label.id] = line
        return line

    def load(self, id: BlockId) -> list[Tensor]:
        """The tensors of the span's own file, as views into one buffer that they keep.

        Raises BadBlock if there is none or it is damaged, and then it is gone; OSError if reading failed.
        """
        return self._own.load(id, self._buffers)

    def remove(self, id: BlockId) -> None:
        """From all spans that have some of the layers: what is left elsewhere would take room unseen."""
        for span in self._spans:
            span.remove(id)

    def gather(self, id: BlockId, layers: Collection[int]) -> list[Tensor]:
        """The tensors of these layers, by layer, from the span's own file and those of other spans.

        Raises BadBlock if some layer is nowhere or a file is damaged, and then that file is gone; OSError.
        """
        sources = self._sources(id, layers)
        if sources is None:
            raise BadBlock(f"block {id.hex()}: not all of its layers are in {self._own.folder.parent}")
        missing = set(layers)
        found: list[tuple[int, Tensor]] = []
        for source in sources:
            for tensor in source.load(id, self._buffers):
                layer = int(tensor.name.partition(".")[0])
                if layer in missing:
                    found.append((layer, tensor))
            missing.difference_update(source.layers)
        return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]

    def catalogue(self) -> list[Line]:
        """The blocks of which all layers of the span can be gathered, parents before children.

        For one that lies in several files, `bytes` is what all of them have and `checksum` is empty.
        """
        known = dict.fromkeys(id for span in self._spans for id in span.lines)
        lines = [line for id in known if (line := self._gathered(id)) is not None]
        return sorted(lines, key=lambda line: line.start)

    def _gathered(self, id: BlockId) -> Line | None:
        own = self.lines.get(id)
        if own and own.restorable:
            return own
        sources = self._sources(id, self._own.layers)
        if not sources:
            return None
        lines = [source.lines[id] for source in sources]
        return replace(
            lines[0],
            bytes=sum(self._share(source, source.lines[id].bytes) for source in sources),
            checksum=lines[0].checksum if len(lines) == 1 else "",
            restorable=all(line.restorable for line in lines),
        )

    def _share(self, source: Span, bytes: int) -> int:
        """What of a file is this span's: the rest is counted by the span that has its other layers."""
        common = min(source.last, self._own.last) - max(source.first, self._own.first)
        return bytes * common // len(source.layers)

    def _sources(self, id: BlockId, layers: Collection[int]) -> list[Span] | None:
        # Another thread may remove it meanwhile.
        found = [(span, line) for span in self._spans if (line := span.lines.get(id)) is not None]
        holders = [span for span, _ in found]
        restorable = [span for span, line in found if line.restorable]
        return cover(layers, restorable) or cover(layers, holders)


def _overlap(one: Span, other: Span) -> bool:
    return one.first < other.last and other.first < one.last


def _tidy(span: Span) -> None:
    """Reads the span's lines; what a killed writer or a damaged disk has left is deleted. Raises OSError."""
    manifest = span.folder / MANIFEST
    try:
        os.close(os.open(manifest, os.O_RDWR))
    except FileNotFoundError:
        pass
    except PermissionError:
        log.warning("a cache manifest may not be used: its blocks are forgotten", path=str(manifest))
        manifest.unlink()
    text = span.manifest()
    known = parse_lines(text)
    for file in stored(span.folder):
        line = known.get(file.id) if file.id is not None else None
        if line is not None and line.bytes == file.bytes:
            span.lines[line.id] = line
            continue
        if line is not None:
            why = f"{file.path}: has {file.bytes} bytes of {line.bytes}"
            log.warning("a cached block is of no use and was removed", why=why)
        with suppress(OSError):
            file.path.unlink()
    if text.count(b"\n") - len(span.lines) > max(len(span.lines), LEAST_DEAD_LINES):
        write_whole(manifest, [line_text(line) for line in span.lines.values()])


def _append(manifest: Path, text: bytes) -> None:
    """One write, so that a kill leaves all of it or a torn line, which its seal gives away.

    Neither the manifest nor the folder is fsynced: a line or a name that a power cut takes costs one block
    computed again, and a flush for each block would cost every one of them a turn of the disk.
    """
    file = os.open(manifest, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(file, text) != len(text):
            raise OSError(f"{manifest}: the line was not written whole")
    finally:
        os.close(file)
