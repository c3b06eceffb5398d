"""POST /v1/chat/completions in one piece: what is asked of the model, what comes back, what is refused."""

from typing import Any

import httpx
import openai
import pytest

from omlx.errors import BadRequest, DoesNotFit, Full, ModelFailed, PromptTooLong
from omlx.node.chat import Delta, Message, TokenInfo, TopToken
from omlx.node.sequence import Finish
from tests.api.fakes import STOP, FakeModels, ScriptedModel, serving, talking, words

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def refusal(body: dict[str, Any]) -> dict[str, Any]:
    """The error that this body, on top of a good one, is refused with; the model was not asked."""
    models = FakeModels(ScriptedModel(words("no")))
    async with serving(models) as url, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/chat/completions", json={"model": "tiny", "messages": HI, **body}
        )
    assert answer.status_code == 400, answer.text
    assert models.loads == []
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


async def test_an_answer_is_its_deltas_put_together() -> None:
    async with talking(words("Hel", "lo")) as (client, models):
        answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer._request_id
    assert models.model.chats[0].messages == (Message("user", "hi"),)


async def test_usage_counts_the_prompt_the_answer_and_its_reasoning() -> None:
    script = [Delta(reasoning="hm"), Delta(text="a"), Delta(text="b"), STOP]
    async with talking(script) as (client, _):
        answer = await client.chat.completions.create(model="tiny", messages=HI)
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert answer.choices[0].message.model_dump()["reasoning_content"] == "hm"


async def test_an_answer_may_be_empty_or_cut_by_its_length() -> None:
    async with talking([STOP], [Delta("a"), Delta("b", finish=Finish.LENGTH)]) as (client, _):
        empty = await client.chat.completions.create(model="tiny", messages=HI)
        cut = await client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
    assert (empty.choices[0].message.content, empty.choices[0].finish_reason) == ("", "stop")
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("ab", "length")


async def test_every_option_reaches_the_model() -> None:
    async with talking(words("x")) as (client, models):
        await client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_completion_tokens=5,
            temperature=0,
            top_p=0.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={"12": -100},
            seed=3,
            stop=["a", "b"],
            logprobs=True,
            top_logprobs=2,
            extra_body={
                "top_k": 4,
                "min_p": 0.1,
                "repetition_penalty": 1.2,
                "chat_template_kwargs": {"enable_thinking": True},
            },
        )
    chat = models.model.chats[0]
    options = chat.options
    assert (options.max_tokens, options.temperature, options.top_p, options.top_k) == (5, 0, 0.5, 4)
    assert (options.min_p, options.repetition_penalty) == (0.1, 1.2)
    assert (options.presence_penalty, options.frequency_penalty) == (-1, 2)
    assert (options.logit_bias, options.seed, options.stop) == (((12, -100.0),), 3, ("a", "b"))
    assert options.top_logprobs == 2
    assert chat.template_kwargs == {"enable_thinking": True}


async def test_null_means_not_set() -> None:
    fields = "max_tokens max_completion_tokens temperature top_p top_k min_p repetition_penalty seed stop n"
    fields += " presence_penalty frequency_penalty logit_bias stream stream_options logprobs top_logprobs"
    fields += (
        " tools tool_choice functions function_call response_format user metadata store modalities audio"
    )
    fields += " chat_template_kwargs reasoning_effort prediction web_search_options parallel_tool_calls"
    body = {"model": "tiny", "messages": HI} | dict.fromkeys(fields.split())
    models = FakeModels(ScriptedModel(words("x")))
    async with serving(models) as url, httpx.AsyncClient() as client:
        null = await client.post(f"{url}/v1/chat/completions", json=body)
        absent = await client.post(f"{url}/v1/chat/completions", json={"model": "tiny", "messages": HI})
    assert (null.status_code, absent.status_code) == (200, 200)
    assert models.model.chats[0] == models.model.chats[1]


async def test_values_that_ask_for_nothing_are_taken() -> None:
    body: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "reasoning_effort": "none",
    }
    async with talking(words("x")) as (client, models):
        await client.chat.completions.create(model="tiny", messages=HI, extra_body=body)
    assert models.model.chats[0].template_kwargs == {"enable_thinking": False}


async def test_text_parts_are_joined_in_order_and_roles_pass() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": t} for t in ("a", "b", "c")]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [], "refusal": None},
        {"role": "assistant"},
        {"role": "user", "content": "z"},
    ]
    async with talking(words("x")) as (client, models):
        await client.chat.completions.create(model="tiny", messages=messages)
    assert models.model.chats[0].messages == (
        Message("system", "s"),
        Message("developer", "d"),
        Message("user", "abc", name="ann"),
        Message("assistant", "", reasoning="r"),
        Message("assistant", ""),
        Message("user", "z"),
    )


async def test_n_choices_draw_from_seeds_of_their_own() -> None:
    async with talking(words("a"), words("b"), words("c")) as (client, models):
        answer = await client.chat.completions.create(model="tiny", messages=HI, n=3, seed=40)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert [chat.options.seed for chat in models.model.chats] == [40, 41, 42]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)


async def test_n_choices_without_a_seed_get_none() -> None:
    async with talking(words("a")) as (client, models):
        await client.chat.completions.create(model="tiny", messages=HI, n=2)
    assert [chat.options.seed for chat in models.model.chats] == [None, None]


async def test_logprobs_have_bytes_and_alternatives() -> None:
    token = TokenInfo("é", (0xC3, 0xA9), -0.5, (TopToken("é", (0xC3, 0xA9), -0.5), TopToken("e", (101,), -1)))
    lost = TokenInfo("x", (120,), float("-inf"))
    async with talking([Delta("éx", tokens=(token, lost)), STOP]) as (client, models):
        answer = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, top_logprobs=2
        )
        without = await client.chat.completions.create(model="tiny", messages=HI)
    assert models.model.chats[0].options.top_logprobs == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert logprobs.content[0].bytes == [0xC3, 0xA9]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["é", "e"]
    assert logprobs.content[1].logprob == -9999.0
    assert without.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.5, "5", True, []]),
        ("max_completion_tokens", [0, 2.5]),
        ("temperature", [-1, 3, "1", True]),
        ("top_p", [0, 1.1]),
        ("top_k", [-1, 1.5]),
        ("min_p", [-0.1, 2]),
        ("repetition_penalty", [0]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [3]),
        ("logit_bias", [{"x": 1}, {"1": 101}, [1]]),
        ("seed", [1.5, "1", 2**63]),
        ("n", [0, 17, 1.5]),
        ("top_logprobs", [3]),
        ("stream", ["yes", 1]),
        ("stream_options", [{"include_usage": True}, 5]),
        ("stop", [5, list("abcde"), ""]),
        ("messages", [[], "hi", None, {}]),
        ("model", ["", None, 5, "x" * 600]),
        ("chat_template_kwargs", [5]),
    ],
)
async def test_a_value_out_of_bounds_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        error = await refusal({field: value})
        assert error["param"] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
    ],
)
async def test_a_field_that_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = await refusal({field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


async def test_an_unknown_field_is_refused_by_name() -> None:
    error = await refusal({"temprature": 0.5})
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role"),
        ([*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0].reasoning_content"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        (["hi"], "messages[0]"),
    ],
)
async def test_a_bad_message_is_refused_by_its_place(messages: list[Any], param: str) -> None:
    assert (await refusal({"messages": messages}))["param"] == param


async def test_contradictions_are_refused() -> None:
    assert (await refusal({"max_tokens": 4, "max_completion_tokens": 5}))["param"] == "max_completion_tokens"
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert (await refusal(both))["param"] == "reasoning_effort"


async def test_equal_limits_are_no_contradiction_and_a_whole_number_may_be_written_as_1e9() -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":1e9,'
    body += b'"max_completion_tokens":1000000000}'
    models = FakeModels(ScriptedModel(words("x")))
    async with serving(models) as url, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 200
    assert models.model.chats[0].options.max_tokens == 10**9


async def test_a_missing_model_or_messages_is_named() -> None:
    async with serving(FakeModels(ScriptedModel([STOP]))) as url, httpx.AsyncClient() as client:
        for body, param in (({"messages": HI}, "model"), ({"model": "tiny"}, "messages")):
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "name", ["no-such", "TINY", "tiny/", "../../etc", "/etc", "a\u0000b", "..\\x", "%2e%2e%2fx", "."]
)
async def test_an_unknown_model_is_404_names_those_there_are_and_loads_nothing(name: str) -> None:
    async with talking([STOP]) as (client, models):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model=name, messages=HI)
    assert caught.value.code == "model_not_found"
    assert "tiny, Org/Name" in caught.value.message
    assert models.loads == []


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (PromptTooLong(5000, 4096), 400, "context_length_exceeded", None),
        (BadRequest("stop[0] is empty", "stop[0]"), 400, None, None),
        (Full("the queue is full", retry_after_s=3), 503, "overloaded", "3"),
        (ModelFailed("tiny has failed"), 503, "model_failed", "30"),
        (DoesNotFit("tiny needs 5 GB more", 5 * 10**9), 400, "model_does_not_fit", None),
    ],
)
async def test_a_refusal_of_the_model_has_its_status(
    error: Exception, status: int, code: str | None, retry_after: str | None
) -> None:
    for stream in (False, True):
        models = FakeModels(ScriptedModel([STOP]))
        models.model.refusals[0] = error
        async with serving(models) as url, httpx.AsyncClient() as client:
            answer = await client.post(
                f"{url}/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": stream}
            )
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["message"] == str(error)
        assert answer.headers.get("retry-after") == retry_after


async def test_choices_that_have_a_place_give_it_back_when_another_finds_none() -> None:
    def third_is_refused(models: FakeModels) -> None:
        models.model.refusals[2] = Full("the queue is full")

    async with talking(words("x"), prepare=third_is_refused) as (client, models):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=HI, n=4)
        assert len(models.model.chats) == 3
        assert models.model.open_replies == 0


async def test_a_failure_half_way_has_its_true_status_and_the_next_request_works() -> None:
    async with talking([Delta("a"), ModelFailed("tiny has failed")], words("x")) as (client, _):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="tiny", messages=HI)
        assert caught.value.status_code == 503
        answer = await client.chat.completions.create(model="tiny", messages=HI)
        assert answer.choices[0].message.content == "x"
