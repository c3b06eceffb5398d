"""The tiny models do what other tests count on."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from tests.models.tiny import TINY, build_tiny


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_loads_and_different_prompts_get_different_answers(
    tiny: Callable[[str], Path], name: str
) -> None:
    model, tokenizer = mlx_lm.load(str(tiny(name)))
    prompts = ("Hello world", "The quick brown fox", "Once upon a time there")
    answers = {
        tuple(tokenizer.encode(mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)))
        for prompt in prompts
    }
    assert len(answers) == len(prompts)
    assert len({token for answer in answers for token in answer}) > 8


def test_building_twice_gives_the_same_bytes(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    first = tiny("tiny-qwen3-moe")
    again = build_tiny("tiny-qwen3-moe", tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in again.iterdir()}
    for file in again.iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes(), file.name


def test_the_quantised_variant_holds_packed_words_and_float32_scales(tiny: Callable[[str], Path]) -> None:
    weights = mx.load(str(tiny("tiny-llama-4bit") / "model.safetensors"))
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    assert weights["model.layers.0.mlp.up_proj.scales"].dtype == mx.float32
    assert weights["lm_head.weight"].dtype == mx.uint32


def test_the_tied_variant_has_no_head_of_its_own(tiny: Callable[[str], Path]) -> None:
    tied = mx.load(str(tiny("tiny-llama-tied") / "model.safetensors"))
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in mx.load(str(tiny("tiny-llama") / "model.safetensors"))


def test_an_unknown_tiny_model_is_told_the_known_ones(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(LookupError, match="tiny-gpt-oss"):
        tiny("tiny-nothing")
