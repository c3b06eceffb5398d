"""One block's file (safetensors), and its line in a manifest: what is known of it without opening the file.

A file is whole or absent, and the line's checksum tells whether it is what was written. Bytes in, views out;
knows neither MLX nor how a folder is laid out.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated

import msgspec
from blake3 import blake3

from omlx.errors import OmlxError
from omlx.ids import BlockId

LENGTH_BYTES = 8
ALIGN_BYTES = 8
PAD = "pad."
"""Tensors of this name fill up to the next multiple of ALIGN_BYTES: safetensors allows no holes."""
PIECE_BYTES = 512 * 1024
"""Read and hashed at a time: it is still in the core's cache when it is hashed, and the kernel reads ahead
meanwhile."""
HASH_THREADS = blake3.AUTO if sys.platform == "darwin" else 1
"""A Mac computes on its GPU and has idle cores, and one of them may hash slower than its SSD reads; elsewhere
the cores compute, and one hashes 8 GB/s."""
MOST_PARTS = 1024
"""Buffers in one writev: IOV_MAX of Linux and macOS."""
MOST_KEPT = 2
"""Buffers: one is read into while another is laid into a cache."""
SEAL_BYTES = 16

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "C64": 8,
}


class BadBlock(OmlxError):
    """A block's file is not what was written: missing, unreadable, cut, changed, or another block's."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`data`: contiguous, row by row, little endian, of as many bytes as `dtype` and `shape` need."""

    name: str
    dtype: str
    """As safetensors writes it: "BF16", "U32"; one of DTYPE_BYTES."""
    shape: tuple[int, ...]
    data: memoryview | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a block is."""

    id: BlockId
    parent: BlockId
    tokens: bytes
    """Packed: uint32, little endian."""
    start: int
    """Tokens before it."""
    restorable: bool
    """Whether the file holds all that is needed to go on from the block's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line(Label):
    """A block that lies in a file."""

    bytes: int
    """Of the whole file."""
    checksum: str
    """BLAKE3 of the whole file, in hex."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], int]


class Buffers:
    """Memory that reads take turns in. Fresh pages cost several times what reading into them does."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []
        self._lock = Lock()

    def take(self, size: int) -> memoryview:
        """`size` bytes of any content that nobody else has; they are free again when no view is left."""
        with self._lock:
            for buffer in self._kept:
                if len(buffer) >= size and _is_free(buffer):
                    return memoryview(buffer)[:size]
            self._kept = [buffer for buffer in self._kept if not _is_free(buffer)]
            fresh = bytearray(size)
            if len(self._kept) < MOST_KEPT:
                self._kept.append(fresh)
            return memoryview(fresh)


def _is_free(buffer: bytearray) -> bool:
    """A bytearray refuses to change its length while there are views of it."""
    try:
        last = buffer.pop()
    except BufferError:
        return False
    except IndexError:
        return True
    buffer.append(last)
    return True


# ------------------------------------------------------------------ writing


def write_block(path: Path, label: Label, tensors: Sequence[Tensor]) -> Line:
    """Writes the block at `path`, whole or not at all; the folder must exist.

    Raises OSError (disk full, no folder, ...), after which nothing is left; ValueError for tensors at odds
    with themselves.
    """
    entries: dict[str, object] = {"__metadata__": _metadata(label)}
    parts: list[memoryview] = []
    place = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        nonlocal place
        if name in entries:
            raise ValueError(f"two tensors are named {name!r}")
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (place, place + data.nbytes)}
        place += data.nbytes
        parts.append(data)

    for tensor in tensors:
        add(tensor.name, tensor.dtype, tensor.shape, _flat(tensor))
        if short := -place % ALIGN_BYTES:
            add(f"{PAD}{place}", "U8", (short,), memoryview(bytes(short)))
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % ALIGN_BYTES)
    parts.insert(0, memoryview(len(header).to_bytes(LENGTH_BYTES, "little") + header))
    checksum = blake3()
    for part in parts:
        checksum.update(part)
    size = sum(part.nbytes for part in parts)
    write_whole(path, parts)
    return Line(
        id=label.id,
        parent=label.parent,
        tokens=label.tokens,
        start=label.start,
        restorable=label.restorable,
        bytes=size,
        checksum=checksum.hexdigest(),
    )


def write_whole(path: Path, parts: Sequence[memoryview | bytes]) -> None:
    """The file is replaced at once or stays as it was. Raises OSError, after which nothing is left."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(file, [memoryview(part) for part in parts if len(part)])
            # The name must not reach the disk before the content does.
            os.fsync(file)
        finally:
            os.close(file)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _write(file: int, parts: list[memoryview]) -> None:
    place = 0
    while place < len(parts):
        written = os.writev(file, parts[place : place + MOST_PARTS])
        while place < len(parts) and written >= len(parts[place]):
            written -= len(parts[place])
            place += 1
        if written:
            parts[place] = parts[place][written:]


def _flat(tensor: Tensor) -> memoryview:
    data = memoryview(tensor.data)
    needed = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    if data.nbytes != needed:
        raise ValueError(f"tensor {tensor.name!r} has {data.nbytes} bytes of {needed}")
    return data.cast("B") if needed else memoryview(b"")


def _metadata(label: Label) -> dict[str, str]:
    return {"id": label.id.hex(), "parent": label.parent.hex(), "start": str(label.start)}


# ------------------------------------------------------------------ reading


def read_block(path: Path, line: Line, buffers: Buffers | None = None) -> list[Tensor]:
    """The block's tensors in the order in which they were written, as views into one buffer, which they keep.

    The buffer is one of `buffers`, else fresh. Raises BadBlock if the file is missing, may not be read, or is
    not the one of `line`; OSError for a read that failed.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise BadBlock(f"{path}: cannot be read ({error.strerror})") from None
    try:
        size = os.fstat(file).st_size
        if size != line.bytes:
            raise BadBlock(f"{path}: has {size} bytes of {line.bytes}")
        view = (buffers or Buffers()).take(size)
        checksum = _read(file, view)
    except IsADirectoryError:
        raise BadBlock(f"{path}: is a folder") from None
    finally:
        os.close(file)
    if checksum != line.checksum:
        raise BadBlock(f"{path}: the checksum is another one")
    return _tensors(path, line, view)


def _read(file: int, view: memoryview) -> str:
    """Fills `view` and returns its checksum. Shorter than it was a moment ago: the checksum tells."""
    checksum = blake3(max_threads=HASH_THREADS)
    place = 0
    while place < len(view):
        got = os.readv(file, [view[place : place + PIECE_BYTES]])
        if not got:
            break
        checksum.update(view[place : place + got])
        place += got
    return checksum.hexdigest()


def _tensors(path: Path, line: Line, view: memoryview) -> list[Tensor]:
    begin = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    try:
        header = msgspec.json.decode(view[LENGTH_BYTES:begin], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.DecodeError, KeyError) as error:
        raise BadBlock(f"{path}: the header is damaged ({error})") from None
    if metadata != _metadata(line):
        raise BadBlock(f"{path}: is another block's file")
    data = view[begin:]
    return [_tensor(path, name, entry, data) for name, entry in entries.items() if not name.startswith(PAD)]


def _tensor(path: Path, name: str, entry: _Entry, data: memoryview) -> Tensor:
    start, end = entry.data_offsets
    needed = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
    if end > len(data) or needed != end - start:
        raise BadBlock(f"{path}: tensor {name!r} does not lie where the header says")
    return Tensor(name, entry.dtype, entry.shape, data[start:end])


# ------------------------------------------------------------------ lines


class _Record(msgspec.Struct):
    """A line as it is written: one JSON object, tokens in base64."""

    id: str
    parent: str
    tokens: bytes
    start: int
    restorable: bool
    bytes: int
    checksum: str


_RECORD = msgspec.json.Decoder(_Record)


def _seal(body: bytes) -> bytes:
    """Ends a line: tokens that flipped on the disk would name another text's keys and values."""
    return b',"seal":"' + blake3(body).hexdigest(length=SEAL_BYTES).encode() + b'"}'


def line_text(line: Line) -> bytes:
    """One line of a manifest. It begins with the newline: that ends a line before it that was torn."""
    record = _Record(
        id=line.id.hex(),
        parent=line.parent.hex(),
        tokens=line.tokens,
        start=line.start,
        restorable=line.restorable,
        bytes=line.bytes,
        checksum=line.checksum,
    )
    body = msgspec.json.encode(record)[:-1]
    return b"\n" + body + _seal(body)


def parse_lines(text: bytes) -> Mapping[BlockId, Line]:
    """A manifest's lines in order; of two for one block the last one holds. Damaged ones are left out."""
    lines: dict[BlockId, Line] = {}
    cut = len(_seal(b""))
    for raw in text.split(b"\n"):
        body = raw[:-cut]
        if not body or raw[-cut:] != _seal(body):
            continue
        record = _RECORD.decode(body + b"}")
        id = BlockId(bytes.fromhex(record.id))
        lines.pop(id, None)
        lines[id] = Line(
            id=id,
            parent=BlockId(bytes.fromhex(record.parent)),
            tokens=record.tokens,
            start=record.start,
            restorable=record.restorable,
            bytes=record.bytes,
            checksum=record.checksum,
        )
    return lines
