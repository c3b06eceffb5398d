"""Each row is drawn by its own parameters, and by (seed, position) alone."""

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.ids import SeqId
from omlx.node.sampling import Sampler, uniform
from omlx.node.step import Admit, SamplingParams, Slice

VOCABULARY = 50
LOGITS = mx.array(np.random.default_rng(5).normal(size=VOCABULARY) * 2, mx.float32)
RANKED: list[int] = mx.argsort(-LOGITS).tolist()  # type: ignore[assignment]
PROBS = np.array(mx.softmax(LOGITS))


def draw(
    *rows: SamplingParams,
    position: int = 9,
    prompt: tuple[int, ...] = (),
    answer: tuple[int, ...] = (),
    logits: mx.array = LOGITS,
) -> list[int]:
    sampler = Sampler()
    slices = []
    for i, params in enumerate(rows):
        sampler.admit(Admit(SeqId(i), params, prompt, answer))
        slices.append(Slice(SeqId(i), (1,), position, sample=True))
    return [drawn.token for drawn in sampler.draw(mx.stack([logits] * len(rows)), tuple(slices)).read()]


def drawn_often(times: int = 400, **params: float) -> Counter[int]:
    """What one set of parameters draws over many seeds."""
    rows = [SamplingParams(seed=seed, **params) for seed in range(times)]  # type: ignore[arg-type]
    return Counter(draw(*rows))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draw(SamplingParams(temperature=0)) == [RANKED[0]]


def test_rows_with_different_parameters_are_each_drawn_as_if_alone() -> None:
    """BAT-01: nobody gets the first row's sampler."""
    rows = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=2, top_k=1, seed=3),
        SamplingParams(temperature=1, min_p=0.99, seed=4),
        SamplingParams(temperature=1, logit_bias=((7, 100.0),), repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=1.5, top_p=0.8, seed=6),
        SamplingParams(temperature=1.5, top_p=0.8, presence_penalty=1.0, seed=6),
    ]
    together = draw(*rows)
    assert together == [draw(row)[0] for row in rows]
    assert together[:4] == [RANKED[0]] * 3 + [7]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10**6),
    temperature=st.floats(0.1, 2),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 60),
    company=st.lists(st.floats(0, 2), max_size=4),
)
def test_a_draw_depends_on_seed_and_position_and_not_on_company(
    seed: int, position: int, temperature: float, top_p: float, top_k: int, company: list[float]
) -> None:
    mine = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    others = [SamplingParams(temperature=t, seed=seed + 1) for t in company]
    alone = draw(mine, position=position)[0]
    assert draw(*others, mine, position=position)[-1] == alone


def test_the_frequencies_are_the_models_own() -> None:
    found = drawn_often(4000, temperature=1.0)
    for token in RANKED[:8]:
        assert found[token] / 4000 == pytest.approx(PROBS[token], abs=0.03)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    shares = [drawn_often(temperature=t)[RANKED[0]] for t in (0.2, 1.0, 2.0)]
    assert shares[0] > shares[1] > shares[2]


def test_top_k_top_p_and_min_p_keep_the_tokens_that_they_should() -> None:
    assert set(drawn_often(temperature=2.0, top_k=3)) == set(RANKED[:3])
    nucleus = np.cumsum(PROBS[RANKED])
    kept = int((nucleus - PROBS[RANKED] < 0.5).sum())
    assert set(drawn_often(temperature=1.0, top_p=0.5)) == set(RANKED[:kept])
    likely = {token for token in range(VOCABULARY) if PROBS[token] >= 0.3 * PROBS.max()}
    assert set(drawn_often(temperature=1.0, min_p=0.3)) == likely


def test_a_tiny_top_p_still_leaves_the_most_likely_token() -> None:
    assert set(drawn_often(50, temperature=1.0, top_p=1e-6)) == {RANKED[0]}


def test_penalties_push_down_what_was_said() -> None:
    best, second = RANKED[:2]
    gap = float((LOGITS[best] - LOGITS[second]).item())
    greedy = {"temperature": 0.0}
    assert draw(SamplingParams(**greedy, presence_penalty=gap + 0.1), answer=(best,)) == [second]
    assert draw(SamplingParams(**greedy, presence_penalty=gap + 0.1), prompt=(best,)) == [best]
    once, thrice = (best,), (best, best, best)
    assert draw(SamplingParams(**greedy, frequency_penalty=gap / 2), answer=once) == [best]
    assert draw(SamplingParams(**greedy, frequency_penalty=gap / 2), answer=thrice) == [second]
    ratio = float((LOGITS[best] / LOGITS[second]).item()) + 0.1
    assert draw(SamplingParams(**greedy, repetition_penalty=ratio), prompt=(best,)) == [second]


def test_a_drawn_token_counts_against_itself_from_then_on() -> None:
    sampler = Sampler()
    sampler.admit(Admit(SeqId(0), SamplingParams(temperature=0, presence_penalty=50.0), (), ()))
    found = [
        sampler.draw(LOGITS[None], (Slice(SeqId(0), (1,), position, sample=True),)).read()[0].token
        for position in range(5)
    ]
    assert found == RANKED[:5]


def test_a_negative_logit_is_pushed_down_too_by_the_repetition_penalty() -> None:
    logits = mx.array([-1.0, -1.1, -5.0])
    assert draw(SamplingParams(temperature=0, repetition_penalty=1.5), prompt=(0,), logits=logits) == [1]


def test_logprobs_are_the_raw_models_and_only_for_rows_that_ask() -> None:
    sampler = Sampler()
    asked = SamplingParams(temperature=0, top_logprobs=2, logit_bias=((RANKED[4], 100.0),))
    for seq, params in enumerate(
        [asked, SamplingParams(temperature=0), SamplingParams(top_logprobs=0, top_k=1)]
    ):
        sampler.admit(Admit(SeqId(seq), params, (), ()))
    slices = tuple(Slice(SeqId(seq), (1,), 3, sample=True) for seq in range(3))
    biased, plain, own = sampler.draw(mx.stack([LOGITS] * 3), slices).read()
    assert biased.token == RANKED[4]
    assert biased.logprob == pytest.approx(np.log(PROBS[RANKED[4]]), abs=1e-4)
    assert [token for token, _ in biased.top] == RANKED[:2]
    assert (plain.logprob, plain.top) == (None, ())
    assert own.logprob == pytest.approx(np.log(PROBS[RANKED[0]]), abs=1e-4)
    assert own.top == ()


def test_the_number_drawn_is_the_same_on_every_machine() -> None:
    """Written down once: a change would change every seeded answer."""
    assert [round(uniform(42, position), 12) for position in range(3)] == KNOWN
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.02)


KNOWN = [0.013842768924, 0.987755698361, 0.784475460963]
