"""How fast a machine computes: a small model timed, where no figures of its chip are known.

A process of its own (`python -m omlx.node.gauge`), which prints a line of JSON and takes some seconds on a
slow processor. The model has two layers shaped like those of Llama 3.2 1B, so that what a launch costs is in
its figures as it is in a real model's.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 2, 2048, 8192, 32, 8
VOCABULARY = 256
"""Next to nothing: a layer is what is timed."""
CHUNK_TOKENS = 128
STEPS = 4
TRIES = 3


@dataclass(frozen=True, slots=True)
class Gauged:
    """What decoding and a prompt's chunk get done here."""

    bandwidth: float
    """Bytes of weights read in a second."""
    compute: float
    """Floating-point operations in a second."""


def gauge() -> Gauged:
    """The best of TRIES on the default device, in bfloat16; on a processor, slow at that, in float32.

    Takes 244 MB, or twice that, for as long as it runs.
    """
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=INTERMEDIATE,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
        )
    )
    dtype = mx.bfloat16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32
    # Small numbers, that nothing overflows or becomes denormal: what they are does not matter.
    model.update(tree_map(lambda array: mx.full(array.shape, 0.01, dtype), model.parameters()))
    weights = tuple(dict(tree_flatten(model.layers)).values())
    mx.eval(model.parameters())
    read = sum(array.nbytes for array in weights)
    flop = 2 * sum(array.size for array in weights) * CHUNK_TOKENS
    return Gauged(read * STEPS / _seconds(lambda: _decode(model)), flop / _seconds(lambda: _chunk(model)))


def _decode(model: llama.Model) -> mx.array:
    """STEPS tokens, each made of the one before."""
    cache, token = model.make_cache(), mx.array([[1]])
    for _ in range(STEPS):
        token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(token)
    return token


def _chunk(model: llama.Model) -> mx.array:
    logits: mx.array = model(mx.ones((1, CHUNK_TOKENS), mx.int32))
    return logits


def _seconds(work: Callable[[], mx.array]) -> float:
    """Of the quickest, for the machine may do other things meanwhile; the first is not counted: kernels are
    made ready in it."""
    mx.eval(work())
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(asdict(gauge())))
