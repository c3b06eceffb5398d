"""Stop strings in every chunking."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.node.text.stops import StopMatcher

TEXT = "alpha beta gamma delta"


def through(stops: tuple[str, ...], chunks: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    sent = ""
    for chunk in chunks:
        sent += matcher.feed(chunk)
        if matcher.stopped:
            return sent, True
    return sent + matcher.finish(), matcher.stopped


def expected(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


@st.composite
def chunked(draw: st.DrawFn, text: st.SearchStrategy[str]) -> list[str]:
    whole = draw(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@pytest.mark.parametrize(
    "stops",
    [
        ("beta gamma", "gamma del"),
        ("gamma del", "beta gamma"),
        ("eta", "beta gamma"),
        ("g",),
        ("delta",),
        ("alpha",),
        ("beta gamm!",),
        ("a del", "mma d"),
    ],
)
def test_the_earliest_match_ends_the_text_whatever_the_chunks(stops: tuple[str, ...]) -> None:
    places = range(1, len(TEXT))
    for cuts in [c for size in (0, 1, 2) for c in combinations(places, size)] + [tuple(places)]:
        chunks = [TEXT[a:b] for a, b in zip((0, *cuts), (*cuts, len(TEXT)), strict=True)]
        assert through(stops, chunks) == expected(stops, TEXT)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    chunked(st.text("abc", max_size=24)),
)
def test_repeating_texts_and_overlapping_stops_follow_the_same_rule(
    stops: tuple[str, ...], chunks: list[str]
) -> None:
    assert through(stops, chunks) == expected(stops, "".join(chunks))


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
    chunked(st.text("abc", max_size=24)),
)
def test_only_what_may_begin_a_stop_is_held_back(stops: tuple[str, ...], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent, text = "", ""
    for chunk in chunks:
        text += chunk
        sent += matcher.feed(chunk)
        if matcher.stopped:
            break
        held = text[len(sent) :]
        assert not held or any(stop.startswith(held[: len(stop)]) for stop in stops)


def test_a_near_miss_is_released_at_once_and_a_partial_tail_at_the_end() -> None:
    matcher = StopMatcher(("beta gamma",))
    assert matcher.feed("alpha beta gamm") == "alpha "
    assert matcher.feed("! be") == "beta gamm! "
    assert matcher.finish() == "be"
    assert not matcher.stopped


def test_a_short_stop_inside_a_longer_one_counts_when_the_longer_one_does_not_come() -> None:
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.feed("xabc") == "x"
    assert not matcher.stopped
    assert matcher.feed("e") == "a"
    assert matcher.stopped

    at_the_end = StopMatcher(("abcd", "bc"))
    assert at_the_end.feed("xabc") + at_the_end.finish() == "xa"
    assert at_the_end.stopped


def test_after_a_stop_nothing_comes_out() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("one END two") == "one "
    assert matcher.feed("three") == ""
    assert matcher.finish() == ""


def test_without_stops_the_text_passes_untouched() -> None:
    matcher = StopMatcher(())
    text = "as it is"
    assert matcher.feed(text) is text
    assert matcher.finish() == ""
    assert not matcher.stopped
