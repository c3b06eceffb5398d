"""Llamas with random weights that are no wider than a bench needs, built on first use."""

from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.models import llama

from omlx.demo.cache import build_whole, default_cache
from tests.models.tiny import COMMON, LLAMA, recipe, save_weights
from tests.models.tokenizer import write_json

VOCABULARY = 500
"""Ids below this are in it."""


def narrow_llama(name: str, shape: dict[str, Any]) -> Path:
    """The folder of a model with these fields of its config beside the tiny llama's own."""

    def make(beside: Path) -> None:
        config = COMMON | LLAMA | shape
        model = llama.Model(llama.ModelArgs.from_dict(config))
        save_weights(beside, dict(tree_flatten(model.parameters())))
        write_json(beside / "config.json", config)

    return build_whole(default_cache() / "tests" / name, f"{recipe()} {shape}", make)
