"""A node's budget beside other programs: what comes and goes changes nothing, what stays does."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster.headroom import (
    GROW_AFTER_S,
    RESERVE,
    SHRINK_AFTER_S,
    Headroom,
    MemorySample,
    begin,
    follow,
)

GB = 10**9
ROLE = 50 * GB
FREE = 60 * GB
"""Enough for all of the role's bytes."""


def bears(budget: int) -> int:
    """Free bytes that let our stages hold so many."""
    return budget + int(ROLE * RESERVE)


def through(headroom: Headroom, free: Iterable[int], every_s: float = 5.0, held: int = 0) -> list[Headroom]:
    found = []
    for bytes_ in free:
        headroom = follow(headroom, MemorySample(headroom.seen_s + every_s, bytes_, held))
        found.append(headroom)
    return found


def idle() -> Headroom:
    return begin(ROLE, MemorySample(0.0, FREE, 0))


def test_a_node_that_nobody_else_uses_gives_its_roles_share_and_no_more() -> None:
    assert idle().budget_bytes == ROLE
    assert through(idle(), [FREE] * 100)[-1].budget_bytes == ROLE


def test_what_others_hold_at_the_first_look_is_theirs() -> None:
    assert begin(ROLE, MemorySample(0.0, bears(20 * GB), 0)).budget_bytes == 20 * GB


def test_what_our_own_stages_take_does_not_shrink_the_budget() -> None:
    headroom = idle()
    for held in range(0, 50, 5):
        sample = MemorySample(headroom.seen_s + 20, FREE - held * GB, held * GB)
        headroom = follow(headroom, sample)
    assert headroom.budget_bytes == ROLE


def test_a_dip_of_less_than_half_a_minute_changes_nothing() -> None:
    dips = ([bears(10 * GB)] * 6 + [FREE]) * 20
    assert {one.budget_bytes for one in through(idle(), dips)} == {ROLE}


def test_what_others_hold_for_half_a_minute_is_given_up_as_far_as_they_held_it_all_the_time() -> None:
    found = through(idle(), [bears(30 * GB), bears(20 * GB), bears(40 * GB)] * 3)
    assert [one.budget_bytes for one in found[:6]] == [ROLE] * 6
    assert found[6].budget_bytes == 40 * GB
    assert found[6].seen_s - found[0].seen_s == SHRINK_AFTER_S


def test_what_becomes_free_is_used_after_five_minutes_and_a_peak_does_not_count() -> None:
    small = begin(ROLE, MemorySample(0.0, bears(20 * GB), 0))
    found = through(small, [bears(40 * GB), bears(30 * GB)] * 40)
    grown = next(one for one in found if one.budget_bytes != 20 * GB)
    assert grown.budget_bytes == 30 * GB
    assert grown.seen_s - found[0].seen_s == GROW_AFTER_S
    interrupted = ([bears(40 * GB)] * 50 + [bears(20 * GB)]) * 3
    assert {one.budget_bytes for one in through(small, interrupted)} == {20 * GB}


def test_a_change_of_less_than_a_twentieth_is_none() -> None:
    assert {one.budget_bytes for one in through(idle(), [bears(48 * GB)] * 100)} == {ROLE}


def test_all_of_the_roles_bytes_come_back_even_by_a_small_step() -> None:
    nearly = begin(ROLE, MemorySample(0.0, bears(49 * GB), 0))
    assert through(nearly, [FREE] * 70)[-1].budget_bytes == ROLE


def test_after_a_silence_waiting_starts_anew() -> None:
    low = [bears(10 * GB)]
    begun = through(idle(), low * 5)[-1]
    assert begun.less is not None
    silent = follow(begun, MemorySample(begun.seen_s + 1000, bears(10 * GB), 0))
    assert silent.budget_bytes == ROLE
    assert through(silent, low * 6)[-1].budget_bytes == 10 * GB


def test_a_clock_that_went_back_starts_waiting_anew() -> None:
    begun = through(idle(), [bears(10 * GB)] * 6)[-1]
    back = follow(begun, MemorySample(1.0, bears(10 * GB), 0))
    assert back.budget_bytes == ROLE
    assert back.less is not None and back.less.since_s == 1.0


@given(
    free=st.lists(st.integers(0, 80), min_size=1, max_size=120),
    every_s=st.sampled_from([1.0, 5.0, 20.0, 29.0]),
)
def test_budgets_stay_in_their_bounds_and_never_change_twice_within_half_a_minute(
    free: list[int], every_s: float
) -> None:
    before, changed_s = idle(), 0.0
    for found in through(idle(), [amount * GB for amount in free], every_s):
        assert 1 <= found.budget_bytes <= ROLE
        if found.budget_bytes != before.budget_bytes:
            apart = abs(found.budget_bytes - before.budget_bytes)
            assert apart >= before.step_bytes or found.budget_bytes == ROLE
            assert found.seen_s - changed_s >= SHRINK_AFTER_S
            changed_s = found.seen_s
        before = found


@given(noise=st.lists(st.floats(-0.02, 0.02), min_size=50, max_size=150))
def test_noise_in_free_memory_never_moves_the_budget(noise: list[float]) -> None:
    start = begin(ROLE, MemorySample(0.0, bears(30 * GB), 0))
    found = through(start, [bears(int(30 * GB * (1 + off))) for off in noise])
    assert {one.budget_bytes for one in found} == {start.budget_bytes}
