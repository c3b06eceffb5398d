"""Tiny models of many families: seeded random weights in float32, 1 to 2 MB each.

Their text is noise, but the same noise every time, and every code path is the real one: caches,
routing, linear attention, sliding windows, sinks, quantised layers.
"""

import hashlib
import importlib
import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from tests.models.tokenizer import VOCAB, write_json, write_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "mlp_bias": False}
QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# Five sliding layers to a full one, and a window so short that tests wrap it.
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 32,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 32,
    "intermediate_size": 64,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
}
# Three layers of linear attention to one of full attention.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "head_dim": 32,
    "rope_scaling": None,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """`config` on top of COMMON; `seed` was chosen for varied text; `bits` of each quantised weight.

    Where the head is the embedding again, a large one would only repeat the last token: hence `embedding`,
    its standard deviation.
    """

    config: dict[str, Any]
    seed: int = 0
    embedding: float = 1.0
    bits: int | None = None


TINY = {
    "tiny-llama": Tiny(LLAMA),
    "tiny-llama-4bit": Tiny(LLAMA, bits=4),
    "tiny-llama-tied": Tiny(LLAMA | {"tie_word_embeddings": True}, seed=1, embedding=0.1),
    "tiny-qwen3": Tiny(QWEN3, seed=4),
    "tiny-qwen3-wide": Tiny(QWEN3 | {"head_dim": 64}, seed=4),
    "tiny-qwen3-moe": Tiny(QWEN3_MOE, seed=2),
    "tiny-gemma3": Tiny(GEMMA3),
    "tiny-gpt-oss": Tiny(GPT_OSS),
    "tiny-deepseek-v3": Tiny(DEEPSEEK_V3),
    "tiny-qwen3-next": Tiny(QWEN3_NEXT),
}
FAMILIES = (
    "tiny-llama",
    "tiny-qwen3",
    "tiny-qwen3-moe",
    "tiny-gemma3",
    "tiny-gpt-oss",
    "tiny-deepseek-v3",
    "tiny-qwen3-next",
)
"""One model for each family, for tests over all of them."""
GROUP = 32


def recipe() -> str:
    """Names everything that decides the bytes of these folders."""
    digest = hashlib.sha256()
    here = Path(__file__)
    for source in (here, here.with_name("tokenizer.py")):
        digest.update(source.read_bytes())
    return f"{digest.hexdigest()[:16]} mlx-lm {version('mlx-lm')} mlx {version('mlx')}"


def randomise(model: nn.Module, tiny: Tiny) -> None:
    """Seeded weights, large enough that different prompts give different text."""
    mx.random.seed(tiny.seed)
    parameters = sorted(tree_flatten(model.parameters()))
    linear = any(name.endswith("A_log") for name, _ in parameters)
    drawn = []
    for name, value in parameters:
        if name.endswith("A_log"):  # linear attention: forget slowly
            drawn.append((name, mx.full(value.shape, -4.0)))
        elif mx.issubdtype(value.dtype, mx.floating) and value.ndim >= 2 and "norm" not in name:
            scale = tiny.embedding if "embed" in name else gain(name, value.shape[-1], linear)
            drawn.append((name, mx.random.normal(value.shape) * scale))
    model.update(tree_unflatten(drawn))


def gain(name: str, fan_in: int, linear: bool) -> float:
    """The standard deviation of a weight; `linear`: the model has linear attention."""
    part = name.split(".")[-2]
    if part in ("q_proj", "k_proj", "q_b_proj"):
        return 2 / math.sqrt(fan_in)  # attention that picks
    if part in ("o_proj", "out_proj"):
        # What comes through attention must count beside the last token.
        return (4 if linear else 2) / math.sqrt(fan_in)
    return 1 / math.sqrt(fan_in)


def save_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(w.nbytes for w in weights.values())},
        "weight_map": {name: "model.safetensors" for name in weights},
    }
    write_json(folder / "model.safetensors.index.json", index)


def build_tiny(name: str, folder: Path) -> Path:
    """Writes the model `name` of TINY into `folder`, which must exist; returns it."""
    tiny = TINY[name]
    config = COMMON | tiny.config
    mx.random.seed(0)  # biases and the like keep what the constructor draws
    family = importlib.import_module("mlx_lm.models." + config["model_type"])
    model = family.Model(family.ModelArgs.from_dict(config))
    randomise(model, tiny)
    if tiny.bits is not None:
        nn.quantize(model, group_size=GROUP, bits=tiny.bits)
        config["quantization"] = {"group_size": GROUP, "bits": tiny.bits, "mode": "affine"}
    save_weights(folder, dict(sorted(tree_flatten(model.parameters()))))
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    return folder
