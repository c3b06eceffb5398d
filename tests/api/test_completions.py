"""POST /v1/completions: prompts of all forms, echo, legacy logprobs, streams."""

from typing import Any

import openai
import pytest

from omlx.node.chat import Delta, TokenInfo, TopToken
from tests.api.fakes import STOP, talking, words

pytestmark = pytest.mark.anyio


async def refused(**fields: Any) -> str | None:
    """The name in the 400 that these fields get."""
    async with talking(words("no")) as (client, models):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**({"model": "tiny", "prompt": "Once"} | fields))
    assert models.model.completions == []
    return caught.value.param


async def test_a_prompt_is_continued() -> None:
    async with talking(words(" upon", " a")) as (client, models):
        answer = await client.completions.create(model="tiny", prompt="Once", max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" upon a", "stop")
    assert answer.id.startswith("cmpl-")
    prompt, options = models.model.completions[0]
    assert (prompt, options.max_tokens, options.top_logprobs) == ("Once", 4, None)
    assert answer.usage is not None and answer.usage.total_tokens == 9


async def test_sixteen_tokens_are_made_when_nothing_is_said() -> None:
    async with talking(words("x")) as (client, models):
        await client.completions.create(model="tiny", prompt="Once")
    assert models.model.completions[0][1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: Any, seen: list[Any]) -> None:
    async with talking(words("x")) as (client, models):
        answer = await client.completions.create(model="tiny", prompt=prompt)
    assert [asked for asked, _ in models.model.completions] == seen
    assert [choice.index for choice in answer.choices] == list(range(len(seen)))


async def test_prompts_and_n_multiply_and_each_prompt_counts_once() -> None:
    async with talking(*(words(text) for text in "abcd")) as (client, models):
        answer = await client.completions.create(model="tiny", prompt=["p", "q"], n=2, seed=5, echo=True)
    assert [choice.text for choice in answer.choices] == ["pa", "pb", "qc", "qd"]
    assert [options.seed for _, options in models.model.completions] == [5, 6, 5, 6]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 4)


async def test_logprobs_are_lists_side_by_side() -> None:
    top = (TopToken(" a", (32, 97), -0.25), TopToken("\ufffd", (0xC3,), -3.0))
    tokens = (
        TokenInfo(" a", (32, 97), -0.25, top),
        TokenInfo("\ufffd", (0xC3,), -1.0),
        TokenInfo("\ufffd", (0xA9,), -0.5),
        TokenInfo("!", (33,), -0.1),
    )
    script = [Delta(" a", tokens=tokens[:1]), Delta("é!", tokens=tokens[1:]), STOP]
    async with talking(script) as (client, models):
        answer = await client.completions.create(model="tiny", prompt="Once", logprobs=3)
        stream = await client.completions.create(model="tiny", prompt="Once", logprobs=3, stream=True)
        chunks = [chunk async for chunk in stream]
    assert models.model.completions[0][1].top_logprobs == 3
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.token_logprobs == [-0.25, -1.0, -0.5, -0.1]
    assert logprobs.text_offset == [0, 2, 2, 3]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {" a": -0.25, "bytes:\\xc3": -3.0}
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for part in parts if part for offset in part.text_offset or []] == [0, 2, 2, 3]


async def test_a_stream_echoes_first_and_shares_one_id() -> None:
    async with talking(words("a"), words("b")) as (client, _):
        stream = await client.completions.create(
            model="tiny",
            prompt=["p", "q"],
            echo=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        assert chunk.usage is None
    assert texts == ["pa", "qb"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 14


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ([[]], "prompt[0]"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1], ["a"]], "prompt[1][0]"),
        ([[1], 2], "prompt[1]"),
        (["a"] * 129, "prompt"),
    ],
)
async def test_a_prompt_of_another_form_is_refused(prompt: Any, param: str) -> None:
    assert await refused(prompt=prompt) == param


async def test_what_is_not_served_is_refused_by_name() -> None:
    assert await refused(suffix="the end") == "suffix"
    assert await refused(best_of=2) == "best_of"
    assert await refused(echo=True, logprobs=1) == "logprobs"
    assert await refused(prompt=[1, 2], echo=True) == "echo"
    assert await refused(logprobs=6) == "logprobs"
    assert await refused(extra_body={"logprobs": True}) == "logprobs"
    assert await refused(max_tokens=0) == "max_tokens"
    assert await refused(extra_body={"messages": []}) == "messages"
