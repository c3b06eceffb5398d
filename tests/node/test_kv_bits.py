"""Keys and values in few bits: a family reads them as it would read what they stand for, or is refused."""

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model

from omlx.errors import BadModel
from omlx.ids import SeqId
from omlx.node.kv_bits import quantised_caches
from omlx.node.kv_bytes import FAMILIES as TABLE
from omlx.node.kv_bytes import UNKNOWN_WINDOWS, group_size, layer_caches
from omlx.node.loader import load_span
from omlx.node.manifest import read_manifest
from omlx.node.mixing import make_mixable
from omlx.node.model_config import read_config
from omlx.node.rows import Rows, can_share
from omlx.node.slicing import Cut
from omlx.node.step import Slice
from tests.models.families import FAMILIES, VOCAB, build_family, config_of
from tests.models.tiny import TINY, build_tiny

pytestmark = pytest.mark.usefixtures("quick")

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "global_head_dim": 64,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "block_dim": 128,
}
"""Heads whose size can be cut into groups, in every family's words for them."""
LONG = {"long_factor": [1.0] * 16, "short_factor": [1.0] * 16}
MORE: dict[str, dict[str, Any]] = {
    "phimoe": {"rope_scaling": FAMILIES["phimoe"]["rope_scaling"] | LONG},
    "gemma4_text shared": {"num_kv_shared_layers": 2},
    "hunyuan shared": {"use_cla": True},
}
REFUSED = {
    *("deepseek_v32", "gemma2", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_k25", "kimi_linear"),
    *("longcat_flash", "minimax_m3_vl", "mistral4", "mistral3 mistral4", "phi", "stablelm"),
    *("gemma4_text shared", "tiny-gpt-oss", "tiny-deepseek-v3"),
}
"""Latents, sinks, scores of their own, and layers that are given what others have cached."""
WIDE_TINIES = ("tiny-qwen3-wide", "tiny-qwen3-next")
NAMES = [*FAMILIES, "gemma4_text shared", "hunyuan shared", *WIDE_TINIES, "tiny-gpt-oss", "tiny-deepseek-v3"]
MIXTURES = ("afmoe", "deepseek_v2", "tiny-qwen3-next")
"""MLX multiplies their experts in float32 only on a CPU."""
DENSE = (
    *("cohere2", "gemma3", "gemma4_text", "lfm2", "llama sliding", "ministral3", "olmo3", "qwen2", "qwen3_5"),
    "tiny-qwen3-wide",
)
COUNTED = [
    *((name, mx.float32) for name in (*MIXTURES, *DENSE)),
    *((name, mx.bfloat16) for name in DENSE),
]
CHUNKS = ((0, 8), (8, 9), (9, 10))
"""Fewer tokens than a window shows."""
PROMPTS = 8
CLOSE = 2e-4
"""float32 sums in another order. Now and then one of them lets a number be rounded to the other side, which
the logits show; not with every prompt."""
Build = Callable[[str], Path]


class Rounded(KVCache):  # type: ignore[misc]
    """Plain keys and values as a quantised cache would give them back."""

    def __init__(self, group: int, bits: int) -> None:
        super().__init__()
        self._format = {"group_size": group, "bits": bits}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self._rounded(keys), self._rounded(values))

    def _rounded(self, array: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(array, **self._format), **self._format)


def rounded(own: Any) -> Any:
    if isinstance(own, CacheList):
        return CacheList(*map(rounded, own.caches))
    return Rounded(own.group_size, own.bits) if type(own) is QuantizedKVCache else own


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    @cache
    def built(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        if name in TINY:
            return build_tiny(name, folder)
        known = name if name in FAMILIES else name.split()[0]
        wide = WIDE | MORE.get(name, {})
        inner = config_of(known).get("text_config")
        return build_family(known, folder, **({"text_config": inner | wide} if inner else wide))

    return built


def compute(model: Any, prompt: int, caches: list[Any]) -> mx.array:
    ids = [(7 * i + 31 * prompt + 11) % VOCAB for i in range(CHUNKS[-1][1])]
    parts = [model(mx.array([ids[start:end]]), cache=caches) for start, end in CHUNKS]
    return mx.concatenate(parts, axis=1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_family_attends_to_what_its_few_bits_stand_for_or_is_refused_by_name(
    build: Build, name: str
) -> None:
    model = load_model(build(name), lazy=True)[0]
    if name in REFUSED:
        with pytest.raises(BadModel, match=rf"^{name} cannot run with --kv-bits 8 \(.*\); leave it out$"):
            quantised_caches(model, 8, name)
        return

    def difference(prompt: int) -> float:
        right = compute(model, prompt, list(map(rounded, quantised_caches(model, 8, name))))
        found = compute(model, prompt, quantised_caches(model, 8, name))
        assert float(right.std()) > 0.05
        return float(mx.abs(found - right).max().item())

    assert any(difference(prompt) < CLOSE for prompt in range(PROMPTS))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("name", "dtype"), COUNTED)
def test_bytes_are_counted_as_mlx_lm_has_them(build: Build, name: str, dtype: mx.Dtype, bits: int) -> None:
    folder = build(name)
    model = load_model(folder, lazy=True)[0]
    model.set_dtype(dtype)
    caches = quantised_caches(model, bits, name)
    mx.eval(model(mx.zeros((1, QuantizedKVCache.step), mx.int32), cache=caches))
    few, all_bits = (layer_caches(read_config(folder), dtype.size, given) for given in (bits, None))
    quantised = [type(one) is QuantizedKVCache for one in caches]
    assert any(quantised)
    for one, layer, plain, is_quantised in zip(caches, few, all_bits, quantised, strict=True):
        if not is_quantised:
            assert layer == plain
            continue
        assert one.nbytes == layer.bytes_for(QuantizedKVCache.step)
        assert one.nbytes < plain.bytes_for(QuantizedKVCache.step) * 2 / 3
    if dtype == mx.float32:
        told = read_manifest(folder, bits)
        assert [layer.kv for layer in told.layers] == list(few)
        assert told.score_bytes > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_windows_that_the_table_does_not_know_are_not_counted_as_quantised(build: Build, name: str) -> None:
    folder = build(name)
    config = read_config(folder)
    own = make_prompt_cache(load_model(folder, lazy=True)[0])
    windows = any(isinstance(one, RotatingKVCache | ChunkedKVCache) for one in own)
    assert not windows or config.family in {*TABLE, *UNKNOWN_WINDOWS}
    if config.family in UNKNOWN_WINDOWS:
        assert layer_caches(config, 4, 8) == layer_caches(config, 4)


@pytest.mark.parametrize(
    ("widths", "group"), [((64,), 64), ((128, 192), 64), ((32,), 32), ((96, 64), 32), ((80,), None)]
)
def test_groups_are_as_large_as_every_width_allows(widths: tuple[int, ...], group: int | None) -> None:
    assert group_size(*widths) == group


def test_heads_that_are_too_small_are_refused_with_their_size(build: Build) -> None:
    with pytest.raises(BadModel) as refused:
        load_span(build("tiny-llama"), 0, None, lambda done, total: None, 4)
    assert str(refused.value) == (
        "llama cannot run with --kv-bits 4 (heads of 16 numbers, which are no multiple of 32); leave it out"
    )


def test_a_model_is_tried_before_any_of_its_weights_is_read(build: Build) -> None:
    model = load_model(build("qwen2"), lazy=True)[0]
    gc.collect()
    before = mx.get_active_memory()
    quantised_caches(model, 8, "qwen2")
    assert mx.get_active_memory() - before < 1000


@pytest.mark.parametrize("span", [(0, 2), (2, 3), (3, None)])
def test_windows_stay_as_they_are_on_every_stage(build: Build, span: tuple[int, int | None]) -> None:
    cut = load(build("llama sliding"), *span)
    kinds = [RotatingKVCache, RotatingKVCache, QuantizedKVCache] * 2
    assert [type(one) for one in cut.make_caches()] == kinds[slice(*span)]
    assert [type(one) for one in cut.prototypes] == kinds


def load(folder: Path, start: int = 0, end: int | None = None) -> Cut:
    return load_span(folder, start, end, lambda done, total: None, 8)


def test_rows_that_cannot_share_lie_alike_on_a_stage_of_windows_alone(build: Build) -> None:
    slices = [Slice(SeqId(seq), (5,), 0, True) for seq in (1, 2)]
    chunk = Slice(SeqId(3), (5, 6, 7), 0, False)
    order = [slices[0], chunk, slices[1]]
    for span in ((0, 2), (2, 3), (0, None)):
        cut = load(build("llama sliding"), *span)
        assert make_mixable(cut) is not None
        assert can_share(cut.make_caches()) is (span == (0, 2))
        rows = Rows(cut)
        for piece in order:
            rows.admit(piece.seq)
        blocks = rows.blocks(order)
        assert [block.slices for block in blocks] == [(piece,) for piece in order]
