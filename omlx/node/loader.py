"""Read a span of a model from its folder: only the span's tensors ever leave the disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from omlx.errors import BadModel
from omlx.node.slicing import Cut, cut_model, refuse_uncuttable

Progress = Callable[[int, int], None]
"""(bytes read, bytes in all)"""


def load_span(folder: Path, start: int, end: int | None, progress: Progress) -> Cut:
    """Layers [start, end) of the model in `folder`, evaluated; `end` None means all the rest.

    Raises BadModel where the folder is not a model that mlx-lm knows, or where one parameter of the
    model has no tensor in the files (it would stay random), CannotSplit where it cannot be cut.
    """
    model, config = _open(folder)
    whole = start == 0 and (end is None or end == len(model.layers))
    if not whole:
        refuse_uncuttable(str(config.get("model_type")), config)
    cut = cut_model(model, start, len(model.layers) if end is None else end)
    _read(cut.model, progress)
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


def _read(model: nn.Module, progress: Progress) -> None:
    """Evaluate every parameter that is left after the cut, a few at a time."""
    flat: Any = tree_flatten(model.parameters())
    parameters: list[mx.array] = [array for _, array in flat]
    total = sum(array.nbytes for array in parameters)
    done = 0
    group: list[mx.array] = []
    for i, array in enumerate(parameters):
        group.append(array)
        if sum(a.nbytes for a in group) >= 64 * 2**20 or i == len(parameters) - 1:
            mx.eval(group)
            done += sum(a.nbytes for a in group)
            group = []
            progress(done, total)
