"""How fast and how fair the scheduler drives pipelines whose costs are known, without any device."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median, quantiles

import pytest

from omlx.node.costs import StageCost
from tests.node.pipeline_simulation import Reply, Simulation, simulated

BOUND = StageCost(fixed=0.020, row=0.0003, chunk=0.020, token=0.0003, pair=2e-8, mixes=False)
"""Most of a step reads the weights, as on a GPU."""
ROWS = replace(BOUND, fixed=0.095, row=0.005, chunk=0.095, token=0.0045)
"""Each row costs, as on a processor's cores."""
BOTH = pytest.mark.parametrize("cost", [BOUND, ROWS], ids=["weights", "rows"])
MIXES = pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixed"])
LEARNS = pytest.mark.parametrize("learned", [False, True], ids=["known", "learned"])


def part(cost: StageCost, share: float) -> StageCost:
    """A stage with this share of the layers."""
    return replace(
        cost,
        fixed=cost.fixed * share,
        row=cost.row * share,
        chunk=cost.chunk * share,
        token=cost.token * share,
        pair=cost.pair * share,
    )


def equal(cost: StageCost, stages: int) -> list[StageCost]:
    return [part(cost, 1 / stages)] * stages


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]


# ---------------------------------------------------------------- fairness


def beside_answers(simulation: Simulation, prompts: int) -> tuple[list[Reply], list[Reply]]:
    """Four answers that run all the time, and so many prompts of 4,096 tokens, each alone beside them."""
    step_s = sum(cost.decode(4) for cost in simulation.costs)
    answers = [simulation.ask(16, 1200 * prompts) for _ in range(4)]
    return answers, [simulation.ask(4096, 2, at_s=(100 + 1000 * turn) * step_s) for turn in range(prompts)]


@MIXES
@BOTH
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_long_prompt_slows_running_answers_down_by_less_than_three(
    stages: int, cost: StageCost, mixes: bool
) -> None:
    simulation = simulated(equal(replace(cost, mixes=mixes), stages))
    answers, [prompt] = beside_answers(simulation, 1)
    simulation.run()
    usual = median(gap for answer in answers for gap in answer.gaps(0.5 * prompt.asked_s, prompt.asked_s))
    beside = [gap for answer in answers for gap in answer.gaps(prompt.asked_s, prompt.token_s[0])]
    assert p95(beside) <= 3.0 * usual
    # Not only nearly all of them: no pause is much longer.
    assert max(beside) <= 3.3 * usual


@MIXES
@BOTH
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_same_holds_where_costs_are_learned_from_the_second_long_prompt_on(
    stages: int, cost: StageCost, mixes: bool
) -> None:
    simulation = simulated(equal(replace(cost, mixes=mixes), stages), learned=True)
    answers, [_, prompt] = beside_answers(simulation, 2)
    simulation.run()
    usual = median(
        gap for answer in answers for gap in answer.gaps(prompt.asked_s - 20 * cost.decode(4), prompt.asked_s)
    )
    beside = [gap for answer in answers for gap in answer.gaps(prompt.asked_s, prompt.token_s[0])]
    assert p95(beside) <= 3.0 * usual


@MIXES
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_question_behind_a_book_is_answered_long_before_the_book_is_read(stages: int, mixes: bool) -> None:
    simulation = simulated(equal(replace(BOUND, mixes=mixes), stages))
    book = simulation.ask(30_000, 2)
    question = simulation.ask(100, 2, at_s=0.5)
    simulation.run()
    assert question.first_s < 0.1 * book.first_s


# ---------------------------------------------------------------- decoding


def tokens_per_s(costs: Sequence[StageCost], answers: int, learned: bool) -> float:
    """While all of them run, without the first half, in which costs are learned and groups settle."""
    simulation = simulated(costs, learned)
    replies = [simulation.ask(2, 300) for _ in range(answers)]
    simulation.run()
    begin = max(reply.token_s[150] for reply in replies)
    end = min(reply.token_s[-1] for reply in replies)
    return sum(len(reply.gaps(begin, end)) for reply in replies) / (end - begin)


@LEARNS
@pytest.mark.parametrize("row", [0.0, 0.0003, 0.002])
def test_two_stages_decode_as_fast_as_one_and_twice_as_fast_at_twice_the_concurrency(
    row: float, learned: bool
) -> None:
    cost = replace(BOUND, fixed=0.04, row=row)
    one = tokens_per_s([cost], 8, learned)
    assert tokens_per_s(equal(cost, 2), 8, learned) >= 0.95 * one
    assert tokens_per_s(equal(cost, 2), 16, learned) >= 1.8 * one


@LEARNS
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_where_rows_cost_stages_decode_nearly_as_many_times_faster(stages: int, learned: bool) -> None:
    cost = replace(BOUND, fixed=0.005, row=0.005)
    groups = tokens_per_s(equal(cost, stages), 6 * stages, learned)
    limit = stages * 6 / (cost.fixed + 6 * cost.row)
    assert groups >= 0.9 * limit


@LEARNS
def test_a_stage_of_twice_the_layers_sets_the_pace_of_decoding(learned: bool) -> None:
    cost = replace(BOUND, fixed=0.005, row=0.005)
    slow = part(cost, 2 / 3)
    assert tokens_per_s([part(cost, 1 / 3), slow], 12, learned) >= 0.95 * 12 / (2 * slow.decode(6))


# ---------------------------------------------------------------- prompts


def first_tokens_s(costs: Sequence[StageCost], prompt: int, count: int = 1) -> float:
    """Until each of so many prompts, asked at once, has its first token."""
    simulation = simulated(costs)
    replies = [simulation.ask(prompt, 1) for _ in range(count)]
    simulation.run()
    return max(reply.first_s for reply in replies)


@MIXES
@pytest.mark.parametrize(("stages", "tokens", "goal"), [(2, 4096, 1.7), (2, 16_384, 1.85), (4, 32_768, 3.4)])
def test_a_long_prompt_is_computed_nearly_as_many_times_faster_as_there_are_stages(
    stages: int, tokens: int, goal: float, mixes: bool
) -> None:
    cost = replace(BOUND, mixes=mixes)
    assert first_tokens_s([cost], tokens) >= goal * first_tokens_s(equal(cost, stages), tokens)


@MIXES
def test_unequal_stages_compute_a_long_prompt_at_the_pace_of_the_slowest(mixes: bool) -> None:
    cost = replace(BOUND, mixes=mixes)
    unequal = [part(cost, 1 / 3), part(cost, 2 / 3)]
    assert first_tokens_s([cost], 16_384) >= 0.95 * 1.5 * first_tokens_s(unequal, 16_384)


@pytest.mark.parametrize(("tokens", "fixed_tokens"), [(64, 5), (64, 15), (256, 15), (256, 30)])
def test_eight_short_prompts_at_once_come_near_what_filling_two_stages_allows(
    tokens: int, fixed_tokens: int
) -> None:
    """N tokens in m forwards take (m + 1) * (fixed + N * token / m) / 2 on two stages, at least
    (sqrt(N * token) + sqrt(fixed))^2 / 2, and on one stage what they take in the fewest forwards."""
    token_s = BOUND.token
    cost = replace(BOUND, fixed=fixed_tokens * token_s, chunk=fixed_tokens * token_s, pair=0.0, mixes=True)
    total = 8 * tokens
    best = (total**0.5 + fixed_tokens**0.5) ** 2 / 2
    limit = (total + -(-total // 512) * fixed_tokens) / best
    speedup = first_tokens_s([cost], tokens, 8) / first_tokens_s(equal(cost, 2), tokens, 8)
    assert speedup >= 0.9 * limit
    assert speedup >= min(1.6, 0.9 * limit)


# ---------------------------------------------------------------- together


@MIXES
@LEARNS
@BOTH
def test_under_a_mixed_load_two_stages_compute_nearly_all_the_time(
    cost: StageCost, learned: bool, mixes: bool
) -> None:
    """Eight answers run, and prompts of 100 to 2,000 tokens keep coming, faster than they are answered."""
    simulation = simulated(equal(replace(cost, mixes=mixes), 2), learned)
    answers = [simulation.ask(64, 1000) for _ in range(8)]
    step_s = cost.decode(8)
    for turn in range(60):
        simulation.ask((100, 500, 2000)[turn % 3], 60, at_s=(50 + 20 * turn) * step_s)
    simulation.run()
    until = min(min(reply.token_s[-1] for reply in answers), (50 + 20 * 59) * step_s)
    assert simulation.busy_share(100 * step_s, until) >= 0.85
