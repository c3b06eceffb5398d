"""Blocks cut out of running caches and laid back: the row goes on as if nothing had been between."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model

from omlx.errors import OutOfStep
from omlx.node.slab import (
    Laying,
    Piece,
    Run,
    Slab,
    cut_out,
    from_tensors,
    has_states,
    places_of,
    storable,
    to_tensors,
    trimmable,
)
from omlx.node.slicing import Cut, cut_model
from tests.models.families import FAMILIES, VOCAB, build_family
from tests.models.tiny import TINY, build_tiny

pytestmark = pytest.mark.usefixtures("quick")

BLOCK = 16
AHEAD = 5
"""Tokens of the chunk after what was laid."""
GREEDY = 20
CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
"""Where other shapes were computed: float32 sums in another order, 1e-4 at most; logits go up to 9."""
KINDS = (
    *("tiny-llama", "tiny-gemma3", "tiny-gpt-oss", "tiny-deepseek-v3", "tiny-qwen3-next"),
    *("deepseek_v32", "falcon_h1", "jamba", "llama sliding", "nemotron_h"),
)
"""Every kind of cache; windows of 12 and of 32 tokens, smaller and larger than a block."""
PLAIN = ("tiny-llama", "tiny-deepseek-v3", "deepseek_v32")
BATCHED = ("tiny-llama", "tiny-gemma3", "tiny-deepseek-v3", "tiny-qwen3-next", "falcon_h1", "llama sliding")
ROWS = (20, 37, 45)
"""Tokens of the rows of a batch before they decode together."""
CHANGED: dict[str, dict[str, Any]] = {
    "gemma4_text shared": {"num_kv_shared_layers": 2},
    "gemma4_text embeds": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
    "hunyuan shared": {"use_cla": True},
    "smollm3 wide": {"head_dim": 32},
}
"""Fewer caches than layers, caches that hold what others do, and heads that can be quantised."""
TINIES = [name for name in TINY if name not in KINDS]
OTHERS = [name for name in FAMILIES if name not in KINDS]
LENGTHS = (11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49)
SPANS: tuple[tuple[int, int | None], ...] = ((0, 2), (2, 3), (3, None))
Load = Callable[..., Cut]
Logits = list[mx.array]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """`load(name)` is that model, or with a span the layers of it."""
    folders: dict[str, Path] = {}

    def loaded(name: str, start: int = 0, end: int | None = None) -> Cut:
        if name not in folders:
            folder = tmp_path_factory.mktemp("model")
            if name in TINY:
                folders[name] = build_tiny(name, folder)
            else:
                known = name if name in FAMILIES else name.split()[0]
                folders[name] = build_family(known, folder, **CHANGED.get(name, {}))
        model = load_model(folders[name], lazy=True)[0]
        return cut_model(model, start, len(model.layers) if end is None else end)

    return loaded


def ids_of(count: int, seed: int = 0) -> list[int]:
    return [(7 * i + 31 * seed + 11) % VOCAB for i in range(count)]


def borders(tokens: int) -> list[int]:
    """Where chunks end: at every block's end, and with the last token."""
    return [*range(0, tokens, BLOCK), tokens]


def computed(cut: Cut, ids: Sequence[int]) -> tuple[list[Any], list[tuple[Slab, int]]]:
    """The caches after these tokens, and all blocks with their lengths, each cut when it was full."""
    caches = cut.make_caches()
    blocks = []
    for start, end in pairwise(borders(len(ids))):
        out = cut(mx.array([ids[start:end]]), caches)
        slab = cut_out(caches, places_of(cut), Run(0, end, start, end))
        mx.eval(out, slab.arrays())
        assert slab.restorable
        blocks.append((slab, end - start))
    return caches, blocks


def laid(cut: Cut, blocks: Sequence[tuple[Sequence[Piece], int]], room: int = 0) -> list[Any]:
    laying = Laying(cut.make_caches(), places_of(cut), max(room, sum(tokens for _, tokens in blocks)))
    for pieces, tokens in blocks:
        laying.add(pieces, tokens)
    return laying.finish()


def go_on(cut: Cut, caches: list[Any], position: int) -> tuple[Logits, list[int]]:
    """A chunk, then greedily: the logits of every step, and the tokens."""
    logits = [cut(mx.array([ids_of(position + AHEAD)[position:]]), caches)[0, -1]]
    tokens = [int(logits[0].argmax().item())]
    while len(tokens) < GREEDY:
        logits.append(cut(mx.array([tokens[-1:]]), caches)[0, -1])
        tokens.append(int(logits[-1].argmax().item()))
    return logits, tokens


def same(found: tuple[Logits, list[int]], right: tuple[Logits, list[int]]) -> bool:
    return found[1] == right[1] and all(
        mx.array_equal(a, b).item() for a, b in zip(found[0], right[0], strict=True)
    )


def close(found: tuple[Logits, list[int]], right: tuple[Logits, list[int]]) -> bool:
    """For what was computed in other shapes."""
    return found[1] == right[1] and all(
        mx.allclose(a, b, **CLOSE).item() for a, b in zip(found[0], right[0], strict=True)
    )


def pieces_of(blocks: Sequence[tuple[Slab, int]]) -> list[tuple[tuple[Piece, ...], int]]:
    return [(slab.pieces, tokens) for slab, tokens in blocks]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_laid_back_from_its_blocks_goes_on_bit_for_bit(load: Load, name: str) -> None:
    cut = load(name)
    assert storable(cut.prototypes) and trimmable(cut.prototypes) is (name in PLAIN)
    for length in LENGTHS:
        caches, blocks = computed(cut, ids_of(length))
        first = go_on(cut, laid(cut, pieces_of(blocks)), length)
        again = go_on(cut, laid(cut, pieces_of(blocks)), length)
        right = go_on(cut, caches, length)
        assert float(right[0][0].std()) > 0.05
        assert same(first, right), length
        assert same(again, right), (length, "what the first row computed changed its blocks")


@pytest.mark.parametrize("name", [*TINIES, *OTHERS, *CHANGED])
def test_every_other_family_goes_on_too(load: Load, name: str) -> None:
    cut = load(name)
    assert storable(cut.prototypes)
    caches, blocks = computed(cut, ids_of(41))
    assert same(go_on(cut, laid(cut, pieces_of(blocks)), 41), go_on(cut, caches, 41))


@pytest.mark.parametrize("name", BATCHED)
def test_a_row_out_of_a_batch_goes_on_as_if_it_had_stayed(load: Load, name: str) -> None:
    cut = load(name)
    known = [ids_of(length, row) for row, length in enumerate(ROWS)]
    alone, blocks = zip(*(computed(cut, ids) for ids in known), strict=True)
    # The part of a block that a prompt ends with is given up for the block that it becomes.
    whole = [[(slab, tokens) for slab, tokens in own if tokens == BLOCK] for own in blocks]
    caches = [own.merge([own, *more]) for own, *more in zip(*alone, strict=True)]
    for step in range(2 * BLOCK):
        for row, ids in enumerate(known):
            ids.append((13 * step + 5 * row) % VOCAB)
        mx.eval(cut(mx.array([ids[-1:] for ids in known]), caches))
        for row, ids in enumerate(known):
            if len(ids) % BLOCK:
                continue
            run = Run(row, len(ids), len(ids) - BLOCK, len(ids))
            slab = cut_out(caches, places_of(cut), run)
            mx.eval(slab.arrays())
            assert slab.restorable
            whole[row].append((slab, BLOCK))
            stayed = [cache.extract(row) for cache in deepcopy(caches)]
            found = go_on(cut, laid(cut, pieces_of(whole[row])), len(ids))
            assert same(found, go_on(cut, stayed, len(ids))), (row, step)
            assert close(found, go_on(cut, computed(cut, ids)[0], len(ids))), (row, step)
    assert [len(own) for own in whole] == [3, 4, 4]


@pytest.mark.parametrize("name", KINDS)
def test_blocks_go_through_bytes_and_another_thread(load: Load, name: str) -> None:
    cut = load(name)
    caches, blocks = computed(cut, ids_of(40))
    read: list[tuple[tuple[Piece, ...], int]] = []

    def copy() -> None:
        for slab, tokens in blocks:
            tensors = to_tensors(slab.pieces)
            assert sum(len(bytes(tensor.data)) for tensor in tensors) == slab.nbytes
            read.append((from_tensors(replace(t, data=bytes(t.data)) for t in tensors), tokens))

    thread = Thread(target=copy)
    thread.start()
    thread.join()
    assert [[piece.place for piece in pieces] for pieces, _ in read] == [places_of(cut)] * len(blocks)
    assert same(go_on(cut, laid(cut, read), 40), go_on(cut, caches, 40))


def test_tensors_are_named_by_place_and_part_and_carry_bfloat16(load: Load) -> None:
    cut = load("falcon_h1")
    cut.model.set_dtype(mx.bfloat16)
    caches, blocks = computed(cut, ids_of(40))
    tensors = to_tensors(blocks[0][0].pieces)
    assert [t.name for t in tensors][:5] == ["0.0.s0", "0.0.s1", "0.1.k", "0.1.v", "1.0.s0"]
    assert (tensors[2].dtype, tensors[2].shape) == ("BF16", (1, 2, BLOCK, 16))
    assert memoryview(tensors[2].data).c_contiguous and memoryview(tensors[2].data).nbytes == 2 * BLOCK * 32
    read = [(from_tensors(to_tensors(slab.pieces)), tokens) for slab, tokens in blocks]
    back = laid(cut, read)
    assert back[0].caches[1].keys.dtype == mx.bfloat16
    assert same(go_on(cut, back, 40), go_on(cut, caches, 40))


@pytest.mark.parametrize("name", KINDS)
def test_laying_in_two_steps_leaves_room_for_the_rest(load: Load, name: str) -> None:
    cut = load(name)
    caches, blocks = computed(cut, ids_of(60))
    laying = Laying(cut.make_caches(), places_of(cut), 300)
    for slab, tokens in blocks[:2]:
        laying.add(slab.pieces, tokens)
    mx.eval(laying.arrays())
    sizes = [array.shape for array in laying.arrays()]
    for slab, tokens in blocks[2:]:
        laying.add(slab.pieces, tokens)
    back = laying.finish()
    assert laying.tokens == 60 and all(shape[2] == 512 for shape in sizes)
    assert same(go_on(cut, back, 60), go_on(cut, caches, 60))
    assert [array.shape for array in laying.arrays()] == sizes


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("tokens", [1, 7, BLOCK - 1])
def test_the_last_block_is_used_in_part_where_all_caches_are_plain(
    load: Load, name: str, tokens: int
) -> None:
    cut = load(name)
    caches, blocks = computed(cut, ids_of(3 * BLOCK))
    whole = 2 * BLOCK + tokens
    found = go_on(cut, laid(cut, [*pieces_of(blocks[:2]), (blocks[2][0].pieces, tokens)]), whole)
    assert close(found, go_on(cut, computed(cut, ids_of(whole))[0], whole))
    trim_prompt_cache(caches, BLOCK - tokens)
    assert same(found, go_on(cut, caches, whole))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_keys_and_values_keep_their_format(load: Load, bits: int) -> None:
    cut = load("smollm3 wide")
    cut.prototypes = [QuantizedKVCache(group_size=32, bits=bits) for _ in cut.prototypes]
    assert storable(cut.prototypes) and trimmable(cut.prototypes)
    for length in LENGTHS:
        caches, blocks = computed(cut, ids_of(length))
        read = [(from_tensors(to_tensors(slab.pieces)), tokens) for slab, tokens in blocks]
        names = [part.name for part in read[0][0][0].parts]
        assert names == ["k0", "k1", "k2", "v0", "v1", "v2"] and read[0][0][0].parts[0].dtype == "U32"
        assert same(go_on(cut, laid(cut, read, 200), length), go_on(cut, caches, length)), length


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1", "llama sliding"])
def test_the_stages_of_another_split_find_their_own_layers(load: Load, name: str) -> None:
    whole = load(name)
    caches, blocks = computed(whole, ids_of(40))
    stages = [load(name, *span) for span in SPANS]
    places = [places_of(cut) for cut in stages]
    assert [place for own in places for place in own] == places_of(whole)
    assert storable(cache for cut in stages for cache in cut.make_caches())
    back = [laid(cut, pieces_of(blocks)) for cut in stages]
    x = mx.array([ids_of(40 + AHEAD)[40:]])
    right = whole(x, caches)
    for cut, own in zip(stages, back, strict=True):
        x = cut(x, own)
    assert mx.array_equal(x, right).item()
    run = Run(0, 45, 40, 45)
    parts = [cut_out(own, own_places, run) for own, own_places in zip(back, places, strict=True)]
    gathered = to_tensors(piece for slab in parts for piece in slab.pieces)
    assert gathered == to_tensors(cut_out(caches, places_of(whole), run).pieces)


def test_a_block_that_is_cut_late_has_its_keys_and_values_but_no_state(load: Load) -> None:
    cut = load("tiny-qwen3-next")
    caches, _ = computed(cut, ids_of(17))
    slab = cut_out(caches, places_of(cut), Run(0, 17, 0, 16))
    assert not slab.restorable
    assert [piece.place for piece in slab.pieces] == [3]
    with pytest.raises(OutOfStep, match="no snapshot"):
        laid(cut, [(slab.pieces, 16)])


def test_a_state_of_the_last_block_is_enough(load: Load) -> None:
    cut = load("tiny-qwen3-next")
    caches, blocks = computed(cut, ids_of(32))
    first = tuple(piece for piece in blocks[0][0].pieces if piece.place == 3)
    found = go_on(cut, laid(cut, [(first, 16), (blocks[1][0].pieces, 16)]), 32)
    assert same(found, go_on(cut, caches, 32))


def test_a_window_wider_than_a_block_needs_the_blocks_before_it(load: Load) -> None:
    cut = load("tiny-gemma3")
    caches, blocks = computed(cut, ids_of(64))
    gone = tuple(piece for piece in blocks[2][0].pieces if piece.place == 5)
    with pytest.raises(OutOfStep, match="16 of the 32 tokens that a window shows"):
        laid(cut, [*pieces_of(blocks[:2]), (gone, 16), *pieces_of(blocks[3:])])
    early = tuple(piece for piece in blocks[1][0].pieces if piece.place == 5)
    back = laid(cut, [*pieces_of(blocks[:1]), (early, 16), *pieces_of(blocks[2:])])
    assert same(go_on(cut, back, 64), go_on(cut, caches, 64))


def test_part_of_a_block_is_refused_where_a_window_needs_its_end(load: Load) -> None:
    cut = load("tiny-gemma3")
    _, blocks = computed(cut, ids_of(32))
    with pytest.raises(OutOfStep, match="0 of the 20 tokens"):
        laid(cut, [*pieces_of(blocks[:1]), (blocks[1][0].pieces, 4)])


def test_missing_keys_and_missing_room_are_out_of_step(load: Load) -> None:
    cut = load("tiny-llama")
    _, [(slab, _), _] = computed(cut, ids_of(20))
    with pytest.raises(OutOfStep, match="lacks k of its 16 tokens"):
        laid(cut, [(slab.pieces[1:], 16)])
    with pytest.raises(OutOfStep, match="lacks k of its 17 tokens"):
        laid(cut, [(slab.pieces, 17)])
    laying = Laying(cut.make_caches(), places_of(cut), 31)
    laying.add(slab.pieces, 16)
    with pytest.raises(OutOfStep, match="32 tokens to restore where 31 have room"):
        laying.add(slab.pieces, 16)


def test_nothing_laid_is_fresh_caches(load: Load) -> None:
    cut = load("tiny-gemma3")
    assert same(go_on(cut, laid(cut, [], 9), 0), go_on(cut, cut.make_caches(), 0))


def test_a_block_does_not_keep_the_whole_cache_alive() -> None:
    before = mx.get_active_memory()
    cache = KVCache()
    whole = mx.zeros((1, 1, 8192, 64)), mx.zeros((1, 1, 8192, 32))
    mx.eval(cache.update_and_fetch(*whole))
    slab = cut_out([cache], [0], Run(0, 8192, 256, 512))
    mx.eval(slab.arrays())
    assert mx.get_active_memory() - before > 4 * 8192 * 96
    del cache, whole
    assert slab.nbytes == 4 * 256 * 96
    assert mx.get_active_memory() - before < slab.nbytes + 4096


def test_caches_of_another_kind_are_not_storable() -> None:
    class Own(KVCache):  # type: ignore[misc]
        pass

    class OwnList(CacheList):  # type: ignore[misc]
        pass

    for other in (ChunkedKVCache(8), Own(), RotatingKVCache(8, keep=4), OwnList(KVCache()), object()):
        assert not storable([KVCache(), other])
        assert not storable([CacheList(KVCache(), other)])
        assert not trimmable([KVCache(), other])
    known = [KVCache(), QuantizedKVCache(), RotatingKVCache(8), ArraysCache(2)]
    assert storable(known) and storable([CacheList(*known)])
    assert trimmable([CacheList(KVCache(), KVCache()), QuantizedKVCache()])
    assert has_states([CacheList(ArraysCache(2), KVCache())]) and not has_states(known[:3])


def positions(start: int, end: int, rows: int = 1) -> mx.array:
    """Keys that say where they stand."""
    return mx.broadcast_to(
        mx.arange(start, end).reshape(1, 1, -1, 1).astype(mx.float32), (rows, 1, end - start, 1)
    )


def window_of(cache: Any, row: int, position: int, end: int) -> list[int] | None:
    start = (end - 1) // 8 * 8
    slab = cut_out([cache], [0], Run(row, position, start, end))
    if not slab.restorable:
        return None
    keys, values = (part.value.reshape(-1).astype(mx.int32).tolist() for part in slab.pieces[0].parts)
    assert keys == values and slab.pieces[0].parts[0].held.shape == (1, 1, len(keys), 1)
    return keys


def check_window(cache: Any, row: int, position: int, held: int, size: int) -> None:
    """Of every block that ends here or earlier: its last tokens, or nothing where one of them is gone."""
    for end in range(1, position + 1):
        wanted = list(range(max((end - 1) // 8 * 8, end - size), end))
        there = wanted if wanted[0] >= position - held else None
        assert window_of(cache, row, position, end) == there, (end, position, held)


@hypothesis_settings(deadline=None, max_examples=60)
@given(size=st.integers(2, 20), chunks=st.lists(st.sampled_from([1, 1, 1, 2, 5, 9]), min_size=1, max_size=25))
def test_a_window_gives_the_last_tokens_before_any_end_that_it_still_has(
    size: int, chunks: list[int]
) -> None:
    cache = RotatingKVCache(size)
    position = held = 0
    for count in chunks:
        keys = positions(position, position + count)
        cache.update_and_fetch(keys, keys)
        position += count
        held = min(held + 1, size) if count == 1 else min(held, size - 1) + count
        check_window(cache, 0, position, held, size)


@hypothesis_settings(deadline=None, max_examples=30)
@given(
    size=st.integers(2, 12),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=3),
    steps=st.integers(0, 14),
)
def test_a_window_of_a_batch_gives_each_row_its_own(size: int, lengths: list[int], steps: int) -> None:
    caches = [RotatingKVCache(size) for _ in lengths]
    for own, length in zip(caches, lengths, strict=True):
        own.update_and_fetch(positions(0, length), positions(0, length))
    batch = BatchRotatingKVCache.merge(caches)
    for step in range(steps):
        keys = mx.concatenate([positions(length + step, length + step + 1) for length in lengths])
        batch.update_and_fetch(keys, keys)
    for row, length in enumerate(lengths):
        position = length + steps
        check_window(batch, row, position, min(position, size), size)
