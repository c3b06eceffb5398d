"""The manifest's arithmetic against files made by hand, and against mlx-lm's own models and caches."""

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from omlx.errors import BadModel
from omlx.node.kv_bytes import LayerKv
from omlx.node.manifest import ModelManifest, read_manifest
from omlx.node.safetensors_header import read_header
from tests.builders import (
    llama_config,
    llama_tensors,
    model_folder,
    write_index,
    write_raw_safetensors,
    write_safetensors,
)

EMBEDDING = 32 * 8 * 4
LAYER = 8 * 4 + 16 * 8 * 4
NORM = 8 * 4

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MIX = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_sliding": {"model_type": "llama", "layer_types": MIX, "sliding_window": 6},
    "llama_without_head_dim": {"model_type": "llama", "head_dim": None, "num_key_value_heads": None},
    "qwen3_that_ignores_layer_types": {"model_type": "qwen3", "layer_types": MIX, "sliding_window": 6},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 5,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "olmo3": {"model_type": "olmo3", "sliding_window": 6},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        "rope_scaling": {"factor": 1.0, "original_max_position_embeddings": 512},
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "tie_word_embeddings": True,
    },
}


def saved(folder: Path, config: dict[str, object], dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A random model of mlx-lm, written to `folder` as mlx-lm would find it."""
    config = {name: value for name, value in (BASE | config).items() if value is not None}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    weights = dict(tree_flatten(model.parameters()))
    if config["tie_word_embeddings"]:
        weights = {name: array for name, array in weights.items() if not name.startswith("lm_head")}
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights([(name, array.astype(dtype)) for name, array in weights.items()])
    mx.eval(model.parameters())
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return model


def kept_bytes(cache: object) -> int:
    """Bytes of what a cache holds, without the room that it allocated ahead."""
    match cache:
        case CacheList():
            return sum(kept_bytes(part) for part in cache.caches)
        case ArraysCache():
            return sum(array.nbytes for array in cache.cache if array is not None)
        case KVCache() | RotatingKVCache():
            kept = min(cache.size(), cache.keys.shape[2])
            return cache.keys[..., :kept, :].nbytes + cache.values[..., :kept, :].nbytes
    raise AssertionError(f"unknown cache {cache!r}")


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_bytes_are_those_of_mlx_lm(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES[family])
    manifest = read_manifest(tmp_path)
    caches = make_prompt_cache(model)
    assert len(caches) == manifest.num_layers
    for tokens in range(1, 12):
        mx.eval(model(mx.array([[tokens]]), cache=caches))
        told = [manifest.kv_bytes(tokens, layer, layer + 1) for layer in range(manifest.num_layers)]
        assert told == [kept_bytes(cache) for cache in caches]
        assert manifest.kv_bytes(tokens) == sum(told)


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_those_of_mlx_lm(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, FAMILIES[family])
    manifest = read_manifest(tmp_path)
    assert manifest.weight_bytes == sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    for number, layer in enumerate(model.layers):
        assert manifest.layers[number].weights == sum(
            array.nbytes for _, array in tree_flatten(layer.parameters())
        )
    assert manifest.tied == ("lm_head" not in model)
    assert manifest.ignored_bytes == 0
    assert manifest.vocab_size == 64


# Mixtures are left out: MLX multiplies their experts in float32 only on a CPU.
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma3_text", {}),
        ("deepseek_v3", {"n_routed_experts": None}),
        ("qwen3_next", {"num_experts": 0}),
    ],
)
def test_half_precision_halves_the_cache_except_for_recurrent_state(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    model = saved(tmp_path, FAMILIES[family] | changes, mx.bfloat16)
    manifest = read_manifest(tmp_path)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=caches))
    told = [manifest.kv_bytes(3, layer, layer + 1) for layer in range(manifest.num_layers)]
    assert told == [kept_bytes(cache) for cache in caches]
    assert manifest.item_bytes == 2


def test_a_quantized_model_is_counted_as_it_is_packed(tmp_path: Path) -> None:
    model = saved(tmp_path, {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64}, mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "affine"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    manifest = read_manifest(tmp_path)
    assert manifest.weight_bytes == sum(array.nbytes for array in weights.values())
    assert manifest.quantization is not None
    assert (manifest.quantization.bits, manifest.quantization.group_size) == (4, 32)
    # The config's dtype is a leftover: what the files hold decides.
    assert manifest.item_bytes == 2
    assert manifest.vocab_size == 64


def test_the_wrapper_of_gemma3_has_its_own_defaults_and_no_tower(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 7, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    layers = {f"language_model.model.layers.{n}.mlp.up_proj.weight": ("BF16", (4, 4)) for n in range(7)}
    tower = {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": ("BF16", (100, 100))}
    embedding = {"language_model.model.embed_tokens.weight": ("BF16", (64, 32))}
    write_safetensors(tmp_path / "model.safetensors", layers | tower | embedding)
    manifest = read_manifest(tmp_path)
    assert manifest.ignored_bytes == 20_000
    assert [layer.weights for layer in manifest.layers] == [32] * 7
    assert manifest.embedding_bytes == 64 * 32 * 2
    # 4 key/value heads of 256 numbers in bf16; windows of 512 in all but every sixth layer.
    assert {layer.kv.per_token for layer in manifest.layers} == {2 * 4 * 256 * 2}
    assert [layer.kv.window_tokens for layer in manifest.layers] == [512] * 5 + [None, 512]


def test_spans_add_up_to_the_whole_with_the_ends_on_their_stages(tmp_path: Path) -> None:
    manifest = read_manifest(model_folder(tmp_path))
    assert manifest.span_bytes(0, 1) == EMBEDDING + LAYER
    assert manifest.span_bytes(1, 2) == LAYER
    assert manifest.span_bytes(2, 3) == LAYER + NORM + EMBEDDING
    assert manifest.weight_bytes == sum(manifest.span_bytes(n, n + 1) for n in range(3))
    assert manifest.context_tokens == 4096
    assert not manifest.tied


def test_a_tied_embedding_is_needed_on_both_ends_of_a_split_model(tmp_path: Path) -> None:
    manifest = read_manifest(model_folder(tmp_path, tie_word_embeddings=True))
    assert manifest.tied
    assert (manifest.head_bytes, manifest.ignored_bytes) == (0, EMBEDDING)
    assert manifest.weight_bytes == EMBEDDING + 3 * LAYER + NORM
    assert manifest.span_bytes(0, 2) + manifest.span_bytes(2, 3) == manifest.weight_bytes + EMBEDDING


@pytest.mark.parametrize(("start", "end"), [(0, 0), (2, 1), (-1, 2), (0, 4)])
def test_a_span_outside_the_model_is_an_error(start: int, end: int, tmp_path: Path) -> None:
    manifest = read_manifest(model_folder(tmp_path))
    with pytest.raises(ValueError, match="3 layers"):
        manifest.span_bytes(start, end)
    with pytest.raises(ValueError, match="3 layers"):
        manifest.kv_bytes(10, start, end)


def test_layers_beyond_the_config_are_counted_apart(tmp_path: Path) -> None:
    model_folder(tmp_path)
    write_safetensors(tmp_path / "model-mtp.safetensors", {"model.layers.3.eh_proj.weight": ("F32", (5, 5))})
    assert read_manifest(tmp_path).ignored_bytes == 100


def test_fp8_is_counted_as_the_bf16_it_is_unpacked_to(tmp_path: Path) -> None:
    model_folder(tmp_path)
    before = read_manifest(tmp_path).layers[1].weights
    packed = {
        "model.layers.1.self_attn.o_proj.weight": ("F8_E4M3", (128, 128)),
        "model.layers.1.self_attn.o_proj.weight_scale_inv": ("F32", (1, 1)),
    }
    write_safetensors(tmp_path / "model-fp8.safetensors", packed)
    assert read_manifest(tmp_path).layers[1].weights == before + 2 * 128 * 128


@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers", "transformer.h", "layers"])
def test_layers_are_found_under_the_names_that_families_use(prefix: str, tmp_path: Path) -> None:
    model_folder(tmp_path)
    names = {f"{prefix}.{layer}.attn.weight": ("F32", (layer + 1, 4)) for layer in range(3)}
    write_safetensors(tmp_path / "model.safetensors", names | {"transformer.wte.weight": ("F32", (10, 8))})
    manifest = read_manifest(tmp_path)
    assert [layer.weights for layer in manifest.layers] == [16, 32, 48]
    assert manifest.embedding_bytes == 320


def test_an_unknown_family_is_taken_to_cache_every_token(tmp_path: Path) -> None:
    manifest = read_manifest(model_folder(tmp_path, model_type="brand_new", sliding_window=2))
    assert manifest.kv_bytes(1000) == 1000 * 3 * (2 * 4 * 4)


def test_a_config_that_names_no_context_has_none(tmp_path: Path) -> None:
    assert read_manifest(model_folder(tmp_path, max_position_embeddings=None)).context_tokens is None


@given(
    tokens=st.integers(0, 5000),
    more=st.integers(0, 500),
    per_token=st.integers(0, 100),
    fixed=st.integers(0, 100),
    window=st.none() | st.integers(1, 1000),
)
def test_a_cache_never_shrinks_and_never_outgrows_its_window(
    tokens: int, more: int, per_token: int, fixed: int, window: int | None
) -> None:
    kv = LayerKv(per_token, fixed, window)
    assert kv.bytes_for(tokens) <= kv.bytes_for(tokens + more)
    if window is not None:
        assert kv.bytes_for(tokens) <= fixed + per_token * window
    assert kv.bytes_for(0) == 0


# ---- what is refused


def refused(folder: Path) -> str:
    with pytest.raises(BadModel) as caught:
        read_manifest(folder)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refused(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    assert "not a folder" in refused(file)
    assert "config.json is missing" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"{}", "model_type is missing"),
        (b'{"model_type": 7}', "model_type is missing"),
        (b'{"model_type": "llama"}', "num_hidden_layers is missing"),
        (b'{"model_type": "llama", "num_hidden_layers": "two"}', "num_hidden_layers is 'two'"),
        (b'{"model_type": "llama", "num_hidden_layers": true}', "num_hidden_layers is True"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "more than any model has"),
    ],
)
def test_a_broken_config_is_refused_with_its_path(text: bytes, says: str, tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    message = refused(tmp_path)
    assert says in message
    assert str(tmp_path / "config.json") in message


def test_a_config_that_hides_the_bytes_of_its_caches_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path, layer_types=["sliding_attention"] * 3)
    assert "sliding_window is missing" in refused(tmp_path)
    model_folder(tmp_path, layer_types=["full_attention"])
    assert "layer_types has 1 entries for 3 layers" in refused(tmp_path)
    model_folder(tmp_path, hidden_size=None, head_dim=4)
    assert "hidden_size is missing" in refused(tmp_path)


def test_a_folder_without_weights_says_what_would_be_loaded(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
    assert "consolidated.safetensors" in refused(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    assert "no model*.safetensors" in refused(tmp_path)


def sharded(folder: Path, shards: int, indexed: int | None = None) -> list[str]:
    """A small Llama over `shards` files, with an index of `indexed` files; names in the index."""
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    tensors = list(llama_tensors().items())
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / name, dict(tensors[number::shards]))
    indexed = shards if indexed is None else indexed
    names = [f"model-{number + 1:05d}-of-{indexed:05d}.safetensors" for number in range(indexed)]
    write_index(folder, {tensor: names[place % indexed] for place, (tensor, _) in enumerate(tensors)})
    return names


def test_shards_weigh_as_much_as_one_file(tmp_path: Path) -> None:
    sharded(tmp_path / "four", 4)
    four, one = read_manifest(tmp_path / "four"), read_manifest(model_folder(tmp_path / "one"))
    assert (four.layers, four.weight_bytes) == (one.layers, one.weight_bytes)
    assert four.warnings == ()
    assert len(four.files) == 4


def test_every_missing_and_empty_shard_is_named(tmp_path: Path) -> None:
    names = sharded(tmp_path, 4)
    (tmp_path / names[0]).unlink()
    (tmp_path / names[2]).unlink()
    (tmp_path / names[3]).write_bytes(b"")
    message = refused(tmp_path)
    assert all(name in message for name in (names[0], names[2], names[3]))
    assert names[1] not in message
    for name in names[1:2] + names[3:]:
        (tmp_path / name).unlink()
    assert all(name in refused(tmp_path) for name in names)


def test_a_numbered_shard_is_missed_without_an_index_too(tmp_path: Path) -> None:
    names = sharded(tmp_path, 3)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / names[1]).unlink()
    assert names[1] in refused(tmp_path)


def test_a_stale_index_beside_a_complete_set_is_a_warning(tmp_path: Path) -> None:
    sharded(tmp_path, 2, indexed=4)
    (warning,) = read_manifest(tmp_path).warnings
    assert "stale" in warning
    assert "model-00004-of-00004.safetensors" in warning


def test_a_stale_index_does_not_excuse_an_incomplete_set(tmp_path: Path) -> None:
    sharded(tmp_path, 3, indexed=4)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": 1}}', "[]"])
def test_a_broken_index_is_refused_with_its_path(text: str, tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused_with_both_names(tmp_path: Path) -> None:
    model_folder(tmp_path)
    write_safetensors(tmp_path / "model-old.safetensors", {"lm_head.weight": ("F32", (1, 1))})
    message = refused(tmp_path)
    assert "model-old.safetensors" in message
    assert "model.safetensors" in message
    assert "duplicate" in message


def test_a_layer_without_tensors_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(num_hidden_layers=5)))
    assert "layer 3, 4" in refused(tmp_path)


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "model.safetensors: cannot be read" in refused(tmp_path)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a": entry(dtype="F99")}, "dtype 'F99'"),
        ({"a": entry(dtype=None)}, "dtype None"),
        ({"a": entry(dtype=["F32"])}, "dtype"),
        ({"a": entry(shape=[-2, -2])}, "shape [-2, -2]"),
        ({"a": entry(shape=[2.0, 2])}, "shape"),
        ({"a": entry(shape=[True, 4])}, "shape"),
        ({"a": entry(shape="22")}, "shape"),
        ({"a": entry(shape=[3, 2])}, "needs 24 bytes but is given 16"),
        ({"a": entry(shape=[2**62, 2**62])}, "needs"),
        ({"a": entry(data_offsets=[16, 0])}, "data_offsets [16, 0]"),
        ({"a": entry(data_offsets=[-16, 0])}, "data_offsets"),
        ({"a": entry(data_offsets=[0])}, "data_offsets"),
        ({"a": entry(data_offsets=[32, 48])}, "ends at byte 48"),
        ({"a": entry(), "b": entry(data_offsets=[8, 24])}, "'a' and 'b' overlap"),
        ({"a": entry(), "b": entry()}, "overlap"),
        ({"a": 5}, "not described by an object"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tensors: object, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw_safetensors(path, json.dumps(tensors).encode(), bytes(32))
    with pytest.raises(BadModel, match=r"model\.safetensors") as caught:
        read_header(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("header", "length", "says"),
    [
        (b"{}", 2**63, "absurd"),
        (b"{}", 100_000_001, "absurd"),
        (b"{}", 50_000, "cut off"),
        (b"{]", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"\xff": 1}', None, "not UTF-8"),
        (b"[]", None, "not a JSON object"),
        (b'{"a": {}, "a": {}}', None, "twice"),
    ],
)
def test_a_header_that_cannot_be_is_refused(
    header: bytes, length: int | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write_raw_safetensors(path, header, b"", length)
    with pytest.raises(BadModel, match=r"model\.safetensors") as caught:
        read_header(path)
    assert says in str(caught.value)


def test_a_file_of_a_few_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"oops")
    with pytest.raises(BadModel, match="4 bytes is no safetensors file"):
        read_header(path)


def test_a_tensor_without_numbers_overlaps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": entry(), "none": entry(shape=[0, 4], data_offsets=[8, 8])}
    write_raw_safetensors(path, json.dumps(tensors).encode(), bytes(16))
    assert read_header(path)["none"].bytes == 0


@given(data=st.binary(max_size=200))
def test_no_bytes_at_all_bring_the_header_reader_down(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "model-noise.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except BadModel as error:
        assert str(path) in str(error)
    else:
        assert all(math.prod(tensor.shape) >= 0 for tensor in tensors.values())


def test_no_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)
    counts: list[int] = []
    opened = Path.open

    def watched(self: Path, *args: object, **kwargs: object) -> object:
        file = opened(self, *args, **kwargs)
        if self.suffix == ".safetensors":
            read: Callable[..., bytes] = file.read
            file = _Watched(read, counts, file)
        return file

    monkeypatch.setattr(Path, "open", watched)
    manifest: ModelManifest = read_manifest(folder)
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert sum(counts) == file_bytes - manifest.weight_bytes


class _Watched:
    """A file that notes how many bytes were read."""

    def __init__(self, read: Callable[..., bytes], counts: list[int], file: object) -> None:
        self._read, self._counts, self._file = read, counts, file

    def read(self, size: int) -> bytes:
        data = self._read(size)
        self._counts.append(len(data))
        return data

    def __enter__(self) -> "_Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
