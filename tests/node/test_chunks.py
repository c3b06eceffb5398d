"""How a step's budget is dealt to the prompts that wait: nobody overtakes, nobody starves."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.node.chunks import LEAST_UNMEASURED, Budget, Prompt, budget_of, deal
from omlx.node.costs import StageCost
from omlx.node.limits import Limits
from omlx.node.pacing import LEAST_CHUNK, Pace

STEP = 512
COST = StageCost(fixed=0.02, row=0.001, chunk=0.02, token=0.0003, pair=2e-8, mixes=False)
PACE = Pace((COST, COST), frozenset({1, 2, 4}))
PROMPTS = st.lists(st.builds(Prompt, prefix=st.integers(0, 50_000), left=st.integers(1, 20_000)), max_size=8)
BUDGETS = st.one_of(
    st.builds(Budget, pace=st.just(Pace()), tokens=st.integers(0, STEP)),
    st.builds(
        Budget,
        pace=st.just(PACE),
        tokens=st.integers(0, STEP),
        seconds=st.floats(0, 1),
        strict=st.booleans(),
    ),
)


def unmeasured(tokens: int = STEP) -> Budget:
    return Budget(Pace(), tokens)


def test_short_prompts_share_a_step_in_the_order_of_their_turn() -> None:
    assert deal([Prompt(0, 200), Prompt(0, 200), Prompt(0, 200)], unmeasured(), STEP) == [200, 200, 112]


def test_a_short_prompt_behind_a_long_one_has_half_of_the_step() -> None:
    long, short = deal([Prompt(0, 30_000), Prompt(0, 400)], unmeasured(), STEP)
    assert long == pytest.approx(STEP // 2, abs=LEAST_CHUNK)
    assert short == STEP - long


def test_what_the_short_prompts_leave_goes_to_the_long_one() -> None:
    assert deal([Prompt(0, 30_000), Prompt(0, 100)], unmeasured(), STEP) == [412, 100]


def test_a_long_prompt_behind_a_crowd_of_short_ones_has_the_other_half() -> None:
    crowd = [Prompt(0, 300)] * 6
    *short, long = deal([*crowd, Prompt(0, 30_000)], unmeasured(), STEP)
    assert long >= (STEP - LEAST_CHUNK) // 2
    assert short[0] + short[1] == STEP - long and short[0] > short[1]


def test_of_two_long_prompts_the_older_goes_first() -> None:
    assert deal([Prompt(0, 30_000), Prompt(0, 30_000)], unmeasured(), STEP) == [STEP, 0]


def test_no_prompts_are_dealt_nothing() -> None:
    assert deal([], unmeasured(), STEP) == []


@hypothesis_settings(deadline=None)
@given(prompts=PROMPTS, budget=BUDGETS)
def test_no_prompt_gets_more_than_is_left_of_it_and_all_together_no_more_than_the_budget(
    prompts: list[Prompt], budget: Budget
) -> None:
    sizes = deal(prompts, replace(budget), STEP)
    assert all(0 <= size <= prompt.left for size, prompt in zip(sizes, prompts, strict=True))
    assert sum(sizes) <= budget.tokens


@hypothesis_settings(deadline=None)
@given(prompts=PROMPTS.filter(bool), budget=BUDGETS)
def test_the_first_prompt_always_gets_on(prompts: list[Prompt], budget: Budget) -> None:
    sizes = deal(prompts, replace(budget), STEP)
    assert sizes[0] >= min(budget.pace.least_chunk, prompts[0].left, budget.tokens)


@hypothesis_settings(deadline=None)
@given(prompts=PROMPTS, budget=BUDGETS)
def test_within_a_class_nobody_overtakes(prompts: list[Prompt], budget: Budget) -> None:
    """Whoever got something has before it, in its class, only prompts that it could not have completed
    with less: by tokens they are finished, by seconds a longer prefix may have made theirs too dear."""
    if budget.seconds < inf:
        prompts = [replace(prompt, prefix=0) for prompt in prompts]
    sizes = deal(prompts, replace(budget), STEP)
    for short in (True, False):
        own = [
            (size, prompt)
            for size, prompt in zip(sizes, prompts, strict=True)
            if (prompt.left <= STEP) is short
        ]
        served = [place for place, (size, _) in enumerate(own) if size]
        for place in range(max(served, default=0)):
            size, prompt = own[place]
            # A token's rounding of the seconds may go to the next one.
            assert size >= prompt.left or sum(size for size, _ in own[place + 1 :]) <= 1 or not budget.strict


@hypothesis_settings(deadline=None)
@given(prompts=PROMPTS, budget=BUDGETS.filter(lambda budget: budget.strict and budget.seconds < inf))
def test_chunks_take_no_longer_than_allowed_but_for_the_first_prompts_least_chunk(
    prompts: list[Prompt], budget: Budget
) -> None:
    sizes = deal(prompts, replace(budget), STEP)
    took_s = sum(PACE.added(size, prompt.prefix) for size, prompt in zip(sizes, prompts, strict=True))
    least_s = PACE.added(min(PACE.least_chunk, sizes[0]), prompts[0].prefix) if prompts else 0.0
    assert took_s <= max(budget.seconds, least_s) * (1 + 1e-6)


def limits_of(stages: int) -> Limits:
    return Limits(places=32, queue=8, stages=stages, step_tokens=STEP, slowdown=3.0, capacity_tokens=10**6)


@pytest.mark.parametrize(("stages", "tokens"), [(1, STEP), (2, 250), (3, 125), (9, LEAST_UNMEASURED)])
def test_of_several_stages_none_waits_for_all_prompts_on_the_one_before_it(stages: int, tokens: int) -> None:
    """Nothing was measured after a loss, and the answers of all were computed again in one step: one stage
    after the other."""
    crowd = [Prompt(0, 50)] * 20
    assert budget_of(Pace(), limits_of(stages), crowd, 0, 1, 0.0).tokens == tokens


def test_unmeasured_a_long_prompts_chunks_are_whole_steps_on_any_number_of_stages() -> None:
    assert budget_of(Pace(), limits_of(4), [Prompt(0, 30_000)], 0, 1, 0.0).tokens == STEP
