"""Tokenizers of model folders: what is found in them, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from omlx.errors import BadModel
from omlx.node.text.detokenize import Detokenizer
from omlx.node.text.tokenizer import load_tokenizer
from omlx.node.text.tokenizer_files import read_files, read_vocabulary


@pytest.fixture
def folder(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a small model's text files."""
    for file in tiny("tiny-qwen3").glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **fields: object) -> None:
    value = json.loads(file.read_text()) if file.exists() else {}
    value |= fields
    file.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def sentencepiece(folder: Path) -> Path:
    """A tokenizer as older Llama models have it: it writes a space before a text and drops it after."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "b", "\u2581a", "\u2581b"):
        vocab[piece] = len(vocab)
    merges = [("\u2581", "a"), ("\u2581", "b")]
    fast = Fast(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.save(str(folder / "tokenizer.json"))
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
    )
    return folder


def test_a_dropped_leading_space_is_dropped_once_and_kept_where_the_prompt_goes_on(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    for text in ("a b", " a b", "b\u00e9 a", "  ", "\U0001f600"):
        ids = tokenizer.encode(text, special=False)
        fresh, further = Detokenizer(tokenizer), Detokenizer(tokenizer, continues=True)
        assert "".join(fresh.add(id) for id in ids) == tokenizer.decode(ids) == text
        assert "".join(further.add(id) for id in ids) == " " + text
    assert tokenizer.token_bytes(tokenizer.encode("a", special=False)[0]) == b" a"


def test_end_tokens_come_from_all_three_files(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    change(folder / "generation_config.json", eos_token_id=[0, 5])
    change(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 7})
    assert load_tokenizer(folder).eos_ids == {2, 0, 5, 7}


def test_the_vocabulary_is_as_large_as_the_embedding(folder: Path) -> None:
    assert load_tokenizer(folder).vocab_size == 768
    change(folder / "config.json", vocab_size=None, text_config={"vocab_size": 1024})
    assert load_tokenizer(folder).vocab_size == 1024


def test_thinking_tags_show_in_the_text_even_where_they_are_special(folder: Path) -> None:
    value = json.loads((folder / "tokenizer.json").read_text())
    for token in value["added_tokens"]:
        token["special"] |= token["content"] in ("<think>", "</think>")
    (folder / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(folder)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("<think>a</think>", special=False)
    assert tokenizer.think_ids == (ids[0], ids[-1])
    assert "".join(detokenizer.add(id) for id in ids) == "<think>a</think>"


def test_a_vocabulary_without_thinking_tags_has_no_ids_for_them(tmp_path: Path) -> None:
    assert load_tokenizer(sentencepiece(tmp_path)).think_ids is None


@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "chat_template.json", "named", "named file", "config"]
)
def test_the_chat_template_is_found_in(place: str, folder: Path) -> None:
    template = "T:{{ messages[0]['content'] }}"
    change(folder / "tokenizer_config.json", chat_template=None)
    assert not load_tokenizer(folder).has_template
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": template}]
    match place:
        case "chat_template.jinja":
            (folder / place).write_text(template)
        case "chat_template.json":
            change(folder / place, chat_template=template)
        case "named file":
            change(folder / "chat_template.json", chat_template=named)
        case "named":
            change(folder / "tokenizer_config.json", chat_template=named)
        case "config":
            change(folder / "tokenizer_config.json", chat_template=template)
    assert load_tokenizer(folder).render([{"role": "user", "content": "x"}], {}) == "T:x"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("config.json", "no"),
        ("generation_config.json", '{"eos_token_id": "two"}'),
        ("chat_template.json", '{"chat_template": 5}'),
    ],
)
def test_a_broken_folder_is_refused_with_the_name_of_the_file(
    file: str, content: str | None, folder: Path
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        if file == "chat_template.json":
            change(folder / "tokenizer_config.json", chat_template=None)
        (folder / file).write_text(content)
    with pytest.raises(BadModel, match=str(folder)) as raised:
        load_tokenizer(folder)
    assert file in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there_is_no_name_to_look_up_elsewhere() -> None:
    with pytest.raises(BadModel, match="no such model folder"):
        load_tokenizer(Path("some-org/some-model"))


def test_a_folder_that_brings_its_own_code_is_refused_and_the_code_does_not_run(folder: Path) -> None:
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Own: pass\n")
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", "own.Own"]},
    )
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadModel):
        load_tokenizer(folder)
    assert not (folder / "ran").exists()


def with_class(folder: Path, into: Path, name: str | None) -> Path:
    """A copy of a folder's text files that names another tokenizer class."""
    for file in folder.glob("*.json"):
        if not file.name.startswith("model"):
            shutil.copy(file, into)
    if name is not None:
        change(into / "tokenizer_config.json", tokenizer_class=name)
    return into


TEXTS = (
    *(
        "Hello, world",
        " two  spaces\n\n\tand a tab",
        "I'm CAN'T 12345.67",
        "été 日本語 \U0001f468\u200d\U0001f467",
    ),
    *("<|im_start|>user\nhi<|im_end|>\n", "<bos>a<eos>", "<think>a</think>", " ", "", "<|endoftext|><pad>"),
)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", None),
        ("smollm2", "GPT2TokenizerFast"),
        ("smollm2", "LlamaTokenizerFast"),
        ("gemma", None),
        ("gemma", "GemmaTokenizer"),
        ("gemma", "LlamaTokenizerFast"),
        ("tiny-qwen3", None),
    ],
)
def test_ids_text_and_prompts_are_those_of_transformers(
    model: str, name: str | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    named = model in ("smollm2", "gemma")
    original = request.getfixturevalue(model) if named else request.getfixturevalue("tiny")(model)
    folder = with_class(original, tmp_path, name)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special, verbose=False)
            assert ours.encode(text, special=special) == ids
            clean = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == clean
    assert set(theirs.all_special_ids) - set(ours.think_ids or ()) <= ours.skipped
    assert theirs.eos_token_id in ours.eos_ids
    turns = [{"role": role, "content": f"{role} é\n"} for role in ("system", "user", "assistant", "user")]
    wanted = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert ours.render(turns, {}) == wanted


def test_tokens_that_only_the_config_adds_are_there(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            "768": {"content": "<tool>", "special": False},
            "769": {"content": "<end>", "special": True},
        },
        eos_token={"content": "<end>", "special": True},
        extra_special_tokens={"image_token": "<image>"},
        chat_template="{{ image_token }}{{ eos_token }}",
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool><end><image>", special=False) == [768, 769, 770]
    assert tokenizer.decode([768, 769, 770]) == "<tool>"
    assert 769 in tokenizer.eos_ids
    assert tokenizer.render([], {}) == "<image><end>"


def test_a_byte_level_file_is_taken_as_it_stands_whatever_class_it_names(
    smollm2: Path, gemma: Path, tmp_path: Path
) -> None:
    """A class may have rules of its own; the file is what the model was trained with."""
    folder = with_class(smollm2, tmp_path, "Qwen2Tokenizer")
    assert load_tokenizer(folder).encode("12 34", special=False) == load_tokenizer(smollm2).encode(
        "12 34", special=False
    )
    assert read_vocabulary(read_files(folder)) is not None
    assert read_vocabulary(read_files(with_class(gemma, tmp_path, "GemmaTokenizer"))) is None
