"""Prompts that begin alike: one is computed, the others wait for what it keeps; nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from omlx.ids import SeqId
from omlx.node.following import LEAST_SHARED, leader, shared, waits
from omlx.node.sequence import Request, Sequence
from omlx.node.step import SamplingParams

STEP = 256


def sequence(id: int, tokens: list[int], computed: int = 0) -> Sequence:
    request = Request(tuple(tokens), SamplingParams(), 8, frozenset())
    return Sequence(SeqId(id), request, tokens=list(tokens), issued=computed, computed=computed)


COMMON = list(range(2000))


def test_a_prompt_waits_for_the_one_that_computes_what_it_begins_with() -> None:
    elder, younger = sequence(0, COMMON), sequence(1, [*COMMON[:1500], 7, 7])
    assert leader(younger, [elder, younger], STEP) == (elder.id, 1280)


def test_what_is_known_already_or_too_short_is_not_waited_for() -> None:
    elder, younger = sequence(0, COMMON), sequence(1, [*COMMON[:1500], 7, 7])
    younger.restore_end = 1280 - LEAST_SHARED + 1
    assert leader(younger, [elder], STEP) is None
    assert leader(sequence(2, COMMON[: LEAST_SHARED - 1]), [elder], STEP) is None
    assert leader(sequence(3, COMMON), [elder], 0) is None, "nothing is kept"


def test_nobody_follows_a_follower_or_one_whose_prompt_is_done() -> None:
    elder, second, third = (sequence(id, COMMON) for id in range(3))
    second.follows = leader(second, [elder], STEP)
    assert leader(third, [second], STEP) is None
    assert leader(third, [elder, second], STEP) == (elder.id, 1792)
    done = sequence(4, COMMON, computed=len(COMMON) - 1)
    assert leader(third, [done], STEP) is None


def test_waiting_ends_when_it_is_computed_and_when_the_elder_leaves() -> None:
    elder, younger = sequence(0, COMMON), sequence(1, COMMON)
    younger.follows = leader(younger, [elder], STEP)
    assert waits(younger, {elder.id: elder})
    elder.computed = 1792
    assert not waits(younger, {elder.id: elder})
    younger.follows = (elder.id, 1792)
    assert not waits(younger, {}), "it was cancelled"
    assert younger.follows is None


def test_a_suspect_that_runs_alone_waits_for_nobody() -> None:
    elder, younger = sequence(0, COMMON), sequence(1, COMMON)
    younger.follows = (elder.id, 1792)
    younger.alone_until = younger.known + 1
    assert not waits(younger, {elder.id: elder})


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_shared_counts_the_first_tokens_that_are_the_same(one: list[int], other: list[int]) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert shared(one, other) == expected
