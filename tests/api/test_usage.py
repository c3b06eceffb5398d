"""How much of a prompt was not computed: from the engine's stream to what the client is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from omlx.ids import ModelId
from omlx.node.chat import ChatModel
from omlx.node.text.tokenizer import load_tokenizer
from tests.api.fakes import KEY, FakeModels, ScriptedModel, serving, talking, words
from tests.fakes import ScriptedSource

pytestmark = pytest.mark.anyio

HI: Any = [{"role": "user", "content": "hi"}]
CACHED = {0: 5, 1: 6, 2: 3, 3: 4}
"""By request; of each prompt's 7 tokens."""


def remember(models: FakeModels) -> None:
    models.model.cached_tokens = CACHED


async def test_cached_tokens_are_told_in_one_piece() -> None:
    async with talking(words("a"), prepare=remember) as (client, _):
        chat = await client.chat.completions.create(model="tiny", messages=HI)
        completion = await client.completions.create(model="tiny", prompt="x")
    assert cached_of(chat.usage) == 5
    assert cached_of(completion.usage) == 6


async def test_cached_tokens_are_told_in_a_streams_last_chunk() -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    async with talking(words("a", "b"), prepare=remember) as (client, _):
        chat = [
            part async for part in await client.chat.completions.create(model="tiny", messages=HI, **options)
        ]
        completion = [
            part async for part in await client.completions.create(model="tiny", prompt="x", **options)
        ]
    assert cached_of(chat[-1].usage) == 5
    assert cached_of(completion[-1].usage) == 6


async def test_n_choices_share_a_prompt_and_what_was_cached_of_it() -> None:
    """The first choice computes what is missing; that the others then find it is no gain of the client's."""
    async with talking(*(words(text) for text in "abcd"), prepare=remember) as (client, _):
        answer = await client.completions.create(model="tiny", prompt=["p", "q"], n=2)
    assert answer.usage is not None and answer.usage.prompt_tokens == 14
    assert cached_of(answer.usage) == CACHED[0] + CACHED[2]


async def test_what_the_engine_says_with_the_first_token_is_what_the_client_reads(
    tiny: Callable[[str], Path],
) -> None:
    tokenizer = load_tokenizer(tiny("tiny-qwen3"))
    letter = tokenizer.encode("a", special=False)[0]
    source = ScriptedSource([letter, letter], cached_tokens=16)
    models = FakeModels(ScriptedModel())
    models.model = cast(ScriptedModel, Real(ChatModel(ModelId("tiny"), tokenizer, source, 200)))
    async with (
        serving(models) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        answer = await client.completions.create(model="tiny", prompt="one two three " * 8, max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    assert cached_of(answer.usage) == 16


class Real:
    """A real model where `serving` expects a scripted one."""

    open_replies = 0

    def __init__(self, model: ChatModel) -> None:
        self.reply = model.reply
        self.complete = model.complete


def cached_of(usage: openai.types.CompletionUsage | None) -> int | None:
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens
