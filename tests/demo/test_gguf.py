"""GGUF's names, orders and encodings."""

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.demo.gguf import GROUP, LAYER_NAMES, Tensor, affine, dense, hugging_face_name, pack, unpermute


def test_names_are_translated_by_the_familys_table() -> None:
    assert hugging_face_name("token_embd.weight", LAYER_NAMES) == "model.embed_tokens.weight"
    assert hugging_face_name("output_norm.weight", LAYER_NAMES) == "model.norm.weight"
    assert hugging_face_name("blk.17.attn_q.weight", LAYER_NAMES) == "model.layers.17.self_attn.q_proj.weight"
    assert hugging_face_name("blk.0.ffn_down.weight", LAYER_NAMES) == "model.layers.0.mlp.down_proj.weight"


@given(heads=st.integers(1, 6), half=st.integers(1, 8), columns=st.integers(1, 3))
def test_unpermute_undoes_the_interleaving_of_rotary_halves(heads: int, half: int, columns: int) -> None:
    rows = np.arange(heads * half * 2 * columns).reshape(heads * half * 2, columns)
    interleaved = rows.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(unpermute(interleaved, heads), rows)


@pytest.mark.parametrize("encoding", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), groups=st.integers(1, 4))
def test_mlx_dequantises_the_packed_codes_to_what_gguf_does(
    encoding: GGMLQuantizationType, seed: int, rows: int, groups: int
) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, groups * GROUP)).astype(np.float32)
    tensor = Tensor("w", "ffn_up", quantize(values, encoding), encoding)
    parts = affine(tensor)
    assert parts is not None
    ours = mx.dequantize(
        pack(parts.codes, parts.bits),
        dense(parts.scales, "float32"),
        dense(parts.biases, "float32"),
        group_size=GROUP,
        bits=parts.bits,
    )
    theirs = dequantize(tensor.raw, encoding)
    # One product and one sum in float32 on each side; a fused multiply-add may round once less.
    np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-6, atol=1e-6)


def test_a_tensor_that_is_not_quantised_has_no_codes() -> None:
    raw = np.zeros((2, 32), np.float32)
    assert affine(Tensor("w", "attn_norm", raw, GGMLQuantizationType.F32)) is None
