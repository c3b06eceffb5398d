"""Writes the files of an MLX model folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `import omlx.demo` must stay cheap: only building needs arrays
    import mlx.core as mx


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(folder: Path, weights: "dict[str, mx.array]") -> None:
    """One safetensors file with its index, as mlx-lm writes them."""
    import mlx.core as mx  # see above

    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
        "weight_map": {name: "model.safetensors" for name in sorted(weights)},
    }
    write_json(folder / "model.safetensors.index.json", index)
