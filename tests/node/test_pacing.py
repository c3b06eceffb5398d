"""Groups and chunk sizes from costs: literal cases, and every choice against all the others."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.node.costs import StageCost
from omlx.node.pacing import GAIN, HOP_S, LEAST_CHUNK, MANY, MOST_CHUNKS, Pace, pace_of

ALL_ROWS = frozenset(range(1, 65))
COSTS = st.builds(
    StageCost,
    fixed=st.floats(0, 0.1),
    row=st.floats(0, 0.02),
    chunk=st.floats(0, 0.1),
    token=st.floats(1e-6, 0.01),
    pair=st.one_of(st.just(0.0), st.floats(1e-10, 1e-7)),
    mixes=st.booleans(),
)
PACES = st.lists(COSTS, min_size=1, max_size=4).map(lambda costs: Pace(tuple(costs), ALL_ROWS))


def cost(fixed: float = 0.02, row: float = 0.001, token: float = 0.0003, mixes: bool = False) -> StageCost:
    return StageCost(fixed, row, chunk=fixed, token=token, pair=0.0, mixes=mixes)


def pace(*stages: StageCost) -> Pace:
    return Pace(stages, ALL_ROWS)


def test_a_round_of_one_group_passes_every_stage_and_of_many_waits_for_the_slowest() -> None:
    two = pace(cost(fixed=0.01, row=0.001), cost(fixed=0.02, row=0.001))
    assert two.round_s(4, groups=1) == pytest.approx(0.014 + 0.024 + 2 * HOP_S)
    assert two.round_s(4, groups=2) == pytest.approx(2 * (0.022 + HOP_S))
    assert two.round_s(5, groups=2) == pytest.approx(2 * (0.023 + HOP_S))


def test_one_stage_is_never_given_more_than_one_group() -> None:
    assert pace(cost(fixed=0.0, row=0.01)).groups(64, now=1, stages=1) == 1
    assert Pace().groups(64, now=1, stages=1) == 1


def test_where_reading_the_weights_is_nearly_all_of_a_step_the_answers_stay_together() -> None:
    bound = pace(*[cost(fixed=0.02, row=0.00001)] * 4)
    assert [bound.groups(rows, now=1, stages=4) for rows in (1, 2, 4, 8, 32)] == [1] * 5


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_where_rows_are_nearly_all_of_a_step_each_stage_has_its_group(stages: int) -> None:
    bound = pace(*[cost(fixed=0.0001, row=0.01)] * stages)
    assert bound.groups(12 * stages, now=1, stages=stages) == stages


def test_three_answers_on_two_stages_are_three_groups_where_each_row_costs() -> None:
    bound = pace(*[cost(fixed=0.0001, row=0.01)] * 2)
    assert bound.groups(3, now=1, stages=2) == 3
    assert bound.groups(4, now=1, stages=2) == 2


@hypothesis_settings(deadline=None)
@given(pace=PACES, rows=st.integers(1, 64), now=st.integers(1, 5))
def test_the_number_of_groups_is_the_best_of_all_or_the_present_one_where_little_is_gained(
    pace: Pace, rows: int, now: int
) -> None:
    stages = len(pace.stages)
    chosen = pace.groups(rows, now, stages)
    rounds = {
        groups: pace.round_s(rows, groups) for groups in range(1, (1 if stages == 1 else stages + 1) + 1)
    }
    possible = {groups: took_s for groups, took_s in rounds.items() if groups <= rows}
    assert chosen in possible or chosen == min(now, rows)
    best_s = min(possible.values())
    assert possible.get(chosen, pace.round_s(rows, chosen)) <= best_s / GAIN + 1e-12


def test_a_gain_of_less_than_a_twentieth_moves_nobody() -> None:
    near = pace(*[cost(fixed=0.02, row=0.00025)] * 2)
    together, apart = near.round_s(8, 1), near.round_s(8, 2)
    assert GAIN * together < apart < together
    assert near.groups(8, now=1, stages=2) == 1
    assert near.groups(8, now=2, stages=2) == 2


def test_unmeasured_stages_each_get_a_group_and_a_batch_too_large_for_the_fit_is_tried_whole() -> None:
    assert Pace().groups(8, now=1, stages=3) == 3
    assert Pace().groups(2, now=1, stages=3) == 2
    few = Pace((cost(), cost()), frozenset({1, 2}))
    assert few.groups(8, now=2, stages=2) == 1


def test_costs_are_a_pace_as_soon_as_every_stage_is_measured() -> None:
    known = frozenset({1, 4})
    assert pace_of([cost(), None], [known, frozenset()]) == Pace()
    assert pace_of([], []) == Pace()
    assert pace_of([cost(), cost()], [known, frozenset({4, 8})]).known_rows == {4}


@pytest.mark.parametrize("apart", [1, 2])
def test_chunks_with_plans_of_their_own_fill_a_round_up_to_the_allowed_slowdown(apart: int) -> None:
    three = pace(*[cost(fixed=0.02, row=0.001)] * 3)
    each = three.chunk_seconds(8, groups=2, apart=apart, slowdown=2.5)
    busy = 2 * three.stages[0].decode(4)
    assert busy + apart * (three.stages[0].chunk + each) == pytest.approx(2.5 * three.round_s(8, 2))


@pytest.mark.parametrize("mixes", [True, False])
def test_chunks_in_the_groups_own_plans_pay_for_a_forward_only_where_they_do_not_mix(mixes: bool) -> None:
    one = pace(cost(fixed=0.02, row=0.001, mixes=mixes))
    each = one.chunk_seconds(4, groups=1, apart=0, slowdown=3.0)
    forward = 0.0 if mixes else one.stages[0].chunk
    assert one.stages[0].decode(4) + forward + each == pytest.approx(3.0 * one.round_s(4, 1))


def test_where_decoding_leaves_no_time_chunks_get_none() -> None:
    assert pace(cost(fixed=0.02)).chunk_seconds(1, groups=1, apart=0, slowdown=1.1) == 0.0


@hypothesis_settings(deadline=None)
@given(
    stages=st.integers(2, 4),
    chunk=st.floats(1e-4, 0.1),
    token=st.floats(1e-5, 1e-2),
    waiting=st.integers(512, 100_000),
)
def test_the_first_chunk_makes_filling_draining_and_fixed_parts_least(
    stages: int, chunk: float, token: float, waiting: int
) -> None:
    equal = Pace((StageCost(chunk, 0.0, chunk, token, 0.0, mixes=False),) * stages)
    size = equal.first_chunk(waiting, most=10**6)

    def took_s(size: float) -> float:
        return (waiting / size + stages - 1) * (chunk + token * size)

    best = min(took_s(waiting / chunks) for chunks in range(1, max(2, waiting // LEAST_CHUNK) + 1))
    assert size == LEAST_CHUNK or took_s(size) <= (1.02 + 1 / MOST_CHUNKS) * best


def test_on_one_stage_or_where_tokens_are_free_a_chunk_is_as_long_as_may_be() -> None:
    assert pace(cost()).first_chunk(10_000, most=512) == 512
    assert pace(cost(token=0.0), cost(token=0.0)).first_chunk(10_000, most=512) == 512
    assert Pace().first_chunk(10_000, most=512) == 512


@hypothesis_settings(deadline=None)
@given(pace=PACES, seconds=st.floats(0, 10), prefix=st.integers(0, 100_000))
def test_the_tokens_within_a_time_take_no_stage_longer(pace: Pace, seconds: float, prefix: int) -> None:
    tokens = pace.tokens_within(seconds, prefix)
    assert 0 <= tokens <= MANY
    assert pace.added(tokens, prefix) <= seconds * (1 + 1e-6)


@hypothesis_settings(deadline=None)
@given(pace=PACES)
def test_the_least_chunk_costs_about_its_forward_and_never_more_than_the_limit(pace: Pace) -> None:
    assert 1 <= pace.least_chunk <= LEAST_CHUNK
    slowest = max(pace.stages, key=lambda stage: stage.token)
    assert pace.least_chunk == 1 or slowest.token * (pace.least_chunk - 0.5) <= slowest.chunk * (1 + 1e-9)


def test_an_unmeasured_pace_has_a_least_chunk_and_knows_no_limit_in_seconds() -> None:
    assert Pace().least_chunk == LEAST_CHUNK
    assert pace(cost(token=0.0)).tokens_within(inf, 0) == MANY
