"""The load client: its arithmetic, its scenarios against a scripted server, and its one-line errors."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from rich.console import Console
from typer.testing import CliRunner, Result

from omlx import commands
from omlx.bench import SCENARIOS, Figures, Load, LoadClient, Timing, check_url, find_scenarios
from omlx.errors import BadSetting, Full, ModelNotFound, OmlxError, Refused

pytestmark = pytest.mark.anyio

LIMIT_S = 10.0
"""No wait of these tests is longer."""
USAGE = {"completion_tokens": 7, "prompt_tokens": 30, "prompt_tokens_details": {"cached_tokens": 16}}
WIDE = {"COLUMNS": "200"}
LOAD = Load("scripted", max_tokens=7, prompt_words=20)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def piece(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]}, ensure_ascii=False)}\n\n"


def usage(told: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [], 'usage': told})}\n\n"


DONE = "data: [DONE]\n\n"
ANSWER = (piece("one "), ": keep-alive\n\n", piece("two "), piece("three"), usage(USAGE), DONE)


@dataclass
class Script:
    """A server that says the same to everybody, once `at_once` of them are there."""

    events: tuple[str, ...] = ANSWER
    at_once: int = 1
    models: tuple[str, ...] = ("scripted",)
    refusal: Response | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    here: int = 0
    most_here: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": id} for id in self.models]}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            self.bodies.append(await request.json())
            self.keys.add(request.headers.get("authorization"))
            return self.refusal or StreamingResponse(self.stream(), media_type="text/event-stream")

        return app

    async def stream(self) -> AsyncIterator[str]:
        self.here += 1
        self.most_here = max(self.most_here, self.here)
        if self.here == self.at_once:
            self.enough.set()
        async with asyncio.timeout(LIMIT_S):
            await self.enough.wait()
        for event in self.events:
            yield event
        self.here -= 1


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(script.app(), lifespan="off", log_level="critical"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def talking(script: Script) -> AsyncIterator[LoadClient]:
    """A client whose clock goes on by one second whenever it is looked at."""
    ticks = count(100)
    async with serving(script) as url, LoadClient(url, clock=lambda: float(next(ticks))) as client:
        yield client


def timing(started: float, first: float | None, last: float | None, tokens: int) -> Timing:
    ended = started if last is None else last
    return Timing(started, first, last, ended, tokens, prompt_tokens=None, cached_tokens=None, text="x")


# ------------------------------------------------------------------ arithmetic


def test_the_first_token_is_no_part_of_the_decode_rate() -> None:
    one = timing(started=10.0, first=12.0, last=14.0, tokens=9)
    assert one.ttft_s == 2.0
    assert one.decode_tps == 4.0


def test_an_answer_of_one_piece_has_no_decode_rate() -> None:
    assert timing(10.0, 12.0, 12.0, tokens=1).decode_tps is None


def test_an_answer_without_text_has_no_first_token() -> None:
    silent = timing(10.0, None, None, tokens=3)
    assert silent.ttft_s is None
    assert silent.decode_tps is None


def test_figures_are_the_median_first_token_the_mean_rate_and_the_sum_of_tokens() -> None:
    figures = Figures(
        "c4",
        (
            timing(0.0, 1.0, 2.0, tokens=11),  # 10 tokens/s
            timing(0.0, 2.0, 3.0, tokens=21),  # 20 tokens/s
            timing(0.0, 6.0, 6.0, tokens=1),
            timing(0.0, None, None, tokens=7),
        ),
        wall_s=8.0,
    )
    assert figures.ttft_s == 2.0
    assert figures.decode_tps_each == 15.0
    assert figures.total_tps == 5.0
    assert figures.row()[1:] == ("4", "2.000 s", "15.0", "5.0")


def test_the_json_line_says_null_for_what_was_not_measured() -> None:
    line = Figures("again", (timing(0.0, None, None, tokens=0),), wall_s=2.0).json()
    assert "\n" not in line
    told = json.loads(line)
    assert (told["ttft_median_s"], told["decode_tps_each"], told["total_tps"]) == (None, None, 0.0)
    assert told["ttft_s"] == told["cached"] == [None]


# ------------------------------------------------------------------ against a server


async def test_one_request_is_timed_from_its_sending_to_its_pieces() -> None:
    script = Script()
    async with talking(script) as client:
        one = await client.ask("scripted", "hello", max_tokens=7)
    assert one.text == "one two three"
    assert (one.tokens, one.prompt_tokens, one.cached_tokens) == (7, 30, 16)
    # The clock was looked at when the request began, at each of three pieces and at the end.
    assert (one.ttft_s, one.decode_tps) == (1.0, 3.0)
    (body,) = script.bodies
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("scripted", 0, 7)
    assert body["stream"] is True


async def test_without_usage_each_piece_counts_as_a_token() -> None:
    async with talking(Script((piece("a"), piece("b"), DONE))) as client:
        one = await client.ask("scripted", "hello", max_tokens=7)
    assert (one.tokens, one.prompt_tokens, one.cached_tokens) == (2, None, None)


async def test_what_a_model_thinks_counts_as_its_first_token() -> None:
    thought = f"data: {json.dumps({'choices': [{'delta': {'reasoning_content': 'hm '}}]})}\n\n"
    async with talking(Script((thought, piece("yes"), usage(USAGE), DONE))) as client:
        one = await client.ask("scripted", "hello", max_tokens=7)
    assert one.text == "hm yes"
    assert one.ttft_s == 1.0


async def test_a_line_separator_inside_a_text_does_not_end_the_event() -> None:
    async with talking(Script((piece("one\u2028two\x85three"), DONE))) as client:
        assert (await client.ask("scripted", "hello", max_tokens=7)).text == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("name", "requests", "at_once"),
    [("c1", 3, 1), ("c4", 4, 4), ("c8", 8, 8), ("prefix", 3, 1), ("again", 1, 1)],
)
async def test_a_scenario_asks_as_many_as_it_says_and_as_many_at_once(
    name: str, requests: int, at_once: int
) -> None:
    script = Script(at_once=at_once)
    async with talking(script) as client:
        figures = await client.run(name, LOAD)
    assert script.most_here == at_once
    assert len(figures.requests) == len(script.bodies) == requests
    assert figures.scenario == name
    assert figures.total_tps == requests * 7 / figures.wall_s
    prompts = {body["messages"][0]["content"] for body in script.bodies}
    assert len(prompts) == (1 if name in ("prefix", "again") else requests)


async def test_the_long_prompt_is_the_same_in_every_run_and_as_long_as_asked() -> None:
    script = Script()
    async with talking(script) as client:
        await client.run("prefix", LOAD)
        await client.run("again", LOAD)
    prompts = {body["messages"][0]["content"] for body in script.bodies}
    (prompt,) = prompts
    assert len(prompt.splitlines()[0].removeprefix("Text 1: ").split()) == LOAD.prompt_words
    assert {body["max_tokens"] for body in script.bodies} == {8}


async def test_the_only_model_is_found_and_the_key_is_shown() -> None:
    script = Script()
    async with serving(script) as url, LoadClient(url + "/", api_key="correct-horse") as client:
        assert await client.find_model(None) == "scripted"
        await client.warm_up(LOAD)
    assert script.keys == {"Bearer correct-horse"}
    assert script.bodies[0]["max_tokens"] == 1


# ------------------------------------------------------------------ errors


async def test_an_unknown_model_is_told_with_those_that_are_there() -> None:
    async with talking(Script(models=("a", "b"))) as client:
        with pytest.raises(ModelNotFound, match=r"no model 'c' at .*; there are a, b"):
            await client.find_model("c")


async def test_with_several_models_one_must_be_named() -> None:
    async with talking(Script(models=("a", "b"))) as client:
        with pytest.raises(BadSetting, match=r"has 2 models: name one with --model \(a, b\)"):
            await client.find_model(None)
        assert await client.find_model("b") == "b"


async def test_no_server_says_how_to_start_one() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets the port
        async with LoadClient(f"http://127.0.0.1:{unused.getsockname()[1]}/v1") as client:
            with pytest.raises(Refused, match=r"no server answers at .* start one with `omlx serve"):
                await client.find_model(None)


def openai_error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "code": None}}, status)


@pytest.mark.parametrize(
    ("answer", "kind", "sentence"),
    [
        (openai_error(400, "prompt is too long"), Refused, "answered 400: prompt is too long"),
        (openai_error(503, "the queue is full"), Full, "answered 503: the queue is full"),
        (openai_error(500, "it broke"), OmlxError, "answered 500: it broke"),
        (Response("<html>bad gateway", 502), OmlxError, "answered 502: <html>bad gateway"),
        (Response("", 302, {"location": "http://10.0.0.1/v1"}), Refused, "answered 302: no reason given"),
        (JSONResponse({"error": "no"}, 404), Refused, "answered 404: no"),
        (JSONResponse(["no"], 404), Refused, r'answered 404: \["no"\]'),
    ],
)
async def test_an_http_error_is_told_in_the_servers_own_sentence(
    answer: Response, kind: type[OmlxError], sentence: str
) -> None:
    async with talking(Script(refusal=answer)) as client:
        with pytest.raises(kind, match=sentence) as raised:
            await client.run("c4", LOAD)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ((piece("a"), 'data: {"error": {"message": "the model failed"}}\n\n'), "off: the model failed"),
        ((piece("a"),), r"ended an answer without \[DONE\]"),
        ((piece("a"), "data: {broken\n\n"), "no JSON object: {broken"),
        (("data: 3\n\n",), "no JSON object: 3"),
    ],
)
async def test_an_answer_that_breaks_off_is_no_measurement(events: tuple[str, ...], sentence: str) -> None:
    async with talking(Script(events)) as client:
        with pytest.raises(OmlxError, match=sentence):
            await client.ask("scripted", "hello", max_tokens=7)


async def test_something_that_is_no_model_server_is_told_from_one() -> None:
    script = Script()
    async with serving(script) as url, LoadClient(url.removesuffix("/v1")) as client:
        with pytest.raises(Refused, match="answered 404"):
            await client.find_model(None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_this_machine_has_several_names(host: str) -> None:
    assert check_url(f"http://{host}:8000/v1/") == f"http://{host}:8000/v1"


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "example.org", "0.0.0.0", "localhost.example.org", "127.0.0.1.nip.io", "2130706433"]
)
def test_other_machines_are_refused_by_name(host: str) -> None:
    with pytest.raises(BadSetting, match=f"{host} is not this machine"):
        check_url(f"http://{host}:8000/v1")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://127.0.0.1/v1", "http://", "http://[::1", "http://127.0.0.1:x"]
)
def test_what_is_no_url_says_how_to_write_one(url: str) -> None:
    with pytest.raises(BadSetting, match=r"write it as http://127.0.0.1:8000/v1"):
        check_url(url)


def test_an_unknown_scenario_names_those_there_are() -> None:
    assert find_scenarios("c1, again") == ("c1", "again")
    with pytest.raises(BadSetting, match=f"no scenario 'c3'; there are {', '.join(SCENARIOS)}"):
        find_scenarios("c1,c3")


# ------------------------------------------------------------------ the command


async def run_bench(*arguments: str) -> Result:
    """The command as a user calls it, in a thread because it runs a loop of its own."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(commands.app, ["bench", *arguments], env=WIDE))


async def test_the_command_prints_one_json_line_a_scenario() -> None:
    script = Script()
    async with serving(script) as url:
        result = await run_bench("--url", url, "--scenario", "c1,again", "--max-tokens", "5", "--json")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["scenario"], line["tokens"]) for line in lines] == [("c1", [7, 7, 7]), ("again", [7])]
    assert [body["max_tokens"] for body in script.bodies] == [1, 5, 5, 5, 8]  # the first one warms up


async def test_the_command_prints_a_table_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "console", Console(width=120))  # else as wide as where the tests run
    async with serving(Script()) as url:
        result = await run_bench("--url", url, "--scenario", "c1,prefix", "--prompt-words", "9")
    assert result.exit_code == 0
    assert f"scripted at {url}" in result.stdout
    assert "c1: three short prompts" in result.stdout
    assert "prefix: one long prompt three times" in result.stdout


async def test_the_command_refuses_before_it_asks_anybody() -> None:
    script = Script()
    async with serving(script) as url:
        unknown = await run_bench("--url", url, "--scenario", "c1,nothing")
        elsewhere = await run_bench("--url", "http://192.0.2.1:8000/v1")
    assert isinstance(unknown.exception, BadSetting)
    assert isinstance(elsewhere.exception, BadSetting)
    assert script.bodies == []
