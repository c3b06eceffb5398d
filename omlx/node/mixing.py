"""One forward over rows that do not share caches: the weights are read once, attention runs block by block.

A block is rows of one length that share caches: a chunk of a prompt, rows that decode together, a long row
alone. Norms, MLPs and experts see all of them as one row of positions; what takes a cache sees each block
as if it were alone. Like a cut, this swaps modules: the model's own forward keeps running.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.ministral3 import _get_llama_4_attn_scale as position_scale

from omlx.node.slicing import CUTTABLE, Cut, GroupedMask, Skip, layer_list

MIXED = CUTTABLE
"""The families whose mixed forwards were compared with each block alone (tests/node/test_mixing.py)."""
KINDS = (KVCache, QuantizedKVCache, RotatingKVCache, ArraysCache)
LINEAR = (nn.Linear, nn.QuantizedLinear)
SCALING = ("mlx_lm.models.ministral3", "mlx_lm.models.mistral4")
"""Their forward makes one scale for the queries of all layers, out of the offset of slot 0."""


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` sequences with `length` tokens each to compute, and their caches as `Cut.make_caches` orders
    them: plain ones for a row, mlx-lm's batch kinds for several."""

    rows: int
    length: int
    caches: list[Any]

    @property
    def positions(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Parts:
    """One value for each block, handed through the model's forward as if it were one."""

    blocks: tuple[Block, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Caches(Parts):
    """What the forward takes for the cache of a slot."""

    offset = 0
    """Read by the forwards of SCALING alone, whose scale is then made anew for each block."""

    def make_mask(self, _: int, **asked: Any) -> Parts:
        """Every block's own mask, made before any of the caches grows."""
        masks = (
            cache.make_mask(block.length, **asked)
            for block, cache in zip(self.blocks, self.values, strict=True)
        )
        return Parts(self.blocks, tuple(masks))

    def __getitem__(self, index: int) -> "Caches":
        return Caches(self.blocks, tuple(cache[index] for cache in self.values))


@dataclass(slots=True)
class Wanted:
    """Which positions of the forward that is being built go to the head; None: all."""

    index: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies among the others: its number, and its positions [start, end) of `total`."""

    number: int
    block: Block
    start: int
    total: int

    @property
    def end(self) -> int:
        return self.start + self.block.positions

    def cut(self, whole: mx.array) -> mx.array:
        """[1, T, ...] to the block's own [rows, length, ...]."""
        return whole[:, self.start : self.end].reshape(self.block.rows, self.block.length, *whole.shape[2:])


@dataclass(frozen=True, slots=True)
class End:
    """A linear layer that was given something else than the block's input."""

    layer: nn.Module
    given: mx.array
    out: mx.array


@dataclass(slots=True)
class Turn:
    """Whose turn it is inside a PerBlock: the input [1, T, hidden] of all, and one block's part of it."""

    whole: mx.array
    place: Place | None = None
    own: mx.array | None = None
    end: End | None = None

    def begin(self, place: Place) -> None:
        self.place, self.own, self.end = place, place.cut(self.whole), None

    def part(self, value: Any) -> Any:
        """What of an argument belongs to the block."""
        assert self.place is not None
        if value is self.whole:
            return self.own
        if isinstance(value, Parts):
            return value.values[self.place.number]
        whole = isinstance(value, mx.array) and value.shape[:2] == (1, self.place.total)
        return self.place.cut(value) if whole else value


@dataclass(slots=True)
class Once:
    """Stands for a linear layer while the blocks are built, so that its weights are read once for all: given
    a block's very input, it computes the whole one; what may be the block's result is noted for `_join`."""

    layer: nn.Module
    turn: Turn
    product: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        turn = self.turn
        if x is not turn.own:
            turn.end = End(self.layer, x, self.layer(x))
            return turn.end.out
        if self.product is None:
            self.product = self.layer(turn.whole)
        assert turn.place is not None
        return turn.place.cut(self.product)


class Around(nn.Module):
    """Stands around a module; forwards may read the attributes of what is inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self["inner"] = inner
        # Found faster than a parameter.
        object.__setattr__(self, "_inner", inner)

    def __getattr__(self, name: str) -> Any:
        return self["inner"] if name == "inner" else getattr(self["inner"], name)


class PerBlock(Around):
    """A module that takes a cache: given the parts of several blocks, it computes one after the other.

    `owner` is the module whose linear layers may be computed for all blocks at once.
    """

    def __init__(self, inner: nn.Module, owner: nn.Module) -> None:
        super().__init__(inner)
        # Past nn.Module's own attributes, which are parameters.
        object.__setattr__(self, "_owner", owner)
        linear = {key: child for key, child in owner.items() if isinstance(child, LINEAR)}
        object.__setattr__(self, "_linear", linear)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        values = (*arguments, *named.values())
        blocks = next((value.blocks for value in values if isinstance(value, Parts)), None)
        if blocks is None:
            return self._inner(*arguments, **named)
        turn = Turn(next(value for value in values if isinstance(value, mx.array)))
        results, ends = [], []
        with self._standing_in(turn):
            for place in _places(blocks):
                turn.begin(place)
                own = {name: turn.part(value) for name, value in named.items()}
                results.append(self._alone(*map(turn.part, arguments), **own))
                ends.append(turn.end)
        return _join(blocks, results, ends)

    def _alone(self, *arguments: Any, **named: Any) -> Any:
        return self._inner(*arguments, **named)

    @contextmanager
    def _standing_in(self, turn: Turn) -> Iterator[None]:
        dict.update(self._owner, {key: Once(layer, turn) for key, layer in self._linear.items()})
        try:
            yield
        finally:
            dict.update(self._owner, self._linear)


class ScaledPerBlock(PerBlock):
    """The attention of a family of SCALING."""

    def __init__(self, inner: nn.Module, rope: dict[str, Any]) -> None:
        super().__init__(inner, inner)
        object.__setattr__(
            self, "_scale", (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
        )

    def _alone(self, x: mx.array, _: mx.array, mask: Any, cache: Any) -> Any:
        scale = position_scale(x.shape[1], cache.offset, *self._scale)
        return self._inner(x, scale.astype(x.dtype), mask, cache)


class Picked(Around):
    """The last layer: only wanted positions go on to the norm and the head."""

    def __init__(self, inner: nn.Module, wanted: Wanted) -> None:
        super().__init__(inner)
        object.__setattr__(self, "_wanted", wanted)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        out = self._inner(*arguments, **named)
        index = self._wanted.index
        if index is None:
            return out
        h, *more = out if isinstance(out, tuple) else (out,)
        h = h.reshape(1, -1, h.shape[-1])[:, index]
        return (h, *more) if more else h


@dataclass(frozen=True, slots=True)
class Mixed:
    """A cut whose modules were swapped for mixed forwards; `Cut.__call__` computes what it did before."""

    cut: Cut
    wanted: Wanted

    def __call__(self, x: mx.array, blocks: Sequence[Block], wanted: Sequence[int] | None) -> mx.array:
        """Build one forward, lazily.

        x: token ids [1, T] on the first stage, else the hidden state [1, T, hidden]: block after block,
        and in a block row after row.
        Returns the hidden state [1, T, hidden]; on the last stage logits [1, W, vocabulary] of the W
        `wanted` positions, ascending in [0, T), or of all. With the result all caches are computed; where
        no position is wanted the caller evaluates them.
        """
        if len(blocks) == 1:
            x = x.reshape(blocks[0].rows, blocks[0].length, *x.shape[2:])
            caches = blocks[0].caches
        else:
            shared = tuple(blocks)
            full = (self.cut.full(block.caches) for block in blocks)
            caches = [Caches(shared, slot) for slot in zip(*full, strict=True)]
        positions = sum(block.positions for block in blocks)
        if self.cut.last and wanted is not None and len(wanted) < positions:
            self.wanted.index = mx.array([*wanted], mx.int32)
        try:
            out = self.cut(x, caches)
        finally:
            self.wanted.index = None
        return out.reshape(1, -1, out.shape[-1])


def make_mixable(cut: Cut) -> Mixed | None:
    """Swap the modules of `cut` in place; None, and nothing is swapped, where that was never compared."""
    caches = cut.make_caches()
    if getattr(cut.model, "model_type", None) not in MIXED or not all(map(_known, caches)):
        return None
    owner, name, layers = layer_list(cut.model)
    found = [list(_takers(layer)) for layer in layers]
    if sum(map(bool, found)) < len(caches):
        return None
    for place, key in chain.from_iterable(found):
        place[key] = _per_block(place[key], owner)
    wanted = Wanted()
    if cut.last:
        owner[name] = [*layers[:-1], Picked(layers[-1], wanted)]
    return Mixed(cut, wanted)


def _known(cache: Any) -> bool:
    return all(map(_known, cache.caches)) if isinstance(cache, CacheList) else type(cache) in KINDS


def _takers(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Where a layer's modules lie that take a cache: (what holds it, its key)."""
    if isinstance(layer, Skip):
        return
    places: list[tuple[Any, Any]] = [(layer, key) for key in layer]
    places += [(value, i) for value in layer.values() if isinstance(value, list) for i in range(len(value))]
    for place, key in places:
        module = place[key]
        if isinstance(module, nn.Module) and "cache" in signature(type(module).__call__).parameters:
            yield place, key


def _per_block(module: nn.Module, owner: nn.Module) -> PerBlock:
    if type(module).__module__ in SCALING:
        return ScaledPerBlock(module, owner.args.rope_parameters)
    return PerBlock(module, module.attention if isinstance(module, GroupedMask) else module)


def _places(blocks: tuple[Block, ...]) -> Iterator[Place]:
    start, total = 0, sum(block.positions for block in blocks)
    for number, block in enumerate(blocks):
        yield Place(number, block, start, total)
        start += block.positions


def _join(blocks: tuple[Block, ...], results: list[Any], ends: list[End | None]) -> Any:
    """The blocks' outputs [rows, length, hidden] as one [1, T, hidden]. Where a module returns more, as
    keys and values for the layers after it, these stay apart."""
    if isinstance(results[0], tuple):
        first, *more = zip(*results, strict=True)
        return _join(blocks, list(first), ends), *(Parts(blocks, values) for values in more)
    last = [end for end, out in zip(ends, results, strict=True) if end is not None and end.out is out]
    if len(last) == len(results) and all(end.layer is last[0].layer for end in last):
        # MLX is lazy: what the blocks made of it one by one is never computed.
        return last[0].layer(_flat(end.given for end in last))
    return _flat(results)


def _flat(parts: Iterable[mx.array]) -> mx.array:
    return mx.concatenate([part.reshape(1, -1, part.shape[-1]) for part in parts], axis=1)
