"""A chat in, deltas out, over an engine that follows a script."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlx.errors import BadRequest, Closed, Full, ModelFailed, PromptTooLong
from omlx.ids import ModelId
from omlx.node.chat import Chat, ChatModel, Delta, Message, Reply, ReplyOptions, TokenInfo, TopToken
from omlx.node.sequence import Finish, Token
from omlx.node.text.chat_template import ChatTemplate
from omlx.node.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes import ScriptedSource

END = 2
HELLO = (Message("user", "Hello"),)
SMILE = "\U0001f600"


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    return load_tokenizer(tiny("tiny-qwen3"))


def model(tokenizer: Tokenizer, source: ScriptedSource, context_tokens: int = 200) -> ChatModel:
    return ChatModel(ModelId("tiny"), tokenizer, source, context_tokens)


def script(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False)


async def collect(reply: Reply) -> list[Delta]:
    return [delta async for delta in reply]


def ask(
    tokenizer: Tokenizer, source: ScriptedSource, prompt: str | None = None, **options: Any
) -> tuple[Reply, list[Delta]]:
    """The answer to a chat, or to a prompt."""

    async def run() -> tuple[Reply, list[Delta]]:
        engine = model(tokenizer, source)
        if prompt is None:
            reply = await engine.reply(Chat(HELLO, ReplyOptions(**options)))
        else:
            reply = await engine.complete(prompt, ReplyOptions(**options))
        deltas = await collect(reply)
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert all(delta != Delta() for delta in deltas)
        await reply.aclose()
        return reply, deltas

    return asyncio.run(run())


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def reasoning_of(deltas: list[Delta]) -> str:
    return "".join(delta.reasoning for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[TokenInfo]:
    return [token for delta in deltas for token in delta.tokens]


def test_an_answer_ends_with_its_stop_token_which_counts_but_has_no_text(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "Good day")
    source = ScriptedSource([*ids, END])
    reply, deltas = ask(tokenizer, source)
    assert text_of(deltas) == "Good day"
    assert deltas[-1].finish is Finish.STOP
    assert reply.completion_tokens == len(ids) + 1
    assert reply.prompt_tokens == len(source.requests[0].prompt)
    assert source.closes == []


def test_a_stop_token_that_is_plain_text_is_not_shown_either(tokenizer: Tokenizer) -> None:
    (letter,) = script(tokenizer, "x")
    _, deltas = ask(tokenizer, ScriptedSource([letter, Token(letter, finish=Finish.STOP)]))
    assert text_of(deltas) == "x"


def test_max_tokens_ends_an_answer_with_length_and_half_a_character_shows_once(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "a" + SMILE)
    reply, deltas = ask(tokenizer, ScriptedSource(ids), max_tokens=3)
    assert text_of(deltas) == "a\ufffd"
    assert deltas[-1].finish is Finish.LENGTH
    assert reply.completion_tokens == 3


def test_a_stop_string_across_tokens_ends_the_answer_and_cancels_the_sequence(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "one two three four five")
    source = ScriptedSource([*ids, END])
    reply, deltas = ask(tokenizer, source, stop=("o th", "five"))
    assert text_of(deltas) == "one tw"
    assert deltas[-1].finish is Finish.STOP
    assert source.closes == [reply.completion_tokens]
    assert reply.completion_tokens < len(ids)


def test_a_stop_string_completed_by_the_last_token_is_a_stop_and_cancels_nothing(
    tokenizer: Tokenizer,
) -> None:
    ids = script(tokenizer, "ab!")
    source = ScriptedSource(ids)
    _, deltas = ask(tokenizer, source, stop=("b!",), max_tokens=len(ids))
    assert (text_of(deltas), deltas[-1].finish, source.closes) == ("a", Finish.STOP, [])


def test_a_partial_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    _, deltas = ask(tokenizer, ScriptedSource([*script(tokenizer, "so be it"), END]), stop=("it is",))
    assert text_of(deltas) == "so be it"


def test_a_waiting_shorter_stop_string_counts_at_the_end(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "xabc")
    _, deltas = ask(tokenizer, ScriptedSource(ids), stop=("abcd", "bc"), max_tokens=len(ids))
    assert (text_of(deltas), deltas[-1].finish) == ("xa", Finish.STOP)


def test_reasoning_is_split_off_and_counted(tokenizer: Tokenizer) -> None:
    thought = script(tokenizer, "<think>\nhm hm\n</think>")
    reply, deltas = ask(tokenizer, ScriptedSource([*thought, *script(tokenizer, "\n\nYes"), END]))
    assert (reasoning_of(deltas), text_of(deltas)) == ("hm hm", "Yes")
    assert reply.reasoning_tokens == len(thought)


def test_a_prompt_that_opens_the_reasoning_starts_inside_it(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        source = ScriptedSource([*script(tokenizer, "hm</think>Yes"), END])
        tail = Message("user", "x")
        engine = model(OpenThinking(tokenizer), source)
        reply = await engine.reply(Chat((tail,)))
        deltas = await collect(reply)
        assert (reasoning_of(deltas), text_of(deltas)) == ("hm", "Yes")

    asyncio.run(run())


class OpenThinking(Tokenizer):
    """The same tokenizer, with a template that opens the reasoning."""

    def __init__(self, other: Tokenizer) -> None:
        template = ChatTemplate("{{ messages[0].content }}<think>\n", {})
        super().__init__(other.vocabulary, template, other.vocab_size, other.eos_ids)


def test_a_completion_splits_nothing_off(tokenizer: Tokenizer) -> None:
    source = ScriptedSource([*script(tokenizer, "<think>hm</think>Yes"), END])
    reply, deltas = ask(tokenizer, source, prompt="Once")
    assert (reasoning_of(deltas), text_of(deltas)) == ("", "<think>hm</think>Yes")
    assert source.requests[0].prompt == tuple(script(tokenizer, "Once"))
    assert reply.reasoning_tokens == 0


def test_log_probabilities_come_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "hi")
    assert tokens_of(ask(tokenizer, ScriptedSource([*ids, END]))[1]) == []
    source = ScriptedSource([Token(ids[0], -0.5, ((ids[1], -0.25),)), Token(END, -1.0, finish=Finish.STOP)])
    _, deltas = ask(tokenizer, source, top_logprobs=1)
    assert tokens_of(deltas) == [TokenInfo("h", (104,), -0.5, (TopToken("i", (105,), -0.25),))]


@pytest.mark.parametrize("stop", [(), (SMILE + "!",), ("ab",)])
def test_each_token_with_text_comes_once_and_not_after_its_text(
    stop: tuple[str, ...], tokenizer: Tokenizer
) -> None:
    text = f"a {SMILE}b \ud55c! {SMILE}"
    ids = script(tokenizer, text)
    _, deltas = ask(tokenizer, ScriptedSource([*ids, END]), top_logprobs=0, stop=stop)
    assert text_of(deltas) == text
    assert [bytes(token.bytes) for token in tokens_of(deltas)] == [tokenizer.token_bytes(id) for id in ids]
    sent, spelled = "", b""
    for delta in deltas:
        sent += delta.text
        spelled += b"".join(bytes(token.bytes) for token in delta.tokens)
        assert spelled.startswith(sent.encode())


def test_tokens_of_a_stop_string_and_of_the_tags_have_no_entry(tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "<think>hm</think>abXYZ")
    _, deltas = ask(tokenizer, ScriptedSource([*ids, END]), top_logprobs=0, stop=("XYZ",))
    assert [token.text for token in tokens_of(deltas)] == ["h", "m", "a", "b"]


def test_closing_a_reply_cancels_the_sequence_once(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        source = ScriptedSource([*script(tokenizer, "one two three"), END])
        reply = await model(tokenizer, source).reply(Chat(HELLO))
        async with reply:
            await anext(reply)
        await reply.aclose()
        assert source.closes == [1]
        assert [delta async for delta in reply] == []

    asyncio.run(run())


def test_a_model_that_fails_or_is_closed_raises_out_of_the_iteration(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelFailed, match="died"):
        ask(tokenizer, ScriptedSource(script(tokenizer, "so"), fails=ModelFailed("it died too often")))
    with pytest.raises(Closed):
        ask(tokenizer, ScriptedSource(script(tokenizer, "so")))


def test_a_full_engine_refuses_before_anything_is_streamed(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = model(tokenizer, ScriptedSource([END], refuses=Full("the queue is full", retry_after_s=3)))
        with pytest.raises(Full):
            await engine.reply(Chat(HELLO))
        with pytest.raises(Full):
            await engine.complete("Once", ReplyOptions())

    asyncio.run(run())


def test_options_reach_the_engine(tokenizer: Tokenizer) -> None:
    source = ScriptedSource([END])
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "logit_bias": ((5, -100.0),), "seed": 11,
        "top_logprobs": 2,
    }  # fmt: skip
    ask(tokenizer, source, **options)
    sampling = source.requests[0].sampling
    assert {name: getattr(sampling, name) for name in options} == options
    assert source.requests[0].stop_tokens == {0, 2}


def test_any_integer_is_a_seed_and_none_draws_one(tokenizer: Tokenizer) -> None:
    source = ScriptedSource([END])
    for seed in (-1, 2**63 + 5, 2**200 + 1, None, None):
        ask(tokenizer, source, seed=seed)
    seeds = [request.sampling.seed for request in source.requests]
    assert seeds[:3] == [2**63 - 1, 5, 1]
    assert seeds[3] != seeds[4]


def test_max_tokens_is_clamped_to_what_the_context_leaves(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        source = ScriptedSource([END])
        engine = model(tokenizer, source, context_tokens=10)
        for wanted in (None, 3, 7, 1000):
            await engine.complete((5, 6, 7), ReplyOptions(max_tokens=wanted))
        await engine.complete((5,) * 9, ReplyOptions(max_tokens=1000))
        assert [request.max_tokens for request in source.requests] == [7, 3, 7, 7, 1]

    asyncio.run(run())


def test_a_prompt_that_fills_the_context_is_too_long(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        source = ScriptedSource([END])
        engine = model(tokenizer, source, context_tokens=10)
        with pytest.raises(PromptTooLong, match="10 tokens") as raised:
            await engine.complete((5,) * 10, ReplyOptions())
        assert raised.value.param == "prompt"
        with pytest.raises(PromptTooLong) as raised:
            await engine.reply(Chat((Message("user", "x" * 40),)))
        assert (raised.value.param, raised.value.code) == ("messages", "context_length_exceeded")
        assert source.requests == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": ((768, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": ("x \ud83d y",)}, "stop[0]"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], param: str, tokenizer: Tokenizer) -> None:
    source = ScriptedSource([END])
    for prompt in (None, "Once"):
        with pytest.raises(BadRequest) as raised:
            ask(tokenizer, source, prompt, **options)
        assert raised.value.param == param
        assert param in str(raised.value)
    assert source.requests == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message("user", "x \ud83d y"), "messages[1].content"),
        (Message("user", "x", name="\udc00"), "messages[1].name"),
        (Message("assistant", "x", reasoning="\ud83d"), "messages[1].reasoning"),
    ],
)
def test_half_a_surrogate_pair_in_a_message_is_refused_by_name(
    message: Message, param: str, tokenizer: Tokenizer
) -> None:
    source = ScriptedSource([END])
    chat = Chat((HELLO[0], message, HELLO[0]))
    with pytest.raises(BadRequest, match="surrogate") as raised:
        asyncio.run(model(tokenizer, source).reply(chat))
    assert raised.value.param == param
    whole = replace(message, content=SMILE, name=None, reasoning=None)
    asyncio.run(model(tokenizer, source).reply(Chat((whole, HELLO[0]))))
    assert len(source.requests) == 1


@pytest.mark.parametrize("prompt", ["", (), "x \ud83d", (5, 768), (5, -1)])
def test_a_bad_prompt_is_refused_by_name(prompt: str | tuple[int, ...], tokenizer: Tokenizer) -> None:
    source = ScriptedSource([END])
    with pytest.raises(BadRequest) as raised:
        asyncio.run(model(tokenizer, source).complete(prompt, ReplyOptions()))
    assert raised.value.param == "prompt"
    assert source.requests == []


def test_no_messages_are_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as raised:
        asyncio.run(model(tokenizer, ScriptedSource([END])).reply(Chat(())))
    assert raised.value.param == "messages"


def test_the_chat_template_makes_the_prompt_without_a_second_bos(gemma: Path, tokenizer: Tokenizer) -> None:
    source = ScriptedSource([END])
    ask(tokenizer, source)
    rendered = tokenizer.render([{"role": "user", "content": "Hello"}], {})
    assert source.requests[0].prompt == tuple(script(tokenizer, rendered))

    other = load_tokenizer(gemma)
    source = ScriptedSource([1])
    ask(other, source)
    ask(other, source, prompt="Hello")
    chat, completion = (request.prompt for request in source.requests)
    assert chat.count(2) == 1 and chat[0] == 2
    assert completion[0] == 2 and completion.count(2) == 1


def test_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    async def run() -> None:
        source = ScriptedSource([END])
        await model(tokenizer, source).reply(Chat(HELLO, template_kwargs={"enable_thinking": False}))
        assert source.requests[0].prompt[-6:].count(script(tokenizer, "</think>")[0]) == 1

    asyncio.run(run())


def test_the_loop_goes_on_while_a_prompt_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked = threading.Event()

    def slow(text: str, special: bool) -> list[int]:
        assert ticked.wait(10), "the loop stood still"
        return [5]

    async def run() -> None:
        monkeypatch.setattr(tokenizer, "encode", slow)
        asyncio.get_running_loop().call_later(0, ticked.set)
        await model(tokenizer, ScriptedSource([END])).complete("Once", ReplyOptions())

    asyncio.run(run())
