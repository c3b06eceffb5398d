"""The smallest config of every family that may be cut: six layers, windows shorter than the prompts.

A key of FAMILIES is a `model_type`; what follows a space names a variant of it.
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from tests.models.tokenizer import write_json

Config = dict[str, Any]

VOCAB = 199
"""Like no other size in these models: an array with this dimension is an embedding or a head."""
LAYERS = 6
WINDOW = 12
BASE: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
    "partial_rotary_factor": 0.5,
    "torch_dtype": "float32",
}
MOE: Config = {
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LINEAR: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
}
SCALED: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
MAMBA: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
INDEXED: Config = LATENT | MOE | {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 8}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 2
TIED: Config = {"tie_word_embeddings": True}
LONGROPE: Config = {
    "type": "longrope",
    "long_factor": [1.0] * 8,
    "short_factor": [1.0] * 8,
    "long_mscale": 1.2,
    "short_mscale": 1.2,
}
YARN: Config = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.1,
}
GEMMA: Config = TIED | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 3}
GEMMA4: Config = GEMMA | {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "layer_types": SLIDING,
    "final_logit_softcapping": 30.0,
}
QWEN3_5: Config = LINEAR | {"head_dim": 32}


def text(model_type: str, config: Config) -> Config:
    """The config of a wrapper around a text model."""
    return {"text_config": BASE | config | {"model_type": model_type}}


FAMILIES: dict[str, Config] = {
    "afmoe": MOE | {"layer_types": SLIDING, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": MOE,
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window_pattern": 3},
    "deepseek_v2": LATENT | MOE | {"rope_scaling": YARN},
    "deepseek_v32": INDEXED,
    "ernie4_5": {},
    "ernie4_5_moe": MOE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": "LLG", "rope_scaling": None},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "gemma": TIED,
    "gemma2": GEMMA,
    "gemma3": text("gemma3_text", GEMMA),
    "gemma4": text("gemma4_text", GEMMA4),
    "gemma4_text": GEMMA4,
    "gemma4_text moe": GEMMA4
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "glm4": {},
    "glm4_moe": MOE | {"rope_scaling": None, "use_qk_norm": True},
    "glm4_moe_lite": LATENT | MOE,
    "glm_moe_dsa": INDEXED
    | {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    "granite": SCALED | TIED,
    "granitemoe": SCALED | MOE,
    "granitemoehybrid": SCALED | MOE | MAMBA | {"layer_types": ["mamba", "mamba", "attention"] * 2},
    "hunyuan": MOE
    | {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": False,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm3": {},
    "jamba": MOE
    | MAMBA
    | {
        "attn_layer_offset": 2,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
    },
    "kimi_k2": LATENT | MOE,
    "kimi_k25": text("kimi_k2", LATENT | MOE),
    "kimi_linear": LATENT
    | MOE
    | {
        "num_experts_per_token": 2,
        "model_max_length": 4096,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4, 5],
            "full_attn_layers": [3, 6],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_bias": False,
        "conv_L_cache": 3,
    },
    "lfm2_moe": MOE
    | {
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "conv_bias": False,
        "conv_L_cache": 3,
    },
    "llama sliding": {"layer_types": SLIDING},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 0, 1, 1, 0], "use_qk_norm": True},
    "longcat_flash": LATENT
    | MOE
    | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "num_layers": LAYERS,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mimo": {},
    "mimo_v2_flash": MOE
    | {
        "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "v_head_dim": 16,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "n_shared_experts": None,
    },
    "minimax": MOE | {"rotary_dim": 8},
    "minimax_m2": MOE | {"rotary_dim": 8},
    "minimax_m3_vl": text(
        "minimax_m3_vl_text",
        MOE
        | {
            "dense_intermediate_size": 96,
            "moe_layer_freq": [0, 1, 1, 1, 1, 1],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "sparse_attention_freq": [0, 1, 1, 0, 1, 1],
        },
    ),
    "ministral3": {"rope_parameters": YARN, "layer_types": SLIDING},
    "mistral": {},
    "mistral3": text("mistral", {}),
    "mistral3 ministral3": text("ministral3", {"rope_parameters": YARN}),
    "mistral4": LATENT | MOE | {"rope_parameters": YARN},
    "mistral3 mistral4": text("mistral4", LATENT | MOE | {"rope_parameters": YARN}),
    "mixtral": MOE,
    "nemotron_h": MOE
    | {
        "hybrid_override_pattern": ["M", "-", "*", "M", "E", "*"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-6,
        "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo2": {},
    "olmo3": {"layer_types": SLIDING},
    "olmoe": MOE,
    "phi": {},
    "phi3": {},
    "phimoe": MOE | {"rope_scaling": LONGROPE},
    "qwen2": {},
    "qwen2_5_vl": text("qwen2_5_vl_text", {}),
    "qwen2_moe": MOE,
    "qwen2_vl": text("qwen2_vl_text", {}),
    "qwen3_5": text("qwen3_5_text", QWEN3_5),
    "qwen3_5_moe": text("qwen3_5_moe_text", QWEN3_5 | MOE),
    "qwen3_vl": text("qwen3_vl_text", {}),
    "qwen3_vl_moe": text("qwen3_vl_moe_text", MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"norm_epsilon": 1e-5} | TIED,
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
    },
}


def config_of(name: str) -> Config:
    """The whole config.json of a key of FAMILIES."""
    config = FAMILIES[name]
    return (config if "text_config" in config else BASE | config) | {
        "model_type": name.split()[0],
        "vocab_size": VOCAB,
    }


def randomise(model: nn.Module) -> None:
    """Seeded weights: matrices that keep the scale of what they are given, vectors beside their default."""
    drawn = []
    for name, value in sorted(tree_flatten(model.parameters())):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        noise = mx.random.normal(value.shape)
        if value.ndim < 2 or name.endswith("A_log"):
            drawn.append((name, value + 0.1 * noise))
        else:
            fan_in = math.prod(value.shape[1:]) if "conv" in name else value.shape[-1]
            drawn.append((name, noise * (0.3 if "embed" in name else 1.5 / math.sqrt(fan_in))))
    model.update(tree_unflatten(drawn))


def build_family(name: str, folder: Path, **changes: Any) -> Path:
    """Writes config.json, with `changes`, and random float32 weights into `folder`, which must exist."""
    config = config_of(name) | changes
    write_json(folder / "config.json", config)
    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    randomise(model)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
