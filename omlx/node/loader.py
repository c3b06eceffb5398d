"""Read a span of a model from its folder: only the span's tensors ever leave the disk."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from omlx.errors import BadModel
from omlx.node.kv_bits import quantised_caches
from omlx.node.present import refuse_absent
from omlx.node.slicing import HEADS, Cut, cut_model, refuse_uncuttable

Progress = Callable[[int, int], None]
"""(bytes read, bytes in all)"""

REPORT_BYTES = 64 * 2**20
"""Read between two calls of Progress."""
TURNED_BYTES = 256 * 2**20
"""The largest weight that is turned: for a moment it is in memory twice, and a stage has 300 MB to spare."""
BLOCK_ROWS = 512
"""Turned at a time: a block stays in the processor's cache. An embedding in one piece takes twice as long."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as a stage holds it."""

    array: mx.array
    turned: bool


Held = dict[str, Weight]
"""By the parameter's path in the whole model."""


def held_weights(cut: Cut) -> Held:
    """What another span of the same model need not read again."""
    return dict(cut.weights)


def load_span(
    folder: Path,
    start: int,
    end: int | None,
    progress: Progress,
    kv_bits: int | None = None,
    held: Held | None = None,
) -> Cut:
    """Layers [start, end) of the model in `folder`, evaluated; `end` None means all the rest.

    held: what is in memory already of this model; it is emptied, and what the span has no use for is freed
    before anything is read.

    kv_bits: plain keys and values are kept in so many bits; None: as they are computed.
    Raises BadModel where the folder is not a model that mlx-lm knows, where one parameter of the model has
    no tensor in the files (it would stay random), or where its attention does not read so few bits;
    CannotSplit where it cannot be cut.
    """
    refuse_absent(folder, start, end)
    model, config = _open(folder)
    family = str(config.get("model_type"))
    whole = start == 0 and (end is None or end == len(model.layers))
    if not whole:
        refuse_uncuttable(family, config)
    prototypes = None if kv_bits is None else quantised_caches(model, kv_bits, family)
    cut = cut_model(model, start, len(model.layers) if end is None else end, prototypes)
    _read(cut, _multiplied(cut), progress, {} if held is None else held)
    return cut


def _open(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The whole model with lazy tensors: headers are read, data are not.

    Strict: a parameter without a tensor, or a tensor without a parameter, is an error.
    """
    try:
        model, config = load_model(folder, lazy=True, strict=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        # mlx-lm has no error tree of its own; these are what broken folders were seen to raise.
        raise BadModel(f"{folder}: mlx-lm cannot open this model: {error}") from error
    return model, dict(config)


def _multiplied(cut: Cut) -> dict[str, nn.Module]:
    """The modules whose weight is better turned, by the parameter's path; none where a GPU computes.

    The CPU's BLAS reads a float32 weight [out, in] up to 1.4 times as fast with its columns contiguous, and
    adds in the same order (OpenBLAS with its kernels for AVX2). Not so with a bias: some add it first in the
    one layout and last in the other.
    Half precision is multiplied by MLX's own loops, which lose by it.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        return {}
    modules = dict(cut.model.named_modules())
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,)
    if cut.last and not any(name.rpartition(".")[2] in HEADS for name in modules):
        # Without a head of its own, the model multiplies by its embedding.
        kinds = (nn.Linear, nn.Embedding)
    return {
        f"{name}.weight": module
        for name, module in modules.items()
        if isinstance(module, kinds)
        and "bias" not in module
        and module.weight.dtype == mx.float32
        and module.weight.nbytes <= TURNED_BYTES
    }


def _read(cut: Cut, multiplied: dict[str, nn.Module], progress: Progress, held: Held) -> None:
    """Evaluate every parameter that is left after the cut, one by one; those of `multiplied` turned."""
    flat: Any = tree_flatten(cut.model.parameters())
    # Popped, not iterated: a weight as it was read goes when the turned one takes its place.
    waiting: list[tuple[str, mx.array]] = flat
    waiting.reverse()
    _take_over(cut, waiting, multiplied, held)
    total = sum(array.nbytes for _, array in waiting)
    done = told = 0
    while waiting:
        path, array = waiting.pop()
        done += array.nbytes
        if module := multiplied.get(path):
            array = module.weight = _turned(array)
        mx.eval(array)
        cut.weights[_name(path)] = Weight(array, module is not None)
        if done - told >= REPORT_BYTES or not waiting:
            # MLX keeps the buffers that were read into; they would count as this process's memory.
            mx.clear_cache()
            told = done
            progress(done, total)


def _take_over(
    cut: Cut, waiting: list[tuple[str, mx.array]], multiplied: dict[str, nn.Module], held: Held
) -> None:
    """Put weights that are in memory where the model has lazy ones, and take those out of `waiting`."""
    modules = dict(cut.model.named_modules())
    still = []
    for path, array in waiting:
        weight = held.pop(_name(path), None)
        if weight is None or weight.turned != (path in multiplied):
            still.append((path, array))
            continue
        owner, _, key = path.rpartition(".")
        modules[owner][key] = weight.array
        cut.weights[_name(path)] = weight
    waiting[:] = still
    held.clear()
    mx.clear_cache()


def _name(path: str) -> str:
    """In the whole model: on a later stage the embedding lies one module deeper."""
    return path.replace(".real.", ".")


def _turned(weight: mx.array) -> mx.array:
    """The same values in the same shape [out, in], lazily, with columns contiguous instead of rows."""
    blocks = [weight[row : row + BLOCK_ROWS].T for row in range(0, weight.shape[0], BLOCK_ROWS)]
    return mx.contiguous(mx.concatenate(blocks, axis=1)).T
