"""The header of one .safetensors file: names, dtypes, shapes and places of its tensors, checked.

The file is an 8-byte little-endian length, that many bytes of JSON, then the data; the data are never read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from omlx.cache.block_file import DTYPE_BYTES as KEPT_DTYPE_BYTES
from omlx.errors import BadModel

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
DTYPE_BYTES = KEPT_DTYPE_BYTES | {"F8_E4M3": 1, "F8_E8M0": 1}
"""The dtypes that MLX reads from these files. It takes 8-bit floats as bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header: bytes [start, end) of the data, which begin after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class _Twice(ValueError):
    """A key stands twice in one JSON object; json alone would keep the last."""


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """The tensors of one file by name, every one checked against the file's size.

    Raises BadModel that names the file: unreadable, cut off, absurd header length, not UTF-8, not JSON,
    a tensor twice, dtype unknown to MLX, negative shape, shape and bytes at odds, out of range, overlapping.
    """
    header, data_bytes = _read_json(path)
    tensors: dict[str, TensorEntry] = {}
    for name, fields in header.items():
        if name != "__metadata__":
            tensors[name] = _entry(path, name, fields, data_bytes)
    _refuse_overlaps(path, tensors)
    return MappingProxyType(tensors)


def _read_json(path: Path) -> tuple[dict[str, object], int]:
    """(the header, bytes of data behind it)."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if file_bytes < LENGTH_BYTES:
                raise BadModel(f"{path}: {file_bytes} bytes is no safetensors file; download it again")
            if length > MOST_HEADER_BYTES:
                raise BadModel(
                    f"{path}: a header of {length} bytes is absurd (at most {MOST_HEADER_BYTES}); "
                    "this is no safetensors file or it is damaged, download it again"
                )
            if LENGTH_BYTES + length > file_bytes:
                raise BadModel(
                    f"{path}: the header needs {LENGTH_BYTES + length} bytes, the file has {file_bytes}; "
                    "it is cut off, download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise BadModel(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twins)
    except UnicodeDecodeError as error:
        raise BadModel(f"{path}: the header is not UTF-8; download it again") from error
    except _Twice as error:
        raise BadModel(f"{path}: the header names {error} twice (a duplicate tensor)") from error
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path}: the header is not JSON ({error}); download it again") from error
    if not isinstance(header, dict):
        raise BadModel(f"{path}: the header is not a JSON object; download it again")
    return header, file_bytes - LENGTH_BYTES - length


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Twice(repr(name))
            seen.add(name)
    return found


def _entry(path: Path, name: str, fields: object, data_bytes: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict):
        raise BadModel(f"{where} is not described by an object; download the file again")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadModel(f"{where} has dtype {dtype!r}, which MLX does not read; convert the model")
    shape = _whole_numbers(fields.get("shape"))
    if shape is None:
        raise BadModel(f"{where} has shape {fields.get('shape')!r}, not a list of sizes of zero or more")
    offsets = _whole_numbers(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadModel(f"{where} has data_offsets {fields.get('data_offsets')!r}, not [begin, end]")
    start, end = offsets
    if end > data_bytes:
        raise BadModel(
            f"{where} ends at byte {end} of the data, of which the file has {data_bytes}; "
            "it is cut off, download it again"
        )
    wanted = math.prod(shape) * DTYPE_BYTES[dtype]
    if wanted != end - start:
        raise BadModel(
            f"{where} of shape {list(shape)} and dtype {dtype} needs {wanted} bytes "
            f"but is given {end - start}; download the file again"
        )
    return TensorEntry(dtype=dtype, shape=shape, start=start, end=end)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = [n for n in value if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    return tuple(numbers) if len(numbers) == len(value) else None


def _refuse_overlaps(path: Path, tensors: Mapping[str, TensorEntry]) -> None:
    taken_by, taken_to = "", 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.bytes and entry.start < taken_to:
            raise BadModel(
                f"{path}: tensors {taken_by!r} and {name!r} overlap in the file; download it again"
            )
        if entry.end > taken_to:
            taken_by, taken_to = name, entry.end
