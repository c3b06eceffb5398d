"""Reads a GGUF file: its fields, and its tensors under Hugging Face names as MLX arrays.

`gguf`, numpy and MLX are imported inside the functions: `import omlx.demo` must work without the
`demo` extra and stay cheap, since only building needs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
"""GGUF's name of a layer's tensor -> ours; a family adds its other norms."""

GROUP = 32
"""Weights that share a scale, in GGUF's Q4_1 and Q8_0 alike."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as it lies in the file. `kind` is what follows the layer's number: `attn_q`."""

    name: str
    kind: str
    raw: Any
    """numpy, [rows, bytes] where quantised."""
    encoding: Any
    """gguf.GGMLQuantizationType."""


@dataclass(frozen=True, slots=True)
class Affine:
    """Codes with scale and bias per group of 32: weight = code * scale + bias. numpy, [rows, ...]."""

    codes: "Array"
    scales: "Array"
    biases: "Array"
    bits: int


class Gguf:
    """An open GGUF file; the tensors stay mapped until it is dropped."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.reader = GGUFReader(str(path))
        self.fields: dict[str, Any] = {name: f.contents() for name, f in self.reader.fields.items()}

    def __len__(self) -> int:
        return len(self.reader.tensors)

    def tensors(self, names: dict[str, str]) -> Iterator[Tensor]:
        for tensor in self.reader.tensors:
            parts = tensor.name.split(".")
            kind = parts[2] if parts[0] == "blk" else parts[0]
            yield Tensor(hugging_face_name(tensor.name, names), kind, tensor.data, tensor.tensor_type)


def hugging_face_name(gguf_name: str, names: dict[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, by a family's table."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{names[kind]}.weight"


def unpermute(rows: "Array", heads: int) -> "Array":
    """Undoes llama.cpp's order of q and k rows: interleaved rotary pairs -> two halves."""
    count = rows.shape[0]
    pairs = rows.reshape(heads, count // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dequantise(tensor: Tensor) -> "Array":
    """float32, [rows, columns]."""
    from gguf.quants import dequantize

    values: Array = dequantize(tensor.raw, tensor.encoding)
    return values


def dense(values: "Array", dtype: str) -> "mx.array":
    """As an MLX array of `dtype` (`float32`, `bfloat16`)."""
    import mlx.core as mx
    import numpy as np

    kinds = {"float32": mx.float32, "bfloat16": mx.bfloat16}
    return mx.array(np.ascontiguousarray(values, dtype=np.float32)).astype(kinds[dtype])


def affine(tensor: Tensor) -> Affine | None:
    """A Q4_1 or Q8_0 tensor without any rounding; None for another encoding."""
    import numpy as np
    from gguf import GGMLQuantizationType as Encoding

    rows = tensor.raw.shape[0]
    if tensor.encoding == Encoding.Q4_1:  # f16 scale, f16 minimum, 16 bytes: j low, j + 16 high nibble
        block = np.ascontiguousarray(tensor.raw).reshape(rows, -1, 20)
        scales = block[..., 0:2].copy().view(np.float16)[..., 0]
        minima = block[..., 2:4].copy().view(np.float16)[..., 0]
        codes = np.concatenate([block[..., 4:] & 15, block[..., 4:] >> 4], axis=-1)
        return Affine(codes.reshape(rows, -1), scales, minima, bits=4)
    if tensor.encoding == Encoding.Q8_0:  # f16 scale, 32 signed bytes
        block = np.ascontiguousarray(tensor.raw).reshape(rows, -1, 34)
        scales = block[..., 0:2].copy().view(np.float16)[..., 0]
        codes = (block[..., 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        # Exact, 128 being a power of two; float32 because float16 could overflow.
        return Affine(codes.reshape(rows, -1), scales, -128.0 * scales.astype(np.float32), bits=8)
    return None


def pack(codes: "Array", bits: int) -> "mx.array":
    """Codes [rows, columns] as MLX packs them: uint32 words, the first code lowest."""
    import mlx.core as mx
    import numpy as np

    per_word = 32 // bits
    words = codes.reshape(codes.shape[0], -1, per_word).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return mx.array((words << shifts).sum(-1, dtype=np.uint32))
