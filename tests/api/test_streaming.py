"""Streams: the grammar of the events, the heartbeat, errors on the way, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import openai
import pytest

from omlx.errors import Full, ModelFailed
from omlx.node.chat import Delta, TokenInfo
from omlx.node.sequence import Finish
from tests.api.fakes import STOP, FakeModels, ScriptedModel, serving, talking, words

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": "tiny", "messages": HI}
STREAM = {**BODY, "stream": True}
LIMIT_S = 5.0
"""No wait of these tests is longer."""


async def events(body: dict[str, Any], *script: Any, path: str = "chat/completions") -> list[str]:
    """The data of every event of one whole stream."""
    models = FakeModels(ScriptedModel(script))
    async with serving(models) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/{path}", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def test_a_stream_says_the_same_as_an_answer_in_one_piece() -> None:
    async with talking(words("Hel", "lo \u2028", "wörld 😀")) as (client, _):
        whole = await client.chat.completions.create(model="tiny", messages=HI)
        chunks = [
            c async for c in await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        ]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == "Hello \u2028wörld 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}]
)
async def test_no_usage_comes_unless_it_is_asked_for(path: str, options: dict[str, Any]) -> None:
    ask = {
        "model": "tiny",
        "stream": True,
        **({"prompt": "x"} if path == "completions" else {"messages": HI}),
    }
    *chunks, done = await events(ask | options, *words("a"), path=path)
    assert done == "[DONE]" and chunks
    for chunk in map(json.loads, chunks):
        assert "usage" not in chunk
        assert len(chunk["choices"]) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_usage_comes_once_and_last_when_it_is_asked_for(path: str) -> None:
    ask = {
        "model": "tiny",
        "stream": True,
        **({"prompt": "x"} if path == "completions" else {"messages": HI}),
    }
    ask["stream_options"] = {"include_usage": True}
    *chunks, last, done = await events(ask, *words("a", "b"), path=path)
    assert done == "[DONE]" and chunks
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert json.loads(last)["choices"] == []
    assert json.loads(last)["usage"]["total_tokens"] == 9


async def test_reasoning_and_logprobs_come_in_their_own_fields() -> None:
    token = TokenInfo("a", (97,), -0.5)
    body = {**STREAM, "logprobs": True}
    script = [Delta(reasoning="hm", tokens=()), Delta("a", tokens=(token,), finish=Finish.LENGTH)]
    chunks = [json.loads(chunk)["choices"][0] for chunk in (await events(body, *script))[:-1]]
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "a"},
        {},
    ]
    assert chunks[2]["logprobs"]["content"][0]["logprob"] == -0.5
    assert chunks[3]["finish_reason"] == "length"


async def test_n_choices_stream_side_by_side() -> None:
    held = asyncio.Event()
    async with talking([held, *words("slow")], words("fast")) as (client, _):
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True, n=2)
        texts = ["", ""]
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason and choice.index == 1:
                assert texts == ["", "fast"]
                held.set()
    assert texts == ["slow", "fast"]


async def test_headers_and_heartbeats_come_while_the_engine_is_silent() -> None:
    held = asyncio.Event()
    models = FakeModels(ScriptedModel([held, *words("x")]))
    async with (
        serving(models, keepalive_s=0.02) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer,
    ):
        assert answer.status_code == 200
        heartbeats = 0
        text = ""
        async for line in answer.aiter_lines():
            text += line + "\n"
            heartbeats += line == ": keep-alive"
            if heartbeats == 3:
                held.set()
    assert text.index('"role":"assistant"') < text.index(": keep-alive")
    assert text.endswith("data: [DONE]\n\n")


async def test_a_long_load_is_bridged_and_its_failure_is_an_event() -> None:
    models = FakeModels(ScriptedModel([STOP]))
    models.loading = asyncio.Event()
    models.load_error = ModelFailed("tiny has failed")
    async with (
        serving(models, keepalive_s=0.02) as url,
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == ": keep-alive"
        models.loading.set()
        rest = [line async for line in lines if line.startswith("data:")]
    assert answer.status_code == 200
    assert len(rest) == 1
    assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "model_failed"


async def test_an_error_after_the_first_byte_is_the_last_event() -> None:
    *_, text, error = await events(STREAM, Delta("a"), ModelFailed("tiny has failed"))
    assert json.loads(text)["choices"][0]["delta"]["content"] == "a"
    assert json.loads(error)["error"] == {
        "message": "tiny has failed",
        "type": "server_error",
        "param": None,
        "code": "model_failed",
    }


async def test_the_official_client_raises_the_error_of_a_stream() -> None:
    async with talking([Delta("a"), Full("the queue is full")]) as (client, _):
        stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="the queue is full"):
            async for _chunk in stream:
                pass


async def test_an_error_nobody_foresaw_is_logged_and_says_nothing_of_itself(
    logged: list[MutableMapping[str, Any]],
) -> None:
    secret = RuntimeError("/home/me/secret")
    models = FakeModels(ScriptedModel([secret], [Delta("a"), secret], words("x")))
    async with serving(models) as url, httpx.AsyncClient() as client:
        whole = await client.post(f"{url}/v1/chat/completions", json=BODY)
        assert whole.status_code == 500
        assert whole.headers["x-request-id"] in whole.json()["error"]["message"]
        async with client.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as answer:
            received = ""
            with pytest.raises(httpx.RemoteProtocolError):
                async for piece in answer.aiter_text():
                    received += piece
        assert "internal_error" in received and "[DONE]" not in received
        assert answer.headers["x-request-id"] in received
        assert "secret" not in whole.text + received
        assert [entry["exc_info"] for entry in logged if entry["log_level"] == "error"] == [secret, secret]
        assert (await client.post(f"{url}/v1/chat/completions", json=BODY)).status_code == 200


async def hang_up(url: str, body: dict[str, Any], until: asyncio.Event) -> None:
    """Sends a request on a bare socket and closes it as soon as `until` is set."""
    content = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await until.wait()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", [[], [Delta("a")]], ids=["waiting", "decoding"])
async def test_a_client_that_goes_away_gives_its_place_back(before: list[Delta], stream: bool) -> None:
    never = asyncio.Event()
    models = FakeModels(ScriptedModel([*before, never]))
    async with asyncio.timeout(LIMIT_S), serving(models) as url:
        await hang_up(url, {**BODY, "stream": stream}, models.model.waiting)
        await models.model.quiet.wait()
        assert models.model.open_replies == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_during_the_load_is_never_started(stream: bool) -> None:
    models = FakeModels(ScriptedModel([STOP]))
    models.loading = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), serving(models) as url:
        await hang_up(url, {**BODY, "stream": stream}, models.load_started)
        async with httpx.AsyncClient() as client:
            await client.get(f"{url}/health")
    assert models.model.chats == []


async def test_a_client_that_goes_away_closes_all_its_choices_and_no_others() -> None:
    never, later = asyncio.Event(), asyncio.Event()
    scripts = [[never], [never], [later, *words("x")]]
    async with asyncio.timeout(LIMIT_S), talking(*scripts) as (client, models):
        url = str(client.base_url)
        gone = asyncio.create_task(hang_up(url, {**STREAM, "n": 2}, models.model.waiting))
        await models.model.waiting.wait()
        async with asyncio.TaskGroup() as group:
            other = group.create_task(client.chat.completions.create(model="tiny", messages=HI))
            await gone
            later.set()
        assert other.result().choices[0].message.content == "x"
        await models.model.quiet.wait()


async def test_a_client_that_stops_reading_a_stream_gives_its_place_back() -> None:
    async def endless() -> AsyncIterator[str]:
        async with await client.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
            async for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    never = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), talking([Delta("a"), never]) as (client, models):
        texts = endless()
        assert [await anext(texts), await anext(texts)] == ["", "a"]
        await texts.aclose()
        await models.model.quiet.wait()


async def test_a_client_that_times_out_on_an_answer_in_one_piece_cancels_it() -> None:
    never = asyncio.Event()
    async with asyncio.timeout(LIMIT_S), talking([never]) as (client, models):
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="tiny", messages=HI, timeout=0.1)
        await models.model.quiet.wait()
