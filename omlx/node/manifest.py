"""ModelManifest: what a model weighs, layer by layer, from config.json and safetensors headers alone.

Read before anything is loaded: by the library, the planner, `omlx cluster plan`. It knows no MLX, no stages.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omlx.errors import BadModel
from omlx.node.kv_bytes import LATENT_FAMILIES, LayerKv, attention_heads, head_dim, layer_caches
from omlx.node.model_config import ModelConfig, read_config
from omlx.node.safetensors_header import DTYPE_BYTES, TensorEntry
from omlx.node.weight_files import WeightFiles, read_weight_files

LAYER_LISTS = frozenset({"layers", "h", "blocks"})
EMBEDDINGS = frozenset(
    {
        "embed",
        "embed_in",
        "embed_tokens",
        "embed_tokens_per_layer",
        "embedding",
        "embeddings",
        "tok_embeddings",
        "word_embeddings",
        "wpe",
        "wte",
    }
)
HEADS = frozenset({"embed_out", "lm_head", "output"})
# mlx-lm serves the language model; these parts of a checkpoint are dropped while it loads.
LEFT_OUT = frozenset(
    {
        "audio_tower",
        "embed_audio",
        "embed_vision",
        "mm_projector",
        "mtp",
        "multi_modal_projector",
        "patch_merge_mlp",
        "rotary_emb",
        "vision_embedder",
        "vision_model",
        "vision_tower",
        "visual",
    }
)
# Of these mlx-lm uses the head that is in the files, whatever tie_word_embeddings says.
HEAD_AS_FILED = frozenset(
    {
        "deepseek",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "longcat_flash",
        "nemotron_h",
        "phi",
        "phimoe",
        "qwen2_moe",
        "stablelm",
    }
)
FLOATS = frozenset({"F16", "BF16", "F32"})
CONFIG_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
SCALE_OF_FP8 = "_scale_inv"
# Attention over these head sizes never holds its scores in memory on Metal.
FUSED_HEAD_DIMS = frozenset({64, 80, 128})
# This family may have layers without a single parameter.
MAY_HAVE_EMPTY_LAYERS = frozenset({"nemotron-nas"})


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One decoder layer: bytes of its weights, and of its cache by length of the sequence."""

    weights: int
    kv: LayerKv


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights are packed, as config.json says; None where it does not say."""

    mode: str
    bits: int | None
    group_size: int | None


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """All quantities are bytes in memory once mlx-lm has loaded the model; spans are half-open."""

    folder: Path
    model_type: str
    config: Mapping[str, object]
    """config.json as it stands."""
    layers: tuple[LayerBytes, ...]
    embedding_bytes: int
    head_bytes: int
    """0 when tied: then the embedding is the head."""
    other_bytes: int
    """The final norm and what else stands behind the layers; the last stage holds it."""
    ignored_bytes: int
    """In the files but never loaded: layers beyond num_hidden_layers, towers, a head that is tied."""
    tied: bool
    context_tokens: int | None
    """Longest sequence by the config; None where it names none."""
    item_bytes: int
    """Size of one number in hidden states, keys and values."""
    hidden_size: int
    vocab_size: int
    row_bytes: int
    """Intermediate results of one token in the widest layer; an estimate, see `_row_bytes`."""
    score_bytes: int
    """Attention scores of one token against one cached token, where they are held at all."""
    quantization: Quantization | None
    files: tuple[Path, ...]
    warnings: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """The whole model on one stage."""
        return self.span_bytes(0, self.num_layers)

    def span_bytes(self, start: int, end: int) -> int:
        """Weights of a stage that runs layers [start, end).

        The stage with layer 0 holds the embedding; the one with the last layer holds head and norm, and
        a second copy of the embedding if that is the head and layer 0 is elsewhere.
        Raises ValueError for an empty span or one outside the model.
        """
        self._check(start, end)
        total = sum(layer.weights for layer in self.layers[start:end])
        if start == 0:
            total += self.embedding_bytes
        if end == self.num_layers:
            total += self.tail_bytes(alone=start == 0)
        return total

    def tail_bytes(self, *, alone: bool) -> int:
        """What the last stage holds besides its layers; `alone` when it has the embedding anyway."""
        copy = self.embedding_bytes if self.tied and not alone else 0
        return self.head_bytes + self.other_bytes + copy

    def kv_bytes(self, tokens: int, start: int = 0, end: int | None = None) -> int:
        """Cache of one sequence of `tokens` tokens in layers [start, end); all layers by default.

        Raises ValueError for an empty span or one outside the model.
        """
        end = self.num_layers if end is None else end
        self._check(start, end)
        return sum(layer.kv.bytes_for(tokens) for layer in self.layers[start:end])

    def _check(self, start: int, end: int) -> None:
        if not 0 <= start < end <= self.num_layers:
            raise ValueError(f"span [{start}, {end}) of a model with {self.num_layers} layers")


def read_manifest(folder: Path, kv_bits: int | None = None) -> ModelManifest:
    """Read config.json and the headers of all weight files of `folder`; no tensor is read.

    kv_bits: keys and values are quantised to so many bits where they can be; None: nowhere.

    Original fp8 checkpoints are counted as the bf16 that mlx-lm unpacks them to.

    Raises BadModel that names the file and what to do: see `read_config`, `read_weight_files` and
    `read_header`; also when a layer of the config has no tensor in any file.
    """
    config = read_config(folder)
    weights = read_weight_files(folder)
    parts = _sort_out(config, weights)
    item_bytes = _item_bytes(config, weights.tensors)
    caches = layer_caches(config, item_bytes, kv_bits)
    return ModelManifest(
        folder=folder,
        model_type=config.model_type,
        config=config.raw,
        layers=tuple(map(LayerBytes, parts.layers, caches)),
        embedding_bytes=parts.embedding,
        head_bytes=parts.head,
        other_bytes=parts.other,
        ignored_bytes=parts.ignored,
        tied=parts.tied,
        context_tokens=config.context_tokens,
        item_bytes=item_bytes,
        hidden_size=_hidden_size(config),
        vocab_size=_vocab_size(config, weights.tensors),
        row_bytes=_row_bytes(config, item_bytes),
        score_bytes=_score_bytes(config, item_bytes, kv_bits),
        quantization=_quantization(config),
        files=weights.files,
        warnings=weights.warnings,
    )


@dataclass(slots=True)
class _Parts:
    layers: list[int]
    tied: bool
    embedding: int = 0
    head: int = 0
    other: int = 0
    ignored: int = 0


def _sort_out(config: ModelConfig, weights: WeightFiles) -> _Parts:
    """Adds every tensor to the part of the model that it belongs to."""
    has_head = any(_is_head(name) for name in weights.tensors)
    says_tied = config.text.get("tie_word_embeddings") is True and config.family not in HEAD_AS_FILED
    tied = says_tied or not has_head
    parts = _Parts(layers=[0] * config.num_layers, tied=tied)
    unpacks = _unpacks_fp8(config)
    for name, entry in weights.tensors.items():
        loaded = _loaded_bytes(name, entry, weights.tensors) if unpacks else entry.bytes
        segments = name.split(".")
        layer = _layer_number(segments)
        if not LEFT_OUT.isdisjoint(segments) or loaded == 0:
            parts.ignored += entry.bytes
        elif layer is not None and layer < config.num_layers:
            parts.layers[layer] += loaded
        elif layer is not None or (tied and _is_head(name)):
            parts.ignored += entry.bytes
        elif _is_head(name):
            parts.head += loaded
        elif not EMBEDDINGS.isdisjoint(segments):
            parts.embedding += loaded
        else:
            parts.other += loaded
    empty = [number for number, size in enumerate(parts.layers) if size == 0]
    if empty and config.model_type not in MAY_HAVE_EMPTY_LAYERS:
        some = ", ".join(map(str, empty[:10])) + (" and more" if len(empty) > 10 else "")
        raise BadModel(
            f"{config.path.parent}: config.json says {config.num_layers} layers but no file has a tensor of "
            f"layer {some}; download the model again"
        )
    return parts


def _layer_number(segments: Iterable[str]) -> int | None:
    """The whole number behind the first list of layers in a tensor's name; None outside the layers."""
    before = ""
    for segment in segments:
        if before in LAYER_LISTS and segment.isascii() and segment.isdigit() and len(segment) <= 6:
            return int(segment)
        before = segment
    return None


def _is_head(name: str) -> bool:
    segments = name.split(".")
    return _layer_number(segments) is None and not HEADS.isdisjoint(segments[:-1])


def _unpacks_fp8(config: ModelConfig) -> bool:
    """Scales over blocks of 32 by 32 stay packed; every other fp8 checkpoint becomes bf16."""
    packing = config.text.get("quantization_config")
    if not isinstance(packing, dict):
        return True
    return not (packing.get("scale_fmt") == "ue8m0" and packing.get("weight_block_size") == [32, 32])


def _loaded_bytes(name: str, entry: TensorEntry, tensors: Mapping[str, TensorEntry]) -> int:
    if entry.dtype == "F8_E4M3" and name + SCALE_OF_FP8 in tensors:
        return 2 * entry.bytes
    packed = tensors.get(name.removesuffix(SCALE_OF_FP8)) if name.endswith(SCALE_OF_FP8) else None
    return 0 if packed is not None and packed.dtype == "F8_E4M3" else entry.bytes


def _item_bytes(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> int:
    """Hidden states have the type that the embedding yields, widened by float32 norms.

    The files say it for certain (a packed embedding by its scales); the config's dtype is asked only
    where they do not, for it often survives a conversion unchanged.
    """
    deciding = [
        DTYPE_BYTES[entry.dtype]
        for name, entry in tensors.items()
        if entry.dtype in FLOATS
        and (
            (
                not EMBEDDINGS.isdisjoint(name.split("."))
                and LEFT_OUT.isdisjoint(name.split("."))
                and name.endswith((".weight", ".scales"))
            )
            or name.endswith(".input_layernorm.weight")
        )
    ]
    if deciding:
        return max(deciding)
    named = config.text.get("dtype") or config.text.get("torch_dtype") or "float32"
    return CONFIG_DTYPE_BYTES.get(str(named).removeprefix("torch."), 4)


def _hidden_size(config: ModelConfig) -> int:
    return config.need("hidden_size", "n_embd", "d_model", "model_dim")


def _vocab_size(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> int:
    rows = [
        entry.shape[0]
        for name, entry in tensors.items()
        if entry.shape
        and name.endswith(".weight")
        and (_is_head(name) or not EMBEDDINGS.isdisjoint(name.split(".")))
        and LEFT_OUT.isdisjoint(name.split("."))
        and _layer_number(name.split(".")) is None
    ]
    return max(rows, default=0) or config.count("vocab_size") or 0


def _row_bytes(config: ModelConfig, item_bytes: int) -> int:
    """4 hidden states, queries and their output, and 3 rows of the feed-forward part: what is alive at once.

    In a mixture the feed-forward rows of all the experts that one token is sent to count.
    """
    dense = config.count("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * _hidden_size(config)
    experts = config.count("num_experts_per_tok", "num_experts_per_token", "moe_topk") or 1
    sparse = experts * (config.count("moe_intermediate_size") or (dense if experts > 1 else 0))
    shared = config.count("shared_expert_intermediate_size") or 0
    heads = 2 * attention_heads(config) * head_dim(config)
    return (4 * _hidden_size(config) + heads + 3 * max(dense, sparse + shared)) * item_bytes


def _score_bytes(config: ModelConfig, item_bytes: int, kv_bits: int | None) -> int:
    # Over quantised keys no attention is fused.
    fusable = head_dim(config) in FUSED_HEAD_DIMS and config.family not in LATENT_FAMILIES
    fused = fusable and kv_bits is None
    return 0 if fused else attention_heads(config) * item_bytes


def _quantization(config: ModelConfig) -> Quantization | None:
    packing = config.text.get("quantization") or config.text.get("quantization_config")
    if not isinstance(packing, dict):
        return None
    bits, group_size = packing.get("bits"), packing.get("group_size")
    return Quantization(
        mode=str(packing.get("mode") or packing.get("quant_method") or "affine"),
        bits=bits if isinstance(bits, int) else None,
        group_size=group_size if isinstance(group_size, int) else None,
    )
