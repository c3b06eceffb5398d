"""Model folders made by hand for tests that need no MLX: real headers, zeros for data."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8}

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """A valid file of zeros: {name: (dtype, shape)}."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    write_raw_safetensors(path, json.dumps(header).encode(), bytes(place))


def write_raw_safetensors(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """The three parts as they are, for files that are wrong on purpose."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def llama_config(**changes: object) -> dict[str, object]:
    """config.json of a small Llama; a change of None leaves the field out."""
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes
    return {name: value for name, value in config.items() if value is not None}


def llama_tensors(layers: int = 3, hidden: int = 8, vocab: int = 32, dtype: str = "F32") -> Tensors:
    """A few tensors per layer under Llama's names, an embedding, a norm and a head."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (dtype, (vocab, hidden)),
        "model.norm.weight": (dtype, (hidden,)),
        "lm_head.weight": (dtype, (vocab, hidden)),
    }
    for layer in range(layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = (dtype, (hidden,))
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = (dtype, (2 * hidden, hidden))
    return tensors


def model_folder(folder: Path, **config: object) -> Path:
    """A complete small Llama in `folder`, in one file; `config` changes config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    full = llama_config(**config)
    (folder / "config.json").write_text(json.dumps(full))
    layers = full.get("num_hidden_layers")
    write_safetensors(folder / "model.safetensors", llama_tensors(layers if isinstance(layers, int) else 3))
    return folder


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    """model.safetensors.index.json from {tensor: file}."""
    text = json.dumps({"metadata": {}, "weight_map": dict(files)})
    (folder / "model.safetensors.index.json").write_text(text)
