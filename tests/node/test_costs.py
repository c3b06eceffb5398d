"""Whether a stage's costs are found again in noisy samples of what they made."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import cycle, islice
from math import isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.ids import SeqId
from omlx.node.costs import StageCost, StageMeter
from omlx.node.step import Slice, Work, work_of

MIXING = StageCost(fixed=0.020, row=0.001, chunk=0.020, token=0.0003, pair=2e-8, mixes=True)
SINGLE = StageCost(fixed=0.020, row=0.001, chunk=0.025, token=0.0003, pair=2e-8, mixes=False)
EITHER = pytest.mark.parametrize("true", [SINGLE, MIXING], ids=["chunks apart", "chunks mixed"])


def decode(*rows: int) -> Iterator[Work]:
    return cycle(Work(size, 0, 0.0) for size in rows)


def chunk(tokens: int, prefix: int, rows: int = 0) -> Work:
    return Work(rows, tokens, tokens * (prefix + tokens / 2))


def prompts(rows: int = 0) -> Iterator[Work]:
    """A prompt of 8,192 tokens after another, in chunks of 512, and between them one of 100 tokens."""
    return cycle([*(chunk(512, 512 * step, rows) for step in range(16)), chunk(100, 0, rows)])


def observe(
    meter: StageMeter,
    seconds: Callable[[Work], float],
    works: Iterator[Work],
    count: int,
    noise: float = 0.03,
) -> None:
    random = Random(7)
    for work in islice(works, count):
        meter.add(work, seconds(work) * random.gauss(1.0, noise))


def fitted(meter: StageMeter) -> StageCost:
    cost = meter.cost()
    assert cost is not None
    return cost


def test_before_anything_was_measured_nothing_is_known() -> None:
    meter = StageMeter(mixes=False)
    assert meter.cost() is None
    assert meter.known_rows == frozenset()


@EITHER
def test_the_fixed_part_and_a_rows_part_are_found_in_decode_steps(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(1, 2, 4, 8, 16), 300)
    found = fitted(meter)
    assert found.fixed == pytest.approx(true.fixed, rel=0.1)
    assert found.row == pytest.approx(true.row, rel=0.2)
    for rows in range(1, 17):
        assert found.decode(rows) == pytest.approx(true.decode(rows), rel=0.06)


@EITHER
def test_a_tokens_part_and_a_pairs_part_are_found_in_chunks_with_growing_prefixes(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, prompts(), 200)
    found = fitted(meter)
    assert found.token == pytest.approx(true.token, rel=0.15)
    assert found.pair == pytest.approx(true.pair, rel=0.15)
    for prefix in (0, 1000, 8000):
        work = chunk(512, prefix)
        assert found.seconds(work) == pytest.approx(true.seconds(work), rel=0.05)


@EITHER
def test_costs_are_found_where_chunks_and_decoding_rows_come_in_one_plan(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(1, 2, 4, 8), 100)
    observe(meter, true.seconds, prompts(rows=4), 200)
    found = fitted(meter)
    for rows in (1, 4, 8):
        for size, prefix, close in ((100, 0, 0.1), (512, 0, 0.05), (512, 4000, 0.05)):
            work = chunk(size, prefix, rows)
            assert found.seconds(work) == pytest.approx(true.seconds(work), rel=close)


@EITHER
def test_after_the_machine_became_twice_as_slow_the_fit_follows_within_a_hundred_samples(
    true: StageCost,
) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(1, 2, 4, 8), 400)
    observe(meter, lambda work: 2 * true.seconds(work), decode(1, 2, 4, 8), 100)
    found = fitted(meter)
    for rows in (1, 4, 8):
        assert found.decode(rows) == pytest.approx(2 * true.decode(rows), rel=0.2)
    observe(meter, lambda work: 2 * true.seconds(work), decode(1, 2, 4, 8), 100)
    assert fitted(meter).decode(4) == pytest.approx(2 * true.decode(4), rel=0.05)


@EITHER
def test_one_plan_that_took_fifty_times_as_long_hardly_moves_the_fit(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(1, 2, 4, 8), 200)
    before = fitted(meter).decode(4)
    meter.add(Work(4, 0, 0.0), 50 * true.decode(4))
    observe(meter, true.seconds, decode(1, 2, 4, 8), 7)
    assert fitted(meter).decode(4) == pytest.approx(before, rel=0.08)
    observe(meter, true.seconds, decode(1, 2, 4, 8), 60)
    assert fitted(meter).decode(4) == pytest.approx(before, rel=0.03)


@EITHER
def test_one_batch_size_alone_says_nothing_of_a_row_and_is_known_itself(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(4), 100)
    found = fitted(meter)
    assert found.row * 4 < 0.05 * found.fixed
    assert found.decode(4) == pytest.approx(true.decode(4), rel=0.03)
    assert meter.known_rows == {4}


@EITHER
def test_before_a_chunk_was_measured_its_tokens_are_guessed_from_a_decode_step(true: StageCost) -> None:
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(1), 20)
    found = fitted(meter)
    assert found.chunk == found.fixed
    assert 0 < found.token < found.fixed


def test_a_prompts_last_chunk_that_is_drawn_from_counts_its_tokens() -> None:
    slices = [
        Slice(SeqId(0), (1,) * 100, 50, sample=True),
        Slice(SeqId(1), (1,), 7, sample=True),
        Slice(SeqId(2), (), 9, sample=True),
    ]
    assert work_of(slices) == Work(2, 100, 100 * (50 + 50))


AMOUNT = st.one_of(
    st.just(0.0), st.floats(1e-12, 1e-6), st.floats(1e-4, 1.0), st.floats(1e3, 1e9), st.just(1e-300)
)
SAMPLE = st.tuples(st.integers(0, 200), st.integers(0, 100_000), st.integers(0, 1_000_000), AMOUNT)


@hypothesis_settings(max_examples=300, deadline=None)
@given(samples=st.lists(SAMPLE, max_size=60), mixes=st.booleans())
def test_whatever_was_measured_no_cost_is_negative_or_infinite(
    samples: list[tuple[int, int, int, float]], mixes: bool
) -> None:
    meter = StageMeter(mixes)
    for rows, tokens, prefix, took_s in samples:
        meter.add(chunk(tokens, prefix, rows), took_s)
        if (cost := meter.cost()) is not None:
            parts = {each.name for each in fields(cost)} - {"mixes", "steps"}
            values = [getattr(cost, part) for part in parts]
            values += [seconds for _, seconds in cost.steps]
            assert all(isfinite(value) and value >= 0 for value in values), cost


COSTS = st.builds(
    StageCost,
    fixed=st.floats(0, 0.1),
    row=st.floats(0, 0.01),
    chunk=st.floats(0, 0.1),
    token=st.floats(1e-7, 0.01),
    pair=st.one_of(st.just(0.0), st.floats(1e-12, 1e-6)),
    mixes=st.booleans(),
)


@hypothesis_settings(deadline=None)
@given(cost=COSTS, tokens=st.integers(1, 10_000), prefix=st.integers(0, 200_000))
def test_the_tokens_within_a_chunks_time_are_the_chunks_tokens(
    cost: StageCost, tokens: int, prefix: int
) -> None:
    part = cost.chunk_part(tokens, tokens * (prefix + tokens / 2))
    assert cost.tokens_within(part, prefix) == pytest.approx(tokens, rel=1e-3)


def test_no_time_is_enough_for_no_tokens_and_free_tokens_fit_without_end() -> None:
    free = StageCost(0.02, 0.001, 0.02, 0.0, 0.0, mixes=False)
    assert MIXING.tokens_within(0.0, 100) == 0
    assert free.tokens_within(0.01, 100) == float("inf")


@EITHER
def test_long_answers_at_one_batch_size_do_not_make_the_others_forgotten(true: StageCost) -> None:
    """Two stages flipped between one group of eight and two of four once a minute."""
    meter = StageMeter(true.mixes)
    observe(meter, true.seconds, decode(8), 20)
    observe(meter, true.seconds, decode(4), 5000)
    found = fitted(meter)
    assert found.decode(8) == pytest.approx(true.decode(8), rel=0.05)
    assert found.row == pytest.approx(true.row, rel=0.4)
