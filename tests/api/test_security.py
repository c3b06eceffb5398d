"""The door: keys, hosts, origins, content types, sizes, and bodies that are not what they say."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.api.fakes import KEY, FakeModels, ScriptedModel, serving, words

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def models() -> FakeModels:
    return FakeModels(ScriptedModel(words("x")))


async def statuses(headers: list[list[tuple[str, str]]], **settings: Any) -> list[int]:
    """What the same good request gets under each list of headers."""
    async with serving(models(), **settings) as url, httpx.AsyncClient() as client:
        answers = [await client.post(url + PATH, json=BODY, headers=one) for one in headers]
    for answer in answers:
        assert "access-control-allow-origin" not in answer.headers
        assert answer.status_code == 200 or answer.json()["error"].keys() == {
            "message",
            "type",
            "param",
            "code",
        }
    return [answer.status_code for answer in answers]


async def test_the_key_is_asked_for_in_either_header() -> None:
    right = [[("authorization", f"Bearer {KEY}")], [("authorization", f"bearer {KEY}")], [("x-api-key", KEY)]]
    wrong = [
        [],
        [("authorization", "Bearer wrong-key")],
        [("authorization", "Bearer")],
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("x-api-key", "")],
        [("x-api-key", KEY[:-1])],
        [("x-api-key", KEY), ("authorization", "Bearer wrong-key")],
        [("x-api-key", "wrong"), ("x-api-key", KEY)],
        [("x-forwarded-for", "127.0.0.1")],
    ]
    assert await statuses(right, api_key=KEY) == [200] * len(right)
    assert await statuses(wrong, api_key=KEY) == [401] * len(wrong)


async def test_a_caller_without_the_key_learns_nothing() -> None:
    served = models()
    async with serving(served, api_key=KEY) as url, httpx.AsyncClient() as client:
        answers = [
            await client.get(f"{url}/v1/models"),
            await client.get(f"{url}/nothing"),
            await client.post(url + PATH, json={**BODY, "model": "no-such"}),
            await client.post(url + PATH, content=b"not json"),
        ]
    assert [answer.status_code for answer in answers] == [401] * 4
    assert not any("tiny" in answer.text for answer in answers)
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert served.loads == []


async def test_a_foreign_host_is_refused() -> None:
    def host(name: str) -> list[tuple[str, str]]:
        return [("host", name)]

    ours = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "localhost.", "mac.local:8000"]
    foreign = ["evil.example:8000", "127.0.0.1.evil.example", "localhost@evil", "evil#localhost", "", "[::1"]
    foreign += ["10.0.0.1", "evil.example/localhost", "localhost:x"]
    assert await statuses([host(name) for name in ours], allowed_hosts=("mac.local",)) == [200] * len(ours)
    assert await statuses([host(name) for name in foreign]) == [403] * len(foreign)


async def test_reading_through_a_foreign_host_is_refused_too() -> None:
    async with serving(models()) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/v1/models", headers={"host": "evil.example"})
    assert answer.status_code == 403


async def test_a_page_of_another_origin_cannot_write() -> None:
    foreign = [
        [("origin", "https://evil.example")],
        [("origin", "null")],
        [("origin", "http://localhost:3000")],
        [("origin", "http://[")],
        [("origin", "file://localhost")],
        [("sec-fetch-site", "cross-site")],
    ]
    assert await statuses(foreign) == [403] * len(foreign)
    own = [
        [("host", "localhost:8000"), ("origin", "http://localhost:8000")],
        [("origin", "http://webui.local:3000")],
        [("sec-fetch-site", "same-origin")],
    ]
    assert await statuses(own, allowed_hosts=("webui.local",)) == [200] * len(own)


async def test_a_preflight_is_never_allowed() -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with serving(models()) as url, httpx.AsyncClient() as client:
        answer = await client.options(url + PATH, headers=headers)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({**JSON, "content-encoding": "gzip"}, 415),
        ({**JSON, "content-encoding": "zstd, gzip"}, 415),
        ({"content-type": "Application/JSON; charset=UTF-8"}, 200),
        ({**JSON, "content-encoding": "identity"}, 200),
    ],
)
async def test_a_body_must_say_that_it_is_plain_json(headers: dict[str, str], status: int) -> None:
    async with serving(models()) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + PATH, content=json.dumps(BODY).encode(), headers=headers)
    assert answer.status_code == status


async def test_too_large_a_body_is_refused_however_it_is_sent() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 1024

    served = models()
    async with serving(served, max_body_bytes=8 * 1024) as url, httpx.AsyncClient() as client:
        for content in (b" " * 9 * 1024, pieces()):
            answer = await client.post(url + PATH, content=content, headers=JSON)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert (await client.post(url + PATH, json=BODY)).status_code == 200
    assert len(served.model.chats) == 1


async def raw(url: str, request: bytes) -> bytes:
    """Everything that comes back for these bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_huge_announced_body_is_refused_before_it_comes() -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with serving(models()) as url:
        answer = await raw(url, f"{head}Content-Length: 100000000000\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


async def test_two_ways_of_framing_are_refused() -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    async with serving(models()) as url:
        assert (await raw(url, both.encode())).startswith(b"HTTP/1.1 400")


async def test_a_body_that_trickles_in_is_given_up() -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with serving(models(), body_timeout_s=0.05) as url:
        answer = await raw(url, f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b'{"model":"tiny","temperature":NaN}', "invalid_json"),
        (b'{"seed":' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[]", "invalid_value"),
        (b'"text"', "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e999}', "invalid_value"),
    ],
)
async def test_a_body_that_is_no_request_is_400(body: bytes, code: str) -> None:
    async with serving(models()) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + PATH, content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert (await client.post(url + PATH, json=BODY)).status_code == 200


async def test_absurdly_many_messages_are_refused_at_once() -> None:
    async with serving(models(), max_body_bytes=2**25) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + PATH, json={**BODY, "messages": [{}] * 100_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (rb'[{"role":"user","content":"x \ud83d y"}]', "messages[0].content"),
        (rb'[{"role":"user","content":[{"type":"text","text":"\uDE00"}]}]', "messages[0].content[0].text"),
        (rb'[{"role":"user","name":"\ud83d\ud83d","content":"x"}]', "messages[0].name"),
        (rb'[{"role":"user","\ud83d":"x"}]', "messages[0]"),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_its_place(messages: bytes, param: str) -> None:
    async with serving(models()) as url, httpx.AsyncClient() as client:
        body = b'{"model":"tiny","stream":true,"messages":' + messages + b"}"
        answer = await client.post(url + PATH, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_whole_surrogate_pair_is_a_character() -> None:
    served = models()
    async with serving(served) as url, httpx.AsyncClient() as client:
        body = rb'{"model":"tiny","messages":[{"role":"user","content":"\ud83d\ude00 \\ud83d"}]}'
        answer = await client.post(url + PATH, content=body, headers=JSON)
    assert answer.status_code == 200
    assert served.model.chats[0].messages[0].content == "😀 \\ud83d"


async def test_no_name_in_an_error_is_longer_than_a_line() -> None:
    async with serving(models()) as url, httpx.AsyncClient() as client:
        answer = await client.post(url + PATH, json={**BODY, "x" * 100_000: 1})
    assert answer.status_code == 400
    assert len(answer.text) < 1000
