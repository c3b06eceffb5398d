"""How the loader lays weights out in memory, and that nobody can tell by the results."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from omlx.node import loader
from omlx.node.loader import held_weights, load_span
from tests.models.tiny import FAMILIES

Tiny = Callable[[str], Path]
SHAPES = ((1, 1), (4, 1), (1, 17))


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Where MLX would compute on a GPU, too."""
    device = mx.default_device()
    mx.set_default_device(mx.Device(mx.DeviceType.cpu))
    yield
    mx.set_default_device(device)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


def turned(model: nn.Module) -> set[str]:
    """The paths of the parameters whose columns are contiguous, and not their rows."""
    found = parameters(model).items()
    arrays = [(path, np.asarray(array)) for path, array in found if array.dtype == mx.float32]
    return {path for path, array in arrays if array.flags.f_contiguous and not array.flags.c_contiguous}


def products(model: nn.Module) -> set[str]:
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "bias" not in module
    }


@pytest.mark.usefixtures("on_cpu")
def test_on_a_cpu_what_is_multiplied_by_is_turned_and_what_is_looked_up_is_not(tiny: Tiny) -> None:
    model = load_span(tiny("tiny-llama"), 0, None, silent).model
    assert len(products(model)) == 4 * 7 + 1
    assert turned(model) == products(model)


@pytest.mark.usefixtures("on_cpu")
def test_an_embedding_is_turned_where_it_is_the_head_too(tiny: Tiny) -> None:
    folder = tiny("tiny-llama-tied")
    model = load_span(folder, 0, None, silent).model
    assert turned(model) == products(model) | {"model.embed_tokens.weight"}
    first, last = load_span(folder, 0, 2, silent).model, load_span(folder, 2, None, silent).model
    assert turned(first) == products(first)
    assert turned(last) == products(last) | {"model.embed_tokens.real.weight"}


@pytest.mark.usefixtures("on_cpu")
def test_a_weight_with_a_bias_stays_as_it_is_filed(tiny: Tiny) -> None:
    """Attention and routers of gpt-oss have biases; what is left is its head."""
    assert turned(load_span(tiny("tiny-gpt-oss"), 0, None, silent).model) == {"lm_head.weight"}


@pytest.mark.usefixtures("on_cpu")
def test_a_weight_too_large_to_be_in_memory_twice_stays_as_it_is_filed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "TURNED_BYTES", 64 * 128 * 4)
    model = load_span(tiny("tiny-llama"), 0, None, silent).model
    assert turned(model) == products(model) - {"lm_head.weight"}


@pytest.mark.usefixtures("on_cpu")
def test_quantised_weights_stay_as_they_are_filed(tiny: Tiny) -> None:
    assert turned(load_span(tiny("tiny-llama-4bit"), 0, None, silent).model) == set()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_stays_as_it_is_filed(dtype: mx.Dtype, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tiny-llama")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {name: array.astype(dtype) for name, array in weights.items()}
    )
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = load_span(tmp_path, 0, None, silent).model
    for path in products(model):
        weight = parameters(model)[path]
        assert weight.dtype == dtype
        strides = np.asarray(weight.view(mx.uint16)).strides
        assert strides == (2 * weight.shape[1], 2), path


def test_where_a_gpu_computes_nothing_is_turned(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.gpu))
    assert turned(load_span(tiny("tiny-llama-tied"), 0, None, silent).model) == set()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", [*FAMILIES, "tiny-llama-tied", "tiny-llama-4bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_bit_equal_with_those_of_weights_as_filed(
    shape: tuple[int, int], name: str, tiny: Tiny
) -> None:
    tokens = mx.arange(20, 20 + shape[0] * shape[1]).reshape(shape)
    cut = load_span(tiny(name), 0, None, silent)
    filed, _ = load_model(tiny(name))
    assert mx.array_equal(cut(tokens, cut.make_caches()), filed(tokens, cache=cut.make_caches())).item()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1500])
def test_turning_block_by_block_changes_no_value(rows: int) -> None:
    weight = mx.random.normal((rows, 24), key=mx.random.key(rows))
    found = loader._turned(weight)
    assert found.shape == weight.shape
    assert mx.array_equal(found, weight).item()


@pytest.mark.usefixtures("on_cpu")
def test_what_was_read_before_it_was_turned_is_given_back(smollm2: Path) -> None:
    """The peak is the model and one tensor, of which the embedding is the largest and the first."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cut = load_span(smollm2, 0, None, silent)
    sizes = [array.nbytes for array in parameters(cut.model).values()]
    assert mx.get_active_memory() - before < 1.06 * sum(sizes)
    assert mx.get_peak_memory() - before < 1.06 * sum(sizes) + max(sizes)
    assert mx.get_cache_memory() == 0


SPANS = [((0, 2), (0, 4)), ((0, 2), (1, 4)), ((2, 4), (0, 4)), ((0, 4), (1, 2)), ((1, 3), (1, 3))]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied", "tiny-gpt-oss", "tiny-qwen3-next"])
@pytest.mark.parametrize(("first", "second"), SPANS)
def test_a_span_beside_another_reads_only_what_is_missing_and_is_the_same(
    name: str, first: tuple[int, int], second: tuple[int, int], tiny: Tiny
) -> None:
    folder = tiny(name)
    read: list[int] = []
    held = held_weights(load_span(folder, *first, silent))
    had = set(held)
    cut = load_span(folder, *second, lambda done, total: read.append(done), held=held)
    assert not held, "what nobody needs is freed"
    plain = load_span(folder, *second, silent)
    wanted, found = parameters(plain.model), parameters(cut.model)
    assert wanted.keys() == found.keys() and set(cut.weights) == set(plain.weights)
    assert turned(cut.model) == turned(plain.model)
    for path, array in wanted.items():
        assert mx.array_equal(array, found[path]).item(), path
    missing = sum(weight.array.nbytes for path, weight in plain.weights.items() if path not in had)
    # An embedding that is looked up is filed otherwise than one that is multiplied by.
    moved = sum(
        weight.array.nbytes
        for path, weight in plain.weights.items()
        if path in had and "embed" in path and first[0] == 0 and first[1] < 4
    )
    assert missing <= max(read, default=0) <= missing + moved
