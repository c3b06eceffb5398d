"""Text out of token ids, one at a time, with the tokenizers of real models."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.node.text.detokenize import Detokenizer
from omlx.node.text.tokenizer import Tokenizer, load_tokenizer

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
MIXED = f"hi\U0001f600\ud55c\uad6d{FAMILY}\u00e9"
NAMES = ["smollm2", "gemma", "tiny-llama"]

_LOADED: dict[str, Tokenizer] = {}


@pytest.fixture(scope="session", autouse=True)
def loaded(smollm2: Path, gemma: Path, tiny: Callable[[str], Path]) -> None:
    folders = {"smollm2": smollm2, "gemma": gemma, "tiny-llama": tiny("tiny-llama")}
    _LOADED.update({name: load_tokenizer(folder) for name, folder in folders.items()})


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(id) for id in ids), detokenizer.finish()]


def in_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text as single byte tokens."""
    single = {tokenizer.token_bytes(id): id for id in range(1000)}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(max_size=40))
def test_joined_deltas_equal_the_text_decoded_at_once(name: str, text: str) -> None:
    tokenizer = _LOADED[name]
    ids = tokenizer.encode(text, special=False)
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["smollm2", "tiny-llama"])
@given(data=st.data())
def test_any_ids_of_a_byte_level_tokenizer_give_the_text_decoded_at_once(
    name: str, data: st.DataObject
) -> None:
    tokenizer = _LOADED[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@given(data=st.data())
def test_any_ids_with_well_formed_bytes_of_a_byte_fallback_tokenizer_do_too(data: st.DataObject) -> None:
    tokenizer = _LOADED["gemma"]
    some = (
        st.integers(0, tokenizer.vocab_size - 1).filter(lambda id: not 238 <= id < 494).map(lambda id: [id])
    )
    spelled = st.text(min_size=1, max_size=4).map(lambda text: in_bytes(tokenizer, text))
    ids = [id for run in data.draw(st.lists(some | spelled, max_size=12)) for id in run]
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)


@given(run=st.binary(max_size=12))
def test_ill_formed_bytes_hurt_no_neighbour(run: bytes) -> None:
    tokenizer = _LOADED["gemma"]
    start = in_bytes(tokenizer, "a")[0] - ord("a")
    around = tokenizer.encode("hi", special=False)
    ids = [*around, *(start + byte for byte in run), *around]
    assert "".join(deltas(tokenizer, ids)) == "hi" + run.decode(errors="replace") + "hi"


@pytest.mark.parametrize("name", NAMES)
def test_no_delta_holds_half_a_character_and_plain_text_is_not_delayed(name: str) -> None:
    tokenizer = _LOADED[name]
    ids = [*tokenizer.encode("so ", special=False), *in_bytes(tokenizer, MIXED)]
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == "so " + MIXED
    assert all("\ufffd" not in part for part in parts)
    characters = [part for part in parts[-1 - len(MIXED.encode()) :] if part]
    assert characters == list(MIXED)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_do_not_disturb_each_other(name: str) -> None:
    tokenizer = _LOADED[name]
    ids = in_bytes(tokenizer, MIXED)
    rows = [Detokenizer(tokenizer) for _ in range(8)]
    texts = [""] * 8
    for step in range(len(ids) + 8):
        for n, row in enumerate(rows):
            if 0 <= step - n < len(ids):
                texts[n] += row.add(ids[step - n])
    assert texts == [MIXED] * 8


@pytest.mark.parametrize("name", NAMES)
def test_an_unfinished_tail_gives_one_replacement_character(name: str) -> None:
    tokenizer = _LOADED[name]
    for size in (1, 2, 3):
        ids = in_bytes(tokenizer, "\u00e9\U0001f600")[: 2 + size]
        assert deltas(tokenizer, ids)[-1] == "\ufffd"
        assert "".join(deltas(tokenizer, ids)) == "\u00e9\ufffd"


@pytest.mark.parametrize("name", NAMES)
def test_a_real_replacement_character_is_neither_lost_nor_held_back(name: str) -> None:
    tokenizer = _LOADED[name]
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a\ufffd", special=False)
    assert "".join(detokenizer.add(id) for id in ids) == "a\ufffd"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_left_out_of_the_text_but_have_bytes(name: str) -> None:
    tokenizer = _LOADED[name]
    end = min(tokenizer.eos_ids)
    ids = tokenizer.encode("a b", special=False)
    assert "".join(deltas(tokenizer, [ids[0], end, *ids[1:], end])) == "a b"
    assert tokenizer.token_bytes(end).startswith(b"<")
    assert tokenizer.token_bytes(10**8) == b""


@pytest.mark.parametrize("name", NAMES)
def test_token_bytes_joined_are_the_text_in_utf8(name: str) -> None:
    tokenizer = _LOADED[name]
    ids = tokenizer.encode(MIXED + " and  two", special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == (MIXED + " and  two").encode()
