"""Blocks of a stage's running caches: cut out as arrays of their own, and laid back into fresh caches.

Of plain keys and values any token can be cut and laid; of a sliding window a block has its last tokens; a
recurrent layer only has its state where the row stands. All caches are mlx-lm's own. Everything here is
lazy and belongs to the compute thread, but for `to_tensors` and `from_tensors`, which see evaluated arrays.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from omlx.cache.block_file import Tensor
from omlx.errors import OutOfStep
from omlx.node.slicing import Cut

PLAIN = (KVCache, QuantizedKVCache)
KINDS = (*PLAIN, RotatingKVCache, ArraysCache)
DTYPES: dict[str, tuple[mx.Dtype, mx.Dtype, str]] = {
    "F32": (mx.float32, mx.float32, "<f4"),
    "F16": (mx.float16, mx.float16, "<f2"),
    "BF16": (mx.bfloat16, mx.uint16, "<u2"),
    "U32": (mx.uint32, mx.uint32, "<u4"),
    "I32": (mx.int32, mx.int32, "<i4"),
    "I64": (mx.int64, mx.int64, "<i8"),
}
"""A dtype by its name in safetensors; what it is held as, for buffers know no bfloat16; that for NumPy."""
NAMES = {dtype: name for name, (dtype, _, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a piece: `name` is k or v, k0 to v2 of quantised ones, s0, s1, ... of states; behind the
    number of a cache in a CacheList, "0.k". `dtype` is its name in safetensors."""

    name: str
    dtype: str
    held: mx.array

    @property
    def value(self) -> mx.array:
        """The array in its own dtype, as an object of its own: mlx-lm's caches write into theirs."""
        return self.held.view(DTYPES[self.dtype][0])


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block has of one cache; `place` is its number among the caches of the whole model."""

    place: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """What one stage holds of a block."""

    pieces: tuple[Piece, ...]
    restorable: bool
    """Whether a row can go on from the block's end, given the blocks before it: no cache lacks anything."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """What to evaluate, so that the slab stands for itself."""
        return [part.held for piece in self.pieces for part in piece.parts]


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of row `row`, of which the caches hold `position` tokens now; end <= position."""

    row: int
    position: int
    start: int
    end: int
    states: bool = True
    """Whether recurrent states are taken; they are as large as many tokens' keys and values."""


def storable(prototypes: Iterable[Any]) -> bool:
    """Whether blocks can be cut out of such caches, one of a single row for each slot."""
    return all(type(leaf) in KINDS and getattr(leaf, "keep", 0) == 0 for leaf in _all_leaves(prototypes))


def trimmable(prototypes: Iterable[Any]) -> bool:
    """Whether a row can go on from any token of a block."""
    return all(type(leaf) in PLAIN for leaf in _all_leaves(prototypes))


def has_states(prototypes: Iterable[Any]) -> bool:
    """Whether a block needs a snapshot, so that a forward must end where it ends."""
    return any(type(leaf) is ArraysCache for leaf in _all_leaves(prototypes))


def places_of(cut: Cut) -> list[int]:
    """The number among the whole model's caches of each cache that `cut.make_caches` makes."""
    if not cut.slots:
        return list(range(len(cut.prototypes)))
    return [place for place, layer in enumerate(cut.slots) if cut.start <= layer < cut.end]


def cut_out(caches: Sequence[Any], places: Sequence[int], run: Run) -> Slab:
    """The block of `run` out of caches that hold one row or several, lazily; nothing is read.

    Evaluate its arrays with the forward that it was cut after, or sooner: as long as they are not, the next
    forward cannot write into the caches' buffers and copies them.
    """
    pieces = []
    restorable = True
    for place, cache in zip(places, caches, strict=True):
        parts: list[Part] = []
        for prefix, leaf in _leaves(cache):
            found = _take(leaf, run)
            restorable &= found is not None
            parts += [_part(prefix + name, array) for name, array in (found or {}).items()]
        if parts:
            pieces.append(Piece(place, tuple(parts)))
    return Slab(tuple(pieces), restorable)


def to_tensors(pieces: Iterable[Piece]) -> list[Tensor]:
    """Evaluated pieces as tensors "<place>.<name>" that share their memory. Any thread may call it."""
    return [_written(piece.place, part) for piece in pieces for part in piece.parts]


def from_tensors(tensors: Iterable[Tensor]) -> tuple[Piece, ...]:
    """Evaluated pieces out of what `to_tensors` gave, each place's tensors in a row. They are copied, and
    any thread may call it: nothing is left for MLX to compute."""
    by_place = groupby(tensors, key=lambda tensor: tensor.name.partition(".")[0])
    return tuple(Piece(int(place), tuple(map(_read, group))) for place, group in by_place)


def _written(place: int, part: Part) -> Tensor:
    data = memoryview(cast(Any, part.held))  # its stub does not show the buffer protocol
    return Tensor(f"{place}.{part.name}", part.dtype, tuple(part.held.shape), data)


def _read(tensor: Tensor) -> Part:
    flat = np.frombuffer(tensor.data, DTYPES[tensor.dtype][2])
    name = tensor.name.partition(".")[2]
    return Part(name, tensor.dtype, mx.array(flat.reshape(tensor.shape)))


def _part(name: str, array: mx.array) -> Part:
    # Copies, unless the whole buffer has no more than 16 KiB besides.
    return Part(name, NAMES[array.dtype], mx.contiguous(array).view(DTYPES[NAMES[array.dtype]][1]))


def _leaves(cache: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A cache, or those inside a CacheList, and what the names of their arrays begin with."""
    if type(cache) is CacheList:
        for number, inner in enumerate(cache.caches):
            yield from _leaves(inner, f"{prefix}{number}.")
    else:
        yield prefix, cache


def _all_leaves(caches: Iterable[Any]) -> list[Any]:
    return [leaf for cache in caches for _, leaf in _leaves(cache)]


def _buffers(cache: Any) -> dict[str, mx.array]:
    """Keys and values, which grow in their dimension -2, by their names in a piece."""
    if type(cache) is not QuantizedKVCache:
        return {"k": cache.keys, "v": cache.values}
    return dict(zip(_names(cache), (*cache.keys, *cache.values), strict=True))


def _take(cache: Any, run: Run) -> dict[str, mx.array] | None:
    """The arrays of one cache; None where it does not hold any more, or not yet, what is needed."""
    row = slice(run.row, run.row + 1)
    if type(cache) is ArraysCache:
        if run.end != run.position or not run.states:
            return None
        return {f"s{i}": state[row] for i, state in enumerate(cache.cache) if state is not None}
    if type(cache) in (RotatingKVCache, BatchRotatingKVCache):
        return _take_window(cache, run)
    # Rows of a batch end together, so that their padding need not be known.
    shift = (cache._idx if type(cache) is BatchKVCache else cache.offset) - run.position
    return {
        name: buffer[row, :, run.start + shift : run.end + shift] for name, buffer in _buffers(cache).items()
    }


def _take_window(cache: Any, run: Run) -> dict[str, mx.array] | None:
    """The last tokens before the run's end, at most as many as the window has, in their order."""
    size = cache.keys.shape[2]
    batch = type(cache) is BatchRotatingKVCache
    turned = cache.rotated if batch else cache._idx < min(size, cache.offset)
    # Indices as if the newest token were the last of the buffer's own order; below 0 it begins anew.
    stop = cache._idx - run.position + run.end
    start = stop - min(run.end - run.start, cache.max_size)
    if start < (cache._idx - size if turned else 0):
        return None
    spans = [(start, stop)]
    if start < 0:
        spans = [(start + size, min(stop, 0) + size), (0, max(stop, 0))]
    row = slice(run.row, run.row + 1)
    return {
        name: mx.concatenate([buffer[row, :, a:b] for a, b in spans], axis=2)
        for name, buffer in _buffers(cache).items()
    }


@dataclass(slots=True)
class _Plain:
    """Lays keys and values into buffers with room for all that is to come."""

    cache: Any
    prefix: str
    room: int
    buffers: dict[str, mx.array] = field(default_factory=dict)

    def add(self, parts: Mapping[str, Part], before: int, tokens: int) -> None:
        for name in _names(self.cache):
            part = parts.get(self.prefix + name)
            if part is None or part.held.shape[2] < tokens:
                raise OutOfStep(f"a block to restore lacks {self.prefix}{name} of its {tokens} tokens")
            value = part.value[..., :tokens, :]
            if name not in self.buffers:
                heads, width = value.shape[1], value.shape[3]
                self.buffers[name] = mx.zeros((1, heads, self.room, width), value.dtype)
            self.buffers[name][..., before : before + tokens, :] = value

    def fill(self, tokens: int) -> None:
        found = [self.buffers[name] for name in _names(self.cache)]
        half = len(found) // 2
        keys, values = tuple(found[:half]), tuple(found[half:])
        self.cache.keys, self.cache.values = (keys[0], values[0]) if half == 1 else (keys, values)
        self.cache.offset = tokens


@dataclass(slots=True)
class _Window:
    """Keeps the last blocks' tokens until there are all that a window shows."""

    cache: Any
    prefix: str
    kept: deque[list[mx.array]] = field(default_factory=deque)
    tokens: int = 0

    def add(self, parts: Mapping[str, Part], _: int, tokens: int) -> None:
        found = [parts[name].value for letter in "kv" if (name := self.prefix + letter) in parts]
        if len(found) < 2 or found[0].shape[2] != min(tokens, self.cache.max_size):
            self.kept.clear()
            self.tokens = 0
            return
        self.kept.append(found)
        self.tokens += found[0].shape[2]
        while self.tokens - self.kept[0][0].shape[2] >= self.cache.max_size:
            self.tokens -= self.kept.popleft()[0].shape[2]

    def fill(self, tokens: int) -> None:
        shown = min(tokens, self.cache.max_size)
        if self.tokens < shown:
            raise OutOfStep(f"blocks to restore have {self.tokens} of the {shown} tokens that a window shows")
        surplus = self.tokens - shown
        keys, values = (
            mx.concatenate([first[..., surplus:, :], *rest], axis=2)
            for first, *rest in zip(*self.kept, strict=True)
        )
        self.cache.keys, self.cache.values = keys, values
        self.cache.offset, self.cache._idx = tokens, shown


@dataclass(slots=True)
class _State:
    """Keeps the last snapshot."""

    cache: Any
    prefix: str
    found: list[mx.array | None] = field(default_factory=list)

    def add(self, parts: Mapping[str, Part], _: int, __: int) -> None:
        own = (parts.get(f"{self.prefix}s{i}") for i in range(len(self.cache.cache)))
        self.found = [None if part is None else part.value for part in own]

    def fill(self, _: int) -> None:
        if all(state is None for state in self.found):
            raise OutOfStep("the last block to restore has no snapshot of a recurrent layer")
        self.cache.cache = self.found


class Laying:
    """Fresh caches of one row that are filled block by block. Owned by the compute thread.

    `room_tokens`: how many tokens they shall hold at least before plain ones must grow; the blocks and the
    chunk after them, say. Blocks stay as they are; until `arrays` are evaluated, they are needed.
    """

    def __init__(self, caches: list[Any], places: Sequence[int], room_tokens: int) -> None:
        self.tokens = 0
        self._caches = caches
        self._room = room_tokens
        self._layers = [
            (place, self._layer(leaf, prefix))
            for place, cache in zip(places, caches, strict=True)
            for prefix, leaf in _leaves(cache)
        ]

    def _layer(self, cache: Any, prefix: str) -> _Plain | _Window | _State:
        if type(cache) is ArraysCache:
            return _State(cache, prefix)
        if type(cache) is RotatingKVCache:
            return _Window(cache, prefix)
        return _Plain(cache, prefix, -(-self._room // cache.step) * cache.step)

    def add(self, pieces: Iterable[Piece], tokens: int) -> None:
        """Lay the next block's first `tokens` tokens, lazily: all of it, but for the last one's where all
        caches are trimmable. Pieces of other places are passed over.

        Raises OutOfStep where keys or values are missing, or where there is no room.
        """
        if self.tokens + tokens > self._room:
            raise OutOfStep(f"{self.tokens + tokens} tokens to restore where {self._room} have room")
        own = {piece.place: {part.name: part for part in piece.parts} for piece in pieces}
        for place, layer in self._layers:
            layer.add(own.get(place, {}), self.tokens, tokens)
        self.tokens += tokens

    def arrays(self) -> list[mx.array]:
        """What to evaluate, so that what was laid is copied now."""
        plain = (layer for _, layer in self._layers if isinstance(layer, _Plain))
        return [buffer for layer in plain for buffer in layer.buffers.values()]

    def finish(self) -> list[Any]:
        """The caches, as if the row had computed all these tokens.

        Raises OutOfStep where the last block is not restorable with those before it.
        """
        if self.tokens:
            for _, layer in self._layers:
                layer.fill(self.tokens)
        return self._caches


def _names(cache: Any) -> tuple[str, ...]:
    return ("k0", "k1", "k2", "v0", "v1", "v2") if type(cache) is QuantizedKVCache else ("k", "v")
