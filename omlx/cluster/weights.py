"""Weights that a node lacks are copied to it over SSH: only the bytes that its span reads, checked there.

The copy is a folder of the node's own, named by the model's contents, of files with holes
(`node/present.py`). What answers there is `weights_receiver.py`.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from omlx.cache.budget import free_floor_bytes
from omlx.cache.identity import weights_digest
from omlx.cluster.members import Joined
from omlx.cluster.planner import Span, gigabytes
from omlx.cluster.ssh import Access, RemoteFiles, RemoteProcess, Shell, open_ssh, target
from omlx.cluster.validation import NO_PYTHON, START
from omlx.cluster.weights_receiver import (
    MARK,
    Answer,
    Begin,
    Begun,
    Check,
    Checked,
    Failed,
    Found,
    Look,
    Question,
    Stamp,
    stamp_of,
)
from omlx.errors import BadModel, BadSetting, SshFailed
from omlx.node.manifest import ModelManifest
from omlx.node.present import Range, Stretch, layout_of, wanted_ranges, without
from omlx.node.weight_files import INDEX, read_weight_files

RECEIVE = b"from omlx.cluster.weights_receiver import serve\nserve(i, sys.stdout.buffer)\n"
TEXTS = ("config.json", "generation_config.json", "hf_quant_config.json", INDEX)
"""What mlx-lm and we read of a model's folder beside the weights, where it is there."""
MODELS = "~/.omlx/models"
PART_BYTES = 16 << 20
"""Read, hashed and sent in one go; what is lost of a part when the connection breaks is sent again."""
BATCH_BYTES = 256 << 20
"""Sent, then read back and noted there."""
WRITE_WITHIN_S = 60.0
"""A part: a link that is slower than 0.3 MB/s is of no use."""
ANSWER_WITHIN_S = 20.0
SLOWEST_READ = 20e6
"""Bytes/s that a node's disk gives at least."""
READ_BYTES = 1 << 16
MOST_ANSWER_BYTES = 16 << 20

Progress = Callable[[int, int], None]
"""(bytes that are there, bytes in all)"""
A = TypeVar("A", Found, Begun, Checked)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, end) of a file, sent in one go."""

    file: str
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Provided:
    """Where a node has weights."""

    folder: Path
    whole: bool
    """All of the model, not only what was asked for."""


async def provide(
    access: Access, node: Joined, manifest: ModelManifest, span: Span, memo: Path, progress: Progress
) -> "Provided":
    """The folder on the node from which `load_span` can read `span` of the model, made so if it is not.

    Where the node has the whole model, under the same path or in its own ~/.omlx/models, that is the folder,
    and nothing is copied. Else it is the node's copy, to which is added what is missing. A copy that was cut
    off goes on where it was; an older one grows.
    memo: digests of our own files (`cache/identity.py`).
    Raises SshFailed, BadSetting where the node has no room or refuses, BadModel where our files are broken.
    """
    source = await asyncio.to_thread(_source, manifest, span, memo)
    total = _size(source.wanted)
    hashing_s = ANSWER_WITHIN_S + sum(source.sizes.values()) / SLOWEST_READ
    async with open_ssh(target(node.host, node.user, node.port), access) as shell, _talking(shell) as talk:
        look = Look(source.root, _places(source.folder), dict(source.sizes), dict(source.files))
        found = await talk.ask(look, Found, hashing_s)
        parts = [] if found.whole else missing(source.wanted, found.ranges)
        lacking = sum(map(len, parts))
        progress(total - lacking, total)
        if parts:
            _refuse_full(node, lacking, found.free_bytes, found.volume_bytes)
            await talk.ask(Begin(source.root, dict(source.files)), Begun, ANSWER_WITHIN_S)
            async with shell.sftp() as files:
                copy = _Copy(source, node, found.folder, talk, files, progress, total - lacking, total)
                await copy.send(parts)
    return Provided(Path(os.fsdecode(found.folder)), found.whole)


def missing(wanted: Mapping[str, Sequence[Range]], there: Mapping[str, Sequence[Range]]) -> list[Part]:
    """What of `wanted` is not there, file by file, in parts of at most PART_BYTES. Pure."""
    return [
        Part(file, at, min(at + PART_BYTES, end))
        for file, ranges in wanted.items()
        for start, end in without(ranges, there.get(file, ()))
        for at in range(start, end, PART_BYTES)
    ]


def batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """In their order, each of BATCH_BYTES or a little more. Pure."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Source:
    """Our own folder, as it was when its contents were named."""

    folder: Path
    root: str
    """BLAKE3 over the contents (`weights_digest`)."""
    sizes: Mapping[str, int]
    """Of all *.safetensors, which are what `root` covers."""
    files: Mapping[str, int]
    """Sizes of those that a copy has."""
    stamps: Mapping[str, Stamp]
    wanted: Mapping[str, Sequence[Range]]

    def check_unchanged(self, names: set[str]) -> None:
        """Raises BadModel."""
        for name in sorted(names):
            if _stamp(self.folder / name) != self.stamps[name]:
                raise BadModel(
                    f"{self.folder / name} was written to while it was copied; try again when that is over"
                )


def _source(manifest: ModelManifest, span: Span, memo: Path) -> _Source:
    """Reads headers, and all files where the memo does not know them. Raises BadModel."""
    folder = manifest.folder.expanduser().absolute()
    weights = read_weight_files(folder)
    texts = [folder / name for name in TEXTS if (folder / name).exists()]
    names = [file.name for file in (*weights.files, *texts)]
    for name in names:
        if not name.isprintable():
            raise BadModel(f"{folder}: a file named {name!r} cannot be copied to a node; rename it")
    stamps = {name: _stamp(folder / name) for name in names}
    files = {name: size for name, (_, size, _, _) in stamps.items()}
    root = weights_digest(folder, memo)
    wanted = wanted_ranges(layout_of(weights), manifest, span.start, span.end)
    # The short ones first: a copy that was cut off then shows what it is of.
    whole: dict[str, Sequence[Range]] = {text.name: ((0, files[text.name]),) for text in texts}
    sizes = {file.name: _stamp(file)[1] for file in folder.glob("*.safetensors")}
    return _Source(folder, root, sizes, files, stamps, whole | wanted)


def _stamp(file: Path) -> Stamp:
    try:
        return stamp_of(file)
    except OSError as error:
        raise BadModel(f"{file}: cannot be read ({error.strerror})") from error


def _size(ranges: Mapping[str, Sequence[Range]]) -> int:
    return sum(end - start for each in ranges.values() for start, end in each)


def _places(folder: Path) -> list[bytes]:
    """Where the node may have the whole model: at the same path, or under the same name with its own."""
    own = (f"{MODELS}/{folder.name}", f"{MODELS}/{folder.parent.name}/{folder.name}")
    return [os.fsencode(place) for place in (folder, *own)]


def _refuse_full(node: Joined, lacking: int, free: int, volume: int) -> None:
    """Raises BadSetting."""
    floor = free_floor_bytes(volume)
    if lacking > free - floor:
        raise BadSetting(
            f"{node.name} has {gigabytes(free)} free on the disk of ~/.omlx/cluster, of which "
            f"{gigabytes(floor)} stay free, and its layers need {gigabytes(lacking)} more: free "
            f"{gigabytes(lacking + floor - free)} there, or give it fewer layers"
        )


@dataclass(slots=True)
class _Copy:
    """A copy under way."""

    source: _Source
    node: Joined
    folder: bytes
    """There."""
    talk: "_Talk"
    files: RemoteFiles
    progress: Progress
    done: int
    total: int

    async def send(self, parts: Sequence[Part]) -> None:
        for batch in batches(parts):
            wrong = await self._send_batch(batch)
            if wrong:  # once more: a bit that fell over somewhere does not do so twice
                wrong = await self._send_batch(wrong)
            if wrong:
                raise SshFailed(
                    "weights",
                    f"{self.node.name} reads back other bytes of {wrong[0].file} than were sent, twice",
                    "what was sent",
                    "look at the disk and the memory of that machine",
                )

    async def _send_batch(self, batch: Sequence[Part]) -> list[Part]:
        """Those that are not right there come back."""
        sent: list[tuple[str, Stretch]] = []
        for name, some in groupby(batch, key=lambda part: part.file):
            path = self.folder + b"/" + os.fsencode(name)
            reading = _read_ahead(self.source.folder / name, list(some))
            async with self.files.open(path) as file, aclosing(reading):
                async for part, data, digest in reading:
                    await file.write(data, part.start, WRITE_WITHIN_S)
                    sent.append((name, Stretch(part.start, part.end, digest)))
                    self._tell(len(part))
        self.source.check_unchanged({name for name, _ in sent})  # before they are noted as the model's
        within_s = ANSWER_WITHIN_S + sum(map(len, batch)) / SLOWEST_READ
        checked = await self.talk.ask(Check(self.source.root, sent), Checked, within_s)
        wrong = [batch[number] for number in checked.wrong]
        self._tell(-sum(map(len, wrong)))
        return wrong

    def _tell(self, more: int) -> None:
        self.done += more
        self.progress(self.done, self.total)


async def _read_ahead(file: Path, parts: Sequence[Part]) -> AsyncGenerator[tuple[Part, bytes, str]]:
    """Each with its bytes and their digest; while one is sent, the next is read. Raises BadModel."""

    def begin(part: Part) -> asyncio.Task[tuple[bytes, str]]:
        return asyncio.create_task(asyncio.to_thread(_read, file, part))

    ahead = begin(parts[0])
    try:
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            data, digest = await ahead
            if following is not None:
                ahead = begin(following)
            yield part, data, digest
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def _read(file: Path, part: Part) -> tuple[bytes, str]:
    try:
        with file.open("rb") as opened:
            opened.seek(part.start)
            data = opened.read(len(part))
    except OSError as error:
        raise BadModel(f"{file}: cannot be read ({error.strerror})") from error
    if len(data) < len(part):
        raise BadModel(f"{file} has become shorter while it was copied; try again when that is over")
    return data, blake3(data).hexdigest()


@asynccontextmanager
async def _talking(shell: Shell) -> AsyncIterator["_Talk"]:
    async with shell.start(START) as process:
        await process.write(b"%d\n%s" % (len(RECEIVE), RECEIVE))
        yield _Talk(process, shell.peer_address)


class _Talk:
    """Questions to the receiver, and its answers, in turn."""

    def __init__(self, process: RemoteProcess, address: str) -> None:
        self._process = process
        self._address = address
        self._heard = b""

    async def ask(self, question: Question, kind: type[A], within_s: float) -> A:
        """Raises SshFailed, BadSetting in the machine's own words."""
        try:
            async with asyncio.timeout(within_s):
                await self._process.write(msgspec.json.encode(question) + b"\n")
                line = await self._answer()
        except TimeoutError:
            raise _no_answer(f"nothing within {within_s:.0f} s") from None
        try:
            answer: Answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise _no_answer(str(error)) from error
        if isinstance(answer, Failed):
            raise BadSetting(f"{self._address} refuses: {answer.why}")
        if not isinstance(answer, kind):
            raise _no_answer(f"{type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _answer(self) -> bytes:
        """The next line with the mark; what a login shell prints is passed over."""
        while True:
            line, ended, rest = self._heard.partition(b"\n")
            if ended:
                self._heard = rest
                _, mark, answer = line.partition(MARK)
                if mark:
                    return answer
                continue
            got = await self._process.read(READ_BYTES)
            self._heard += got
            if not got or len(self._heard) > MOST_ANSWER_BYTES:
                raise await self._ended()

    async def _ended(self) -> SshFailed:
        said, code = await self._process.complaint(500), await self._process.exit_code()
        if code == NO_PYTHON:
            return SshFailed(
                "omlx", "it is not installed there", "omlx", "pip install 'omlx-cluster[cluster]'"
            )
        return _no_answer(said or f"exit code {code}")


def _no_answer(said: str) -> SshFailed:
    fix = "look whether `omlx --version` works there and is the same as here"
    return SshFailed("weights", f"no answer of ours ({said})", "one", fix)
