"""A machine that is lost again and again is waited for longer, and one that was well for a while is not."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster.doubt import DOUBTED_S, FORGIVEN_AFTER_S, MOST_DOUBTED_S, Doubt


def test_one_occasion_counts_once_however_many_complain_of_it() -> None:
    doubt = Doubt(0.0).again(0.1).again(5.0).again(19.9)
    assert doubt.seconds == DOUBTED_S
    assert doubt.holds(34.8) and not doubt.holds(35.0)


def test_each_further_loss_doubles_it_to_a_limit() -> None:
    doubt, lasted = Doubt(0.0), [DOUBTED_S]
    for _ in range(6):
        doubt = doubt.again(doubt.since + doubt.seconds + 1.0)
        lasted.append(doubt.seconds)
    assert lasted == [15.0, 30.0, 60.0, 120.0, 240.0, 240.0, 240.0]


def test_a_loss_long_after_the_last_one_is_the_first_one() -> None:
    doubt = Doubt(0.0).again(DOUBTED_S + 1.0)
    assert doubt.seconds == 2 * DOUBTED_S
    assert doubt.again(doubt.since + doubt.seconds + FORGIVEN_AFTER_S).seconds == DOUBTED_S


@given(st.lists(st.floats(0.0, 2000.0), max_size=30))
def test_whatever_happens_it_ends_and_is_never_shorter_than_the_first(pauses: list[float]) -> None:
    doubt = Doubt(0.0)
    for now in accumulate(pauses):
        doubt = doubt.again(now)
        assert DOUBTED_S <= doubt.seconds <= MOST_DOUBTED_S
        assert doubt.holds(now) and not doubt.holds(now + MOST_DOUBTED_S)
