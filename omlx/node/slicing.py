"""Cut any mlx-lm model to a span of layers by swapping modules; the model's own forward keeps running.

Layers outside the span become `Skip`. The one before the span injects the hidden state that came from
the neighbour, the one after it captures what goes to the next. Masks, scales and caps stay the model's
own, so a cut model computes bit for bit what the whole one does. MLX is lazy: what is built behind the
captured state is never computed.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from omlx.errors import CannotSplit

NAMES = """
    afmoe apertus bailing_moe cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5
    ernie4_5_moe exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid hunyuan hunyuan_v1_dense
    internlm3 jamba kimi_k2 kimi_k25 kimi_linear lfm2 lfm2_moe llama llama4_text longcat_flash mimo
    mimo_v2_flash minimax minimax_m2 minimax_m3_vl ministral3 mistral mistral3 mistral4 mixtral
    nemotron_h olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5
    qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe seed_oss smollm3 stablelm starcoder2
    step3p5
"""
CUTTABLE = frozenset(NAMES.split())
"""The families whose cuts were compared with the whole model (tests/node/test_families.py)."""

HEADS = ("lm_head", "output", "head")
EXTRAS = {"mlx_lm.models.gemma4_text": 2, "mlx_lm.models.hunyuan": 1}
"""How many values a layer returns besides the hidden state; where layers share nothing they are unused."""
SHARING = ("num_kv_shared_layers", "hidden_size_per_layer_input", "use_cla")
"""Fields of a config that let a layer read more than the hidden state before it."""


@dataclass(slots=True)
class Box:
    """Where the swapped modules find and leave the hidden state of the forward that is being built."""

    given: mx.array | None = None
    taken: mx.array | None = None


class Skip(nn.Module):
    """Stands for a layer outside the span; carries its plain attributes, because forwards read them."""

    def __init__(self, layer: nn.Module, box: Box, *, injects: bool, captures: bool) -> None:
        super().__init__()
        for name, value in _plain(layer).items():
            setattr(self, name, value)
        # Past nn.Module's own attributes, which are parameters.
        object.__setattr__(self, "_box", box)
        object.__setattr__(self, "_injects", injects)
        object.__setattr__(self, "_captures", captures)
        object.__setattr__(self, "_extras", EXTRAS.get(type(layer).__module__, 0))
        for name, value in layer.items():
            if isinstance(value, nn.Module):
                object.__setattr__(self, name, SimpleNamespace(**_plain(value)))

    def __call__(self, x: Any = None, *_: Any, **named: Any) -> Any:
        h = x if x is not None else named.get("hidden_states", named.get("h"))
        if self._injects:
            h = self._box.given
        if self._captures:
            self._box.taken = h
        return (h, *[None] * self._extras) if self._extras else h


class GroupedMask(nn.Module):
    """The attention of gemma2. Its scores have a fifth dimension, the query groups, which the mask of a batch
    lacks: mlx-lm then fails, or masks the wrong rows where the batch is as large as the heads."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mx.expand_dims(mask, 2)
        return self.attention(x, mask, cache)


class EmbeddingStub(nn.Module):
    """The embedding on a later stage: only its shape and dtype count, for the masks."""

    def __init__(self, box: Box, real: nn.Module | None) -> None:
        super().__init__()
        object.__setattr__(self, "_box", box)
        if real is not None:
            self.real = real

    def __call__(self, _: mx.array) -> mx.array:
        # A fresh array: some forwards scale it in place and would spoil the received one.
        return mx.zeros_like(self._box.given)

    def as_linear(self, x: mx.array) -> mx.array:
        """The tied head, on the last stage."""
        out: mx.array = self.real.as_linear(x) if "real" in self else x
        return out

    @property
    def weight(self) -> mx.array:
        weight: mx.array = self.real.weight
        return weight


class Identity(nn.Module):
    """The head on a stage that is not the last; its result is thrown away unevaluated."""

    def __call__(self, x: mx.array, *_: Any, **__: Any) -> mx.array:
        return x


@dataclass(slots=True)
class Cut:
    """A model cut to layers [start, end): tokens or hidden states in, hidden states or logits out."""

    model: nn.Module
    start: int
    end: int
    layers: int
    box: Box
    prototypes: list[Any]
    """An empty cache for every cache slot of the whole model."""
    slots: list[int]
    """The layer that owns each cache slot, as some families have layers without one; empty when uncut."""
    weights: dict[str, Any] = field(default_factory=dict)
    """What was read of the span, as the loader notes it."""
    _kinds: list[Any] = field(default_factory=list)

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.end == self.layers

    def make_caches(self) -> list[Any]:
        """Fresh caches of one sequence, for the span's own slots."""
        if self.first and self.last:
            return deepcopy(self.prototypes)
        return [
            deepcopy(cache)
            for slot, cache in zip(self.slots, self.prototypes, strict=True)
            if self.start <= slot < self.end
        ]

    def __call__(self, x: mx.array, caches: list[Any]) -> mx.array:
        """Build one forward, lazily.

        x: token ids [B, L] on the first stage, else the neighbour's hidden state [B, L, hidden].
        Returns logits [B, L, vocabulary] on the last stage, else the hidden state [B, L, hidden].
        """
        tokens = x
        if not self.first:
            self.box.given = x
            tokens = mx.zeros(x.shape[:2], mx.int32)
        out: mx.array = self.model(tokens, cache=self.full(caches))
        if not self.last:
            assert self.box.taken is not None
            out = self.box.taken
        self.box.given = self.box.taken = None
        return out

    def full(self, caches: list[Any]) -> list[Any]:
        """The list as long as the whole model's. Forwards make their masks from slots of their choice,
        so every slot outside the span aliases one of the same kind inside it, or else one that at least
        counts the tokens alike: ministral3 scales all its queries by the offset of slot 0."""
        if len(caches) == len(self.prototypes):
            return caches
        if not self._kinds:
            self._kinds = [_kind(cache) for cache in self.prototypes]
        inside = [self.start <= slot < self.end for slot in self.slots]
        own = iter(caches)
        full = [next(own) if mine else None for mine in inside]
        stand_in: dict[Any, Any] = {}
        for kind, cache in zip(self._kinds, full, strict=True):
            if cache is not None:
                stand_in.setdefault(kind, cache)
                stand_in.setdefault(_sort(cache), cache)
        return [
            cache if cache is not None else stand_in.get(kind, stand_in.get(_sort(prototype), prototype))
            for cache, kind, prototype in zip(full, self._kinds, self.prototypes, strict=True)
        ]


def refuse_uncuttable(model_type: str, config: dict[str, Any]) -> None:
    """Raises CannotSplit, naming the family, where a cut would be wrong or was never compared."""
    if _shares(model_type, config.get("text_config") or config):
        raise CannotSplit(
            f"{model_type}: its layers share keys and values or read their own embeddings, so it cannot be "
            "split; serve it with --stages 1"
        )
    if model_type not in CUTTABLE:
        raise CannotSplit(
            f"{model_type}: splitting this family was never checked against the whole model; "
            "serve it with --stages 1"
        )


def _shares(model_type: str, text: dict[str, Any]) -> bool:
    if model_type.startswith("gemma3n"):
        return True
    # Where a gemma 4 config is silent, mlx-lm's default is to share.
    silent = model_type.startswith("gemma4") and not {*SHARING[:2]} <= text.keys()
    return silent or any(text.get(name) for name in SHARING)


def cut_model(model: nn.Module, start: int, end: int, prototypes: list[Any] | None = None) -> Cut:
    """Swap the modules of `model` in place so that only layers [start, end) remain.

    prototypes: an empty cache for every cache slot of the whole model; None: the family's own.

    Raises CannotSplit where the layer list or its caches do not have the usual shape.
    """
    prototypes = make_prompt_cache(model) if prototypes is None else prototypes
    _group_masks(model)
    box = Box()
    count = len(model.layers)
    if start == 0 and end == count:
        return Cut(model, start, end, count, box, prototypes, [])
    owner, name, layers = layer_list(model)
    cut = Cut(model, start, end, count, box, prototypes, _slots(layers, len(prototypes)))
    owner[name] = [
        layer if start <= i < end else Skip(layer, box, injects=i == start - 1, captures=i == end)
        for i, layer in enumerate(layers)
    ]
    heads = list(_heads(model))
    if not cut.first:
        for key, module in list(owner.items()):
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                owner[key] = EmbeddingStub(box, module if cut.last and not heads else None)
    if not cut.last:
        for module, key in heads:
            module[key] = Identity()
    return cut


def _group_masks(model: nn.Module) -> None:
    if type(model).__module__ == "mlx_lm.models.gemma2":
        for layer in model.layers:
            if layer.self_attn.repeats > 1:
                layer.self_attn = GroupedMask(layer.self_attn)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes by which a forward decides something."""
    return {
        name: value
        for name, value in [*vars(module).items(), *module.items()]
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None)))
    }


def layer_list(model: nn.Module) -> tuple[nn.Module, str, list[nn.Module]]:
    """The module that owns the list behind `model.layers` (which may be a copy), its key, the list."""
    wanted = getattr(model, "layers", None)
    for _, module in model.named_modules():
        for key, value in module.items():
            if not (isinstance(value, list) and value and isinstance(value[0], nn.Module)):
                continue
            if wanted is None or (len(value) == len(wanted) and value[0] is wanted[0]):
                return module, key, value
    raise CannotSplit(f"{type(model).__module__}: no list of layers found; serve it with --stages 1")


def _slots(layers: list[nn.Module], caches: int) -> list[int]:
    if caches == len(layers):
        return list(range(caches))
    owning = [i for i, layer in enumerate(layers) if getattr(layer, "block_type", None) in ("M", "*")]
    if len(owning) != caches:
        raise CannotSplit(
            f"{caches} caches for {len(layers)} layers: unknown layout; serve it with --stages 1"
        )
    return owning


def _heads(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for _, module in model.named_modules():
        for key, value in module.items():
            if key in HEADS and isinstance(value, nn.Module):
                yield module, key


def _kind(cache: Any) -> Any:
    """What two caches must share to stand in for each other when masks are made."""
    if isinstance(cache, CacheList):
        return tuple(_kind(part) for part in cache.caches)
    arrays = len(cache.cache) if isinstance(cache, ArraysCache) else None
    return type(cache).__name__.removeprefix("Batch"), getattr(cache, "max_size", None), arrays


def _sort(cache: Any) -> type | None:
    """What two caches must share to agree on how many tokens they hold, and for which rows."""
    return next((sort for sort in (CacheList, ArraysCache) if isinstance(cache, sort)), None)
