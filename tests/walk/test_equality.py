"""n stages = 1 stage = mlx-lm; batched = alone; any chunk size; cancels in between change nobody."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama4

from omlx.node.step import SamplingParams
from tests.models.tiny import FAMILIES
from tests.walk.engines import LIMITS, TIE, answer, answers, compare, engine, expected, request
from tests.walk.engines import _whole as whole_model

Tiny = Callable[[str], Path]
LENGTHS = (1, 2, 5, 23, 32, 33, 61, 90)
PROMPTS = [[(31 * i + 7 * n) % 700 + 20 for i in range(n)] for n in LENGTHS]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_is_mlx_lms_own_generation(name: str, tiny: Tiny) -> None:
    model, _ = whole_model(tiny(name))
    compared = 0
    for prompt in PROMPTS[2::3]:
        own = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=12)]
        right, safe = expected(tiny(name), tuple(prompt), 12)
        assert list(own)[:safe] == list(right)[:safe]
        compared += safe
    assert compared >= 12, TIE


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_mlx_lms_alone_and_in_a_batch_of_eight_with_any_chunk_size(
    name: str, stages: int, tiny: Tiny
) -> None:
    folder = tiny(name)
    wanted = [request(prompt, max_tokens=10 + i) for i, prompt in enumerate(PROMPTS)]

    async def walk() -> None:
        async with engine(folder, stages) as (opened, scheduler):
            for prompt in (wanted[4], wanted[7]):
                compare(folder, [prompt], [await answer(opened, prompt)])
            for chunk in (1, 7, 256):
                scheduler.limits = replace(scheduler.limits, step_tokens=chunk)
                leaving = asyncio.create_task(_leave(opened, chunk))
                found = await answers(opened, wanted)
                await leaving
                assert compare(folder, wanted, found) >= 6, TIE
                scheduler.check()
            assert opened.health().running == 0
            assert opened.recoveries == 0

    asyncio.run(walk())


async def _leave(opened, tokens: int) -> None:
    """Two sequences that are cancelled: one while its prompt is computed, one in its answer."""
    early = opened.submit(request(PROMPTS[6], max_tokens=50))
    await early.aclose()
    late = opened.submit(request(PROMPTS[3], max_tokens=50))
    for _ in range(3):
        await anext(late)
    await late.aclose()


@pytest.mark.parametrize("name", ["tiny-llama-4bit", "tiny-llama-tied"])
def test_quantized_and_tied_models_too(name: str, tiny: Tiny) -> None:
    folder = tiny(name)
    wanted = [request(prompt, max_tokens=12) for prompt in PROMPTS]

    async def walk() -> None:
        for stages in (1, 3):
            async with engine(folder, stages) as (opened, _):
                assert compare(folder, wanted, await answers(opened, wanted)) >= 6

    asyncio.run(walk())


def test_seeded_sampling_is_the_same_alone_in_company_and_over_stages(tiny: Tiny) -> None:
    """BAT-02: equal seeds give equal tokens whatever the company, different seeds differ."""
    folder = tiny("tiny-qwen3")
    warm = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=42)
    mine = request(PROMPTS[5], 20, warm)
    other = request(PROMPTS[5], 20, SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=43))
    penalised = request(
        PROMPTS[6],
        20,
        SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.5, seed=7),
    )

    async def walk(stages: int) -> list[list[int]]:
        async with engine(folder, stages) as (opened, _):
            alone = [await answer(opened, one) for one in (mine, other, penalised)]
            again = await answers(opened, [request(PROMPTS[7]), mine, other, mine, penalised])
            assert again[1:] == [alone[0], alone[1], alone[0], alone[2]]
            return alone

    one_stage, three_stages = asyncio.run(walk(1)), asyncio.run(walk(3))
    assert one_stage == three_stages
    assert one_stage[0] != one_stage[1]


def test_stop_tokens_limits_and_a_queue_longer_than_the_places(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")
    right, _ = expected(folder, tuple(PROMPTS[3]), 20)
    stop = right[6]
    cut = list(right[: right.index(stop) + 1])
    wanted = [request(PROMPTS[3], max_tokens=20, stop=stop)] * 9 + [request(PROMPTS[3], max_tokens=1)]

    async def walk() -> None:
        async with engine(folder, 2, replace(LIMITS, places=2)) as (opened, _):
            found = await answers(opened, wanted)
            assert found == [cut] * 9 + [[right[0]]]

    asyncio.run(walk())


def test_over_mx_distributeds_ring_the_tokens_are_the_same(tiny: Tiny) -> None:
    folder = tiny("tiny-gemma3")
    wanted = [request(prompt, max_tokens=8) for prompt in PROMPTS]

    async def walk() -> None:
        async with engine(folder, 3, link="ring") as (opened, _):
            assert compare(folder, wanted, await answers(opened, wanted)) >= 6
            os.kill(opened.pipeline.stages[1].process.pid, signal.SIGKILL)
            assert compare(folder, wanted, await answers(opened, wanted)) >= 6
            assert opened.recoveries == 1

    asyncio.run(walk())


LLAMA4 = {
    "attention_bias": False,
    "attention_chunk_size": 32,
    "head_dim": 16,
    "hidden_size": 64,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 4096,
    "model_type": "llama4_text",
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": 768,
}


def test_a_family_whose_caches_cannot_be_merged_is_served_one_request_after_the_other(tmp_path: Path) -> None:
    """llama4's chunked caches: two at once would end the stage's process."""
    mx.random.seed(3)
    config = {"model_type": "llama4", "text_config": LLAMA4}
    model = llama4.Model(llama4.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = [request(prompt, max_tokens=6) for prompt in PROMPTS[:6]]

    async def walk() -> None:
        async with engine(tmp_path) as (opened, _):
            alone = [await answer(opened, one) for one in wanted]
            assert await answers(opened, wanted) == alone
            assert opened.recoveries == 0

    asyncio.run(walk())
