"""Keys and values in 8 or 4 bits: the caches that a model then begins with, or why it cannot.

Attention that goes through mlx-lm's own function reads mlx-lm's QuantizedKVCache; attention with sinks, with
a latent or with code of its own does not. Which is which no config says: it is tried.
"""

from copy import deepcopy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from omlx.errors import BadModel
from omlx.node.kv_bytes import GROUPS, group_size

TRIED = (2, 1)
"""Tokens of the forwards that are tried: a chunk, and one token behind it."""


def quantised_caches(model: nn.Module, bits: int, family: str) -> list[Any]:
    """An empty cache for every cache slot of the whole, uncut `model`: of `bits` bits where its own would
    keep plain keys and values of every token, else its own.

    Forwards are built and never computed, so weights that were not read stay so.
    Raises BadModel, which names the family, where its attention cannot read such a cache, or where its heads
    have a size that cannot be cut into groups.
    """
    own = make_prompt_cache(model)
    filled = deepcopy(own)
    try:
        _build(model, filled, TRIED[0])
        quantised = [_quantised(*pair, bits) for pair in zip(own, filled, strict=True)]
        trial = deepcopy(quantised)
        for tokens in TRIED:
            _build(model, trial, tokens)
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
        # What families raise that expect arrays where a quantised cache gives tuples of them.
        why = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise BadModel(f"{family} cannot run with --kv-bits {bits} ({why}); leave it out") from error
    return quantised


def _build(model: nn.Module, caches: list[Any], tokens: int) -> None:
    model(mx.zeros((1, tokens), mx.int32), cache=caches)


def _quantised(own: Any, filled: Any, bits: int) -> Any:
    """`own`, which is empty, or what stands for it; `filled` is the same cache with some tokens in it."""
    if isinstance(own, CacheList):
        pairs = zip(own.caches, filled.caches, strict=True)
        return CacheList(*(_quantised(*pair, bits) for pair in pairs))
    if type(own) is not KVCache:
        return own
    widths = filled.keys.shape[-1], filled.values.shape[-1]
    group = group_size(*widths)
    if group is None:
        raise ValueError(f"heads of {max(widths)} numbers, which are no multiple of {GROUPS[-1]}")
    return QuantizedKVCache(group, bits)
