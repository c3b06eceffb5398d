"""Every family of MIXED, with random weights: a mixed forward computes what each of its blocks does alone."""

from copy import deepcopy
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from mlx_lm.utils import load_model

from omlx.node.mixing import MIXED, Around, Block, Mixed, make_mixable
from omlx.node.slicing import Cut, cut_model
from tests.models.families import FAMILIES, VOCAB, build_family, config_of
from tests.models.tiny import TINY, build_tiny

pytestmark = pytest.mark.usefixtures("quick")

SPANS: tuple[tuple[int, int | None], ...] = ((0, 2), (2, 3), (3, None))
CLOSE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
"""float32 sums in another order; logits have a standard deviation of 0.1 to 5."""
PREFIXES = {"a": 14, "b": 19, "c": 15, "d": 17, "e": 0}
"""Tokens in the caches before the first mixed step: rows past the window, short of it, and new."""
STEPS: tuple[dict[tuple[str, ...], int], ...] = (
    {("a",): 9, ("b", "c"): 1, ("d",): 1, ("e",): 5},
    {("a",): 1, ("b", "c"): 1, ("d",): 1, ("e",): 13},
    {("b", "c"): 1, ("e",): 1, ("a",): 1, ("d",): 1},
)
"""Blocks and their lengths: one chunk ends and decodes, one goes past the window, and the order changes."""
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4_text shared": {"num_kv_shared_layers": 2},
    "gemma4_text embeds": {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
    "hunyuan shared": {"use_cla": True},
}
"""What is served whole only, and mixed all the same: layers that read more than the hidden state."""
TINIES = (
    *("tiny-qwen3", "tiny-qwen3-moe", "tiny-gemma3", "tiny-gpt-oss", "tiny-deepseek-v3", "tiny-qwen3-next"),
    *("tiny-llama-4bit", "tiny-llama-tied"),
)
"""The families that have no config in FAMILIES, quantised layers, and a tied head."""
Pieces = dict[tuple[str, ...], int]
Rows = dict[tuple[str, ...], list[Any]]
"""The caches of each block."""


@dataclass(frozen=True, eq=False)
class Built:
    alone: Cut
    """The whole model, not made mixable: it computes one block after the other."""
    whole: Mixed
    stages: list[Mixed]


@pytest.fixture(scope="module", params=[*FAMILIES, *VARIANTS, *TINIES])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    name = request.param
    folder = tmp_path_factory.mktemp("family")
    if name in TINY:
        build_tiny(name, folder)
    else:
        build_family(name if name in FAMILIES else name.split()[0], folder, **VARIANTS.get(name, {}))
    alone = load_cut(folder)
    stages = [] if name in VARIANTS else [mixable(load_cut(folder, *span)) for span in SPANS]
    return Built(alone, mixable(load_cut(folder)), stages)


def load_cut(folder: Path, start: int = 0, end: int | None = None) -> Cut:
    model = load_model(folder, lazy=True)[0]
    return cut_model(model, start, len(model.layers) if end is None else end)


def mixable(cut: Cut) -> Mixed:
    mixed = make_mixable(cut)
    assert mixed is not None
    return mixed


def tokens(seqs: tuple[str, ...], known: dict[str, int], length: int) -> mx.array:
    return mx.array(
        [[(7 * (known[seq] + i) + 31 * ord(seq) + 11) % VOCAB for i in range(length)] for seq in seqs]
    )


def prefilled(cut: Cut) -> Rows:
    """What PREFIXES leave behind, with b and c in one batch."""
    alone = {}
    for seq, length in PREFIXES.items():
        alone[seq] = cut.make_caches()
        if length:
            mx.eval(cut(tokens((seq,), {seq: 0}, length), alone[seq]))
    pair = [own.merge([own, other]) for own, other in zip(alone.pop("b"), alone.pop("c"), strict=True)]
    return {("b", "c"): pair} | {(seq,): caches for seq, caches in alone.items()}


def of_span(cut: Cut, rows: Rows) -> Rows:
    inside = [cut.start <= slot < cut.end for slot in cut.slots]
    return {seqs: list(compress(caches, inside)) for seqs, caches in deepcopy(rows).items()}


def mix(stages: list[Mixed], x: mx.array, pieces: Pieces, rows: list[Rows]) -> mx.array:
    """Logits [W, vocabulary] of the pieces of one token."""
    wanted: list[int] = []
    start = 0
    for seqs, length in pieces.items():
        wanted += range(start, start + len(seqs)) if length == 1 else ()
        start += len(seqs) * length
    for mixed, own in zip(stages, rows, strict=True):
        x = mixed(x, [Block(len(seqs), length, own[seqs]) for seqs, length in pieces.items()], wanted)
    return x[0]


def test_a_mixed_forward_computes_what_each_block_does_alone_on_one_stage_and_on_three(built: Built) -> None:
    alone = prefilled(built.alone)
    together = [deepcopy(alone)]
    apart = [of_span(mixed.cut, alone) for mixed in built.stages]
    known = dict(PREFIXES)
    for number, pieces in enumerate(STEPS):
        given = {seqs: tokens(seqs, known, length) for seqs, length in pieces.items()}
        x = mx.concatenate([ids.reshape(1, -1) for ids in given.values()], axis=1)
        found = mix([built.whole], x, pieces, together)
        assert not built.stages or mx.array_equal(mix(built.stages, x, pieces, apart), found).item(), number
        single = [built.alone(ids, alone[seqs])[:, -1] for seqs, ids in given.items()]
        right = mx.concatenate([logits for logits, n in zip(single, pieces.values(), strict=True) if n == 1])
        assert found.shape == right.shape and float(right.std()) > 0.05
        assert mx.allclose(found, right, **CLOSE).item(), (number, mx.abs(found - right).max().item())
        known |= {seq: known[seq] + length for seqs, length in pieces.items() for seq in seqs}


def test_a_single_block_takes_the_road_of_the_cut_bit_for_bit(built: Built) -> None:
    chunk, more = tokens(("a",), {"a": 0}, 14), tokens(("a",), {"a": 14}, 3)
    plain, swapped, block = (cut.make_caches() for cut in (built.alone, built.whole.cut, built.whole.cut))
    for x in (chunk, more, more[:, :1]):
        right = built.alone(x, plain)
        assert mx.array_equal(built.whole.cut(x, swapped), right).item()
        found = built.whole(x, [Block(1, x.shape[1], block)], [x.shape[1] - 1])
        assert found.shape == (1, 1, right.shape[-1])
        assert mx.allclose(found[0, 0], right[0, -1], **CLOSE).item()


def test_chunks_alone_fill_their_caches_though_no_position_is_wanted(built: Built) -> None:
    chunks = {seq: tokens((seq,), {seq: 0}, length) for seq, length in (("a", 5), ("b", 14))}
    rows = {seq: built.whole.cut.make_caches() for seq in chunks}
    x = mx.concatenate([*chunks.values()], axis=1)
    out = built.whole(x, [Block(1, ids.shape[1], rows[seq]) for seq, ids in chunks.items()], [])
    assert out.shape[:2] == (1, 0)
    mx.eval([cache.state for caches in rows.values() for cache in caches])
    for seq, ids in chunks.items():
        plain = built.alone.make_caches()
        mx.eval(built.alone(ids, plain))
        after = tokens((seq,), {seq: ids.shape[1]}, 1)
        assert mx.allclose(built.whole.cut(after, rows[seq]), built.alone(after, plain), **CLOSE).item(), seq


def test_attention_reads_its_linear_layers_once_for_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = mixable(load_cut(build_family("llama sliding", tmp_path)))
    attention = mixed.cut.model.layers[0].self_attn
    given: dict[int, list[tuple[int, ...]]] = {}
    plain = nn.Linear.__call__

    def noting(layer: nn.Linear, x: mx.array) -> mx.array:
        given.setdefault(id(layer), []).append(x.shape)
        return plain(layer, x)

    monkeypatch.setattr(nn.Linear, "__call__", noting)
    blocks = [Block(1, length, mixed.cut.make_caches()) for length in (9, 1, 4)]
    mixed(mx.zeros((1, 14), mx.int32), blocks, [9])
    assert given[id(attention.q_proj)] == given[id(attention.v_proj)] == [(1, 14, 64)]
    # The first three are of the blocks, and nothing asks for them.
    assert given[id(attention.o_proj)] == [(1, 9, 64), (1, 1, 64), (1, 4, 64), (1, 14, 64)]


def test_after_an_error_inside_a_block_the_model_computes_as_before(tmp_path: Path) -> None:
    class Broken(KVCache):  # type: ignore[misc]
        def update_and_fetch(self, *_: mx.array) -> None:
            raise ValueError("broken")

    mixed = mixable(load_cut(build_family("llama sliding", tmp_path)))
    x = tokens(("a",), {"a": 0}, 7)
    right = mixed.cut(x, mixed.cut.make_caches())
    bad = [Broken() for _ in mixed.cut.prototypes]
    with pytest.raises(ValueError, match="broken"):
        mixed(mx.concatenate([x, x], axis=1), [Block(1, 7, mixed.cut.make_caches()), Block(1, 7, bad)], [6])
    assert mx.array_equal(mixed.cut(x, mixed.cut.make_caches()), right).item()


def test_a_family_that_was_never_compared_is_left_as_it_is(tmp_path: Path) -> None:
    cut = load_cut(build_family("llama sliding", tmp_path))
    cut.model.model_type = "no_such_family"
    assert make_mixable(cut) is None
    assert not any(isinstance(module, Around) for module in cut.model.modules())


def test_caches_of_an_unknown_kind_are_left_as_they_are(tmp_path: Path) -> None:
    cut = load_cut(build_family("llama sliding", tmp_path))
    cut.prototypes[2] = ChunkedKVCache(8)
    assert make_mixable(cut) is None
    assert not any(isinstance(module, Around) for module in cut.model.modules())


def test_the_table_names_exactly_the_families_that_are_compared() -> None:
    compared = {config_of(name)["model_type"] for name in FAMILIES}
    assert compared | {TINY[name].config["model_type"] for name in TINIES} == MIXED
