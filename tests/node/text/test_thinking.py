"""Reasoning and answer, told apart in every chunking."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omlx.node.text.thinking import ThinkSplitter, leaves_open

PIECES = st.sampled_from(["<think>", "</think>", "\n", "\n\n", " ", "a", "<", "</", "think>", "b c", "\r\n"])


def split(chunks: list[str], inside: bool = False) -> tuple[str, str]:
    splitter = ThinkSplitter("<think>", "</think>", inside)
    parts = [splitter.feed(chunk) for chunk in chunks]
    parts.append(splitter.finish())
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


def expected(text: str, inside: bool) -> tuple[str, str]:
    """The rule over the whole text at once."""
    text = "<think>" + text if inside else text
    reasoning, closed = "", False
    while opened := re.match(r"\s*<think>[\r\n]*", text):
        block = re.match(r"(.*?)[\r\n]*</think>", text[opened.end() :], re.DOTALL)
        if block is None:
            return reasoning + text[opened.end() :], ""
        reasoning += block[1]
        text = text[opened.end() + block.end() :]
        closed = True
    return reasoning, text.lstrip("\r\n") if closed else text


@given(st.lists(PIECES, max_size=12).map("".join), st.lists(st.integers(0, 60), max_size=6), st.booleans())
@example("<think>\n\n</think>\n\nHello", [], False)
@example("<think>a\n</think>\n\n<think>\nb", [10], False)
def test_every_chunking_gives_the_same_parts(text: str, cuts: list[int], inside: bool) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts})
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(chunks, inside) == expected(text, inside)
    assert split(list(text), inside) == expected(text, inside)


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nhm\n</think>\n\nHello", False, ("hm", "Hello")),
        ("hm\n</think>\n\nHello", True, ("hm", "Hello")),
        ("\n<think>\n\n</think>\n\nHello\n", False, ("", "Hello\n")),
        ("Hello", False, ("", "Hello")),
        ("\n Hello", False, ("", "\n Hello")),
        ("Use <think> and </think>.", False, ("", "Use <think> and </think>.")),
        ("<think>a</think>Write </think> so", False, ("a", "Write </think> so")),
        ("<think>never closed\n", False, ("never closed\n", "")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<thin", False, ("", "<thin")),
        ("<think>one\n\ntwo</think> three", False, ("one\n\ntwo", " three")),
    ],
)
def test_parts_of(text: str, inside: bool, parts: tuple[str, str]) -> None:
    assert split([text], inside) == parts


def test_only_what_may_be_a_tag_waits() -> None:
    splitter = ThinkSplitter("<think>", "</think>", inside=False)
    assert splitter.feed("<thi") == ("", "")
    assert splitter.feed("nk>so I") == ("so I", "")
    assert splitter.inside
    assert splitter.feed(" think <") == (" think ", "")
    assert splitter.feed("b></") == ("<b>", "")
    assert splitter.feed("think>") == ("", "")
    assert not splitter.inside
    assert splitter.feed("\nYes <") == ("", "Yes <")
    assert splitter.finish() == ("", "")


def test_a_prompt_opens_the_reasoning_only_with_its_last_word() -> None:
    assert leaves_open("<|im_start|>assistant\n<think>\n")
    assert leaves_open("<think>x</think><think>")
    assert not leaves_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not leaves_open("about <think> tags<|im_end|>assistant\n")
