"""What one sequence costs in each layer's cache, family by family, from config.json alone.

It mirrors what mlx-lm's models really keep, not what the architecture could get away with: DeepSeek V2
caches expanded keys, V3 the compressed latent; Qwen 3 ignores `layer_types`, Llama honours them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from omlx.errors import BadModel
from omlx.node.model_config import ModelConfig

# mlx-lm's gated delta rule keeps its state in float32, whatever the model's own dtype is.
STATE_ITEM_BYTES = 4
GROUPS = (64, 32)
"""Numbers of a quantised key or value that share a scale and a bias; the first that fits is taken."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The cache of one layer for one sequence: fixed + per_token * min(tokens, window_tokens)."""

    per_token: int
    """Bytes of one token's keys and values."""
    fixed: int = 0
    """Bytes whatever the length, once the first token is in: recurrent and convolution state."""
    window_tokens: int | None = None
    """Tokens kept at most; None: all of them."""

    def bytes_for(self, tokens: int) -> int:
        """Bytes after `tokens` tokens, without the room that MLX allocates ahead.

        While a chunk of n tokens is computed a sliding layer holds up to n - 1 tokens more than its
        window; the planner counts that as scratch.
        """
        if tokens <= 0:
            return 0
        kept = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return self.fixed + self.per_token * kept


def layer_caches(config: ModelConfig, item_bytes: int, kv_bits: int | None = None) -> tuple[LayerKv, ...]:
    """One LayerKv per layer; `item_bytes` is the size of one number in keys and values. With `kv_bits`, those
    of layers that keep every token are quantised, each group with a scale and a bias of `item_bytes`.

    A family that is not in the table is taken to keep keys and values of every token in every layer.
    That is right for most and never too little for those with windows or recurrent layers of their own,
    as long as they are long: it overstates their bytes.

    Raises BadModel where config.json lacks a field that decides the bytes.
    """
    rule = FAMILIES.get(config.family, _full)
    layers = rule(config, item_bytes)
    if kv_bits is None or config.family in UNKNOWN_WINDOWS:
        return layers
    group = group_size(*_widths(config)) or GROUPS[-1]
    return tuple(_quantised(layer, item_bytes, kv_bits, group) for layer in layers)


def group_size(*widths: int) -> int | None:
    """How many numbers of heads of such `widths` are quantised together; None where that cannot be."""
    return next((group for group in GROUPS if not any(width % group for width in widths)), None)


def _quantised(layer: LayerKv, item_bytes: int, bits: int, group: int) -> LayerKv:
    if layer.window_tokens is not None:
        return layer
    numbers = layer.per_token // item_bytes
    return replace(layer, per_token=numbers * bits // 8 + 2 * item_bytes * (numbers // group))


def attention_heads(config: ModelConfig) -> int:
    """Query heads; 1 for models without attention."""
    return config.count("num_attention_heads", "n_head", "n_heads", "num_heads") or 1


def head_dim(config: ModelConfig) -> int:
    """Numbers in one head's key."""
    named = config.count("head_dim")
    if named:
        return named
    return config.need("hidden_size", "n_embd", "d_model", "model_dim") // attention_heads(config)


def _widths(config: ModelConfig) -> tuple[int, ...]:
    """Numbers in one head's key, and in its value where that is another number, of layers that keep all."""
    if FAMILIES.get(config.family) is _expanded:
        return config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim"), config.need("v_head_dim")
    if config.family == "gemma4_text":
        return (config.count("global_head_dim") or config.need("head_dim"),)
    return (head_dim(config),)


def _kv_heads(config: ModelConfig) -> int:
    return config.count("num_key_value_heads") or attention_heads(config)


def _attention_bytes(config: ModelConfig, item_bytes: int) -> int:
    return 2 * _kv_heads(config) * head_dim(config) * item_bytes


def _full(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    return (LayerKv(_attention_bytes(config, item_bytes)),) * config.num_layers


def _sliding(config: ModelConfig, item_bytes: int, sliding: list[bool]) -> tuple[LayerKv, ...]:
    per_token = _attention_bytes(config, item_bytes)
    if not any(sliding):
        return (LayerKv(per_token),) * config.num_layers
    window = config.need("sliding_window")
    return tuple(LayerKv(per_token, window_tokens=window if slides else None) for slides in sliding)


def _by_layer_types(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    types = config.names("layer_types") or ("full_attention",) * config.num_layers
    return _sliding(config, item_bytes, [kind == "sliding_attention" for kind in types])


def _gpt_oss(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    types = config.names("layer_types")
    if types is None:
        return _sliding(config, item_bytes, [layer % 2 == 0 for layer in range(config.num_layers)])
    return _sliding(config, item_bytes, [kind != "full_attention" for kind in types])


def _olmo3(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    types = config.names("layer_types")
    if types is None:
        return _sliding(config, item_bytes, [(layer + 1) % 4 != 0 for layer in range(config.num_layers)])
    return _sliding(config, item_bytes, [kind != "full_attention" for kind in types])


def _by_pattern(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    every = config.need("sliding_window_pattern")
    return _sliding(config, item_bytes, [(layer + 1) % every != 0 for layer in range(config.num_layers)])


def _gemma4(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """The last `num_kv_shared_layers` layers read an earlier layer's cache and own none."""
    every = config.need("sliding_window_pattern")
    types = config.names("layer_types") or tuple(
        "full_attention" if (layer + 1) % every == 0 else "sliding_attention"
        for layer in range(config.num_layers)
    )
    heads = config.need("num_key_value_heads")
    same_key_and_value = config.text.get("attention_k_eq_v") is True
    wide_heads = config.count("num_global_key_value_heads") if same_key_and_value else None
    sliding = LayerKv(
        2 * heads * config.need("head_dim") * item_bytes, window_tokens=config.need("sliding_window")
    )
    wide = config.count("global_head_dim") or config.need("head_dim")
    full = LayerKv(2 * (wide_heads or heads) * wide * item_bytes)
    owners = config.num_layers - (config.count("num_kv_shared_layers") or 0)
    own = tuple(full if kind == "full_attention" else sliding for kind in types[:owners])
    return own + (LayerKv(0),) * (config.num_layers - len(own))


def _latent_item_count(config: ModelConfig) -> int:
    return config.need("kv_lora_rank") + config.need("qk_rope_head_dim")


def _latent(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """One compressed vector and one rotary key for all heads."""
    return (LayerKv(_latent_item_count(config) * item_bytes),) * config.num_layers


def _latent_and_index(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """The latent, and a second cache whose values are as large as the indexer's keys."""
    numbers = _latent_item_count(config) + 2 * config.need("index_head_dim")
    return (LayerKv(numbers * item_bytes),) * config.num_layers


def _two_latents(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """Two attentions in each layer."""
    return (LayerKv(2 * _latent_item_count(config) * item_bytes),) * config.num_layers


def _expanded(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """Latent attention whose keys and values are cached after they were expanded for every head."""
    key = config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim")
    per_head = key + config.need("v_head_dim")
    return (LayerKv(attention_heads(config) * per_head * item_bytes),) * config.num_layers


def _gated_delta(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """Full attention every so many layers; between them a convolution's tail and a float32 matrix."""
    every = config.need("full_attention_interval")
    key_dim, value_dim = config.need("linear_key_head_dim"), config.need("linear_value_head_dim")
    value_heads = config.need("linear_num_value_heads")
    channels = 2 * config.need("linear_num_key_heads") * key_dim + value_heads * value_dim
    tail = (config.need("linear_conv_kernel_dim") - 1) * channels * item_bytes
    recurrent = LayerKv(0, fixed=tail + value_heads * value_dim * key_dim * STATE_ITEM_BYTES)
    full = LayerKv(_attention_bytes(config, item_bytes))
    return tuple(full if (layer + 1) % every == 0 else recurrent for layer in range(config.num_layers))


def _short_convolution(config: ModelConfig, item_bytes: int) -> tuple[LayerKv, ...]:
    """LFM2: attention in the layers that are named, a convolution's tail in the others."""
    named = config.text.get("full_attn_idxs")
    if named is None:
        types = config.names("layer_types")
        if types is None:
            raise BadModel(f"{config.path}: layer_types and full_attn_idxs are both missing")
        named = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    if not isinstance(named, list):
        raise BadModel(f"{config.path}: full_attn_idxs must be a list of layer numbers")
    tail = LayerKv(0, fixed=(config.need("conv_L_cache") - 1) * config.need("hidden_size") * item_bytes)
    full = LayerKv(_attention_bytes(config, item_bytes))
    return tuple(full if layer in named else tail for layer in range(config.num_layers))


FAMILIES: dict[str, Callable[[ModelConfig, int], tuple[LayerKv, ...]]] = {
    "afmoe": _by_layer_types,
    "cohere2": _by_pattern,
    "deepseek_v2": _expanded,
    "deepseek_v3": _latent,
    "deepseek_v32": _latent_and_index,
    "gemma3_text": _by_pattern,
    "gemma4_text": _gemma4,
    "glm4_moe_lite": _latent,
    "glm_moe_dsa": _latent_and_index,
    "gpt_oss": _gpt_oss,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "llama": _by_layer_types,
    "longcat_flash": _two_latents,
    "mellum": _olmo3,
    "ministral3": _by_layer_types,
    "mistral4": _latent,
    "olmo3": _olmo3,
    "qwen3_5": _gated_delta,
    "qwen3_next": _gated_delta,
    "youtu_llm": _expanded,
}

WINDOWED = """
    afm7 baichuan_m1 exaone4 exaone_moe gear gemma3n gemma3n_text iquestloopcoder laguna llama4 llama4_text
    mimo_v2_flash muse_glimmer muse_spark plamo2 plamo3 recurrent_gemma spark2_5 step3p5
"""
UNKNOWN_WINDOWS = frozenset(WINDOWED.split())
"""Not in the table, with windows in mlx-lm that are never quantised: counted as if nothing were."""

# Of these the attention scores of a step are made in full, whatever kernels the device has.
LATENT_FAMILIES = frozenset(name for name, rule in FAMILIES.items() if rule in (_latent, _latent_and_index))
