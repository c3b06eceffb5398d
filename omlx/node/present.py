"""A copy of a model folder that has only some bytes of its files, and which bytes a span reads.

The files have their full length, with holes; `present.json` beside them says what is no hole. Holes read as
zeros, and nothing may compute with those. A folder without that file is whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omlx.errors import BadModel
from omlx.node.manifest import EMBEDDINGS, LEFT_OUT, ModelManifest, _is_head, _layer_number, read_manifest
from omlx.node.safetensors_header import LENGTH_BYTES
from omlx.node.weight_files import WeightFiles, read_weight_files

PRESENT = "present.json"
Range = tuple[int, int]
"""Bytes [start, end) of a file."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that are there, and their BLAKE3 in hex."""

    start: int
    end: int
    blake3: str


class PresentFile(msgspec.Struct, frozen=True):
    """Of one file. `stamp` is its state when that was true; who copies looks at it (`weights_receiver`)."""

    stamp: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    @property
    def ranges(self) -> list[Range]:
        return joined((one.start, one.end) for one in self.stretches)


class Present(msgspec.Struct, frozen=True):
    """What present.json holds: what is there of the files, by name."""

    files: dict[str, PresentFile]

    def ranges(self, name: str) -> list[Range]:
        return self.files[name].ranges if name in self.files else []


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in a model's files its tensors are."""

    headers: Mapping[str, int]
    """Where each file's header ends."""
    tensors: Mapping[str, tuple[str, Range]]
    """The file of each tensor, and its bytes."""


def read_present(folder: Path) -> Present | None:
    """None: the folder is whole. Raises BadModel when it cannot be read."""
    path = folder / PRESENT
    try:
        return msgspec.json.decode(path.read_bytes(), type=Present)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadModel(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise BadModel(f"{path}: {error}; let the coordinator copy the weights here again") from error


def refuse_absent(folder: Path, start: int, end: int | None) -> None:
    """Raises BadModel where layers [start, end) read a byte that is not there; `end` None: all the rest."""
    present = read_present(folder)
    if present is None:
        return
    for file in (folder / "config.json", *sorted(folder.glob("model*.safetensors"))):
        if not present.ranges(file.name):
            raise BadModel(f"{file} was not copied to this machine yet; let the coordinator copy it first")
    layout = layout_of(read_weight_files(folder))
    manifest = read_manifest(folder)
    end = manifest.num_layers if end is None else end
    for name, wanted in wanted_ranges(layout, manifest, start, end).items():
        if lacking := without(wanted, present.ranges(name)):
            what = _tensor_at(layout, name, lacking[0])
            raise BadModel(
                f"{folder / name}: {what} was not copied to this machine, and layers {start}-{end - 1} read "
                "it; let the coordinator copy them first"
            )


def _tensor_at(layout: Layout, file: str, place: Range) -> str:
    for name, (where, (_, end)) in sorted(layout.tensors.items(), key=lambda item: item[1]):
        if where == file and end > place[0] >= layout.headers[file]:
            return f"tensor {name}"
    return "the header"


def layout_of(weights: WeightFiles) -> Layout:
    """Raises BadModel when a file cannot be read."""
    headers = {file.name: _header_end(file) for file in weights.files}
    tensors = {}
    for name, entry in weights.tensors.items():
        file = weights.file_of[name].name
        tensors[name] = file, (headers[file] + entry.start, headers[file] + entry.end)
    return Layout(headers, tensors)


def _header_end(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            return LENGTH_BYTES + int.from_bytes(opened.read(LENGTH_BYTES), "little")
    except OSError as error:
        raise BadModel(f"{file}: cannot be read ({error.strerror})") from error


def wanted_ranges(
    layout: Layout, manifest: ModelManifest, start: int, end: int
) -> dict[str, tuple[Range, ...]]:
    """What a stage with layers [start, end) reads of each weight file, in order. Pure.

    Every header is read, for mlx-lm opens all files.
    """
    found: dict[str, list[Range]] = {file: [(0, size)] for file, size in layout.headers.items()}
    for name, (file, place) in layout.tensors.items():
        if is_read(name, manifest, start, end):
            found[file].append(place)
    return {file: tuple(joined(places)) for file, places in found.items()}


def is_read(name: str, manifest: ModelManifest, start: int, end: int) -> bool:
    """Whether a stage with layers [start, end) computes with that tensor: as the manifest counts bytes.

    With two differences, both because a hole is worse than a byte too many: scales of fp8 weigh nothing in
    memory, and are read; what stands behind the layers is counted on the last stage, and read on all.
    """
    segments = name.split(".")
    layer = _layer_number(segments)
    last = end == manifest.num_layers
    if not LEFT_OUT.isdisjoint(segments):
        return False
    if layer is not None:
        return start <= layer < end
    if _is_head(name):
        return last and not manifest.tied
    if not EMBEDDINGS.isdisjoint(segments):
        return start == 0 or (last and manifest.tied)
    return True


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as can be, in order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def without(wanted: Iterable[Range], there: Sequence[Range]) -> list[Range]:
    """What of `wanted` is not in `there`, in order."""
    left: list[Range] = []
    taken = joined(there)
    for start, end in joined(wanted):
        at = start
        for have, until in taken:
            if until > at and have < end:
                if at < have:
                    left.append((at, have))
                at = until
        if at < end:
            left.append((at, end))
    return left
