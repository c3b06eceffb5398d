"""Which files hold a model's weights: what mlx-lm would load, checked to be all there.

mlx-lm loads every `model*.safetensors` of the folder and never looks into the index; so do we, but the
index (and the numbers in shard names) tell whether a download is complete.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omlx.errors import BadModel
from omlx.node.model_config import read_json_object
from omlx.node.safetensors_header import TensorEntry, read_header

INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Every tensor of a model folder by name, the files that hold them, and what looked odd."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    file_of: Mapping[str, Path]
    warnings: tuple[str, ...]


def read_weight_files(folder: Path) -> WeightFiles:
    """The headers of all weight files of `folder`.

    Raises BadModel that names the files: none at all, shards missing or of 0 bytes, a broken header, a
    tensor in two files. An index that names none of the files of an otherwise complete set is a warning.
    """
    files = tuple(sorted(folder.glob("model*.safetensors")))
    index = _indexed_tensors(folder / INDEX)
    missing, warnings = _missing(files, index)
    missing += [f"{file.name} (0 bytes)" for file in files if _is_empty(file)]
    if missing:
        raise BadModel(f"{folder}: weights are missing: {_listed(missing)}; download the model again")
    if not files:
        raise BadModel(_nothing_to_load(folder))
    tensors: dict[str, TensorEntry] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in tensors:
                raise BadModel(
                    f"{file}: tensor {name!r} is a duplicate, it is in {file_of[name].name} too; "
                    "remove the files of the other set"
                )
            tensors[name], file_of[name] = entry, file
    lost = sorted(set(index) - set(tensors))
    if lost and not warnings:
        warnings.append(f"{folder / INDEX} names tensors that no file has: {_listed(lost)}")
    return WeightFiles(files, MappingProxyType(tensors), MappingProxyType(file_of), tuple(warnings))


def _missing(files: Sequence[Path], index: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(names of shards that are not there, warnings)."""
    present = {file.name for file in files}
    unfinished = _unfinished_sets(present)
    named = set(index.values())
    absent = sorted(named - present)
    if absent and present and not (named & present) and not unfinished:
        warning = f"{INDEX} is stale: it names {_listed(absent)}, but the folder holds another complete set"
        return [], [warning]
    return sorted({*absent, *unfinished}), []


def _unfinished_sets(present: set[str]) -> list[str]:
    """Shards 1..N of each `...-00001-of-0000N` set of which only some are there."""
    missing = []
    for stem, total in {(m["stem"], m["total"]) for name in present if (m := NUMBERED.fullmatch(name))}:
        # A number this large is no count of shards, and the loop must end.
        if int(total) > 10_000:
            raise BadModel(f"{stem}-...-of-{total}.safetensors: {total} shards is absurd; rename the file")
        width = len(total)
        wanted = (f"{stem}-{number:0{width}d}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        missing += [name for name in wanted if name not in present]
    return missing


def _indexed_tensors(path: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index has it; empty where there is no index."""
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BadModel(f"{path}: weight_map is missing; download the file again or remove it")
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise BadModel(f"{path}: the file of tensor {wrong[0]!r} is not a string; download it again")
    return weight_map


def _is_empty(file: Path) -> bool:
    try:
        return file.stat().st_size == 0
    except OSError as error:
        raise BadModel(f"{file}: cannot be read ({error.strerror}); download it again") from error


def _nothing_to_load(folder: Path) -> str:
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        return f"{folder}: only model*.safetensors are loaded; rename or convert {_listed(others)}"
    return f"{folder}: no model*.safetensors in it; download the weights or convert them to safetensors"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
