"""`omlx bench`: a load client for OpenAI-compatible servers on this machine, timed as tokens arrive.

Every request is streamed and greedy, every prompt fixed, so two runs ask for the same work. It knows a
server by its URL alone.
"""

import asyncio
import ipaddress
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from omlx.errors import BadSetting, Full, ModelNotFound, OmlxError, Refused

WITHIN_S = 600.0
"""Longest silence of a server: a prompt of thousands of tokens on a CPU takes minutes."""
TOPICS = ("the sea", "a robot", "old maps", "bread", "winter", "a library", "trains", "bees")
MILL = "the river ran past the old mill and the children counted boats while bread cooled"

Clock = Callable[[], float]
"""Seconds that only grow."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a model."""

    model: str
    max_tokens: int = 128
    prompt_words: int = 1400
    """Of the long prompt in `prefix` and `again`."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A bounded number of requests, all at once or one after the other."""

    what: str
    prompts: Callable[[int], tuple[str, ...]]
    """From the number of words of a long prompt."""
    together: bool = False
    max_tokens: int | None = None
    """Where the answer's length is no part of the question."""


def story(topic: str) -> str:
    return f"Write a long story about {topic}."


def long_prompt(words: int) -> str:
    """A text that repeats itself too slowly to be one short phrase over and over."""
    mill = MILL.split()
    text = (mill[(i * 7 + i // 13 + 1) % len(mill)] for i in range(words))
    return f"Text 1: {' '.join(text)}\nSay in one line what the text is about."


STORIES = tuple(story(topic) for topic in TOPICS)
SCENARIOS = {
    "c1": Scenario("three short prompts, one after the other", lambda _: STORIES[:3]),
    "c4": Scenario("four short prompts at once", lambda _: STORIES[3:7], together=True),
    "c8": Scenario("eight short prompts at once", lambda _: STORIES, together=True),
    "prefix": Scenario("one long prompt three times", lambda w: (long_prompt(w),) * 3, max_tokens=8),
    "again": Scenario("the same long prompt once more", lambda w: (long_prompt(w),), max_tokens=8),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered request; times on the client's clock, in seconds."""

    started: float
    first: float | None
    """When the first piece of text came; None when none did."""
    last: float | None
    ended: float
    tokens: int
    prompt_tokens: int | None
    """None, here and below: the server did not say."""
    cached_tokens: int | None
    text: str

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.started

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second after the first; None where there is no second one to time."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)


@dataclass(frozen=True, slots=True)
class Figures:
    """One scenario, run once."""

    scenario: str
    requests: tuple[Timing, ...]
    wall_s: float

    @property
    def ttft_s(self) -> float | None:
        """The median over the requests that said something."""
        known = [request.ttft_s for request in self.requests if request.ttft_s is not None]
        return statistics.median(known) if known else None

    @property
    def decode_tps_each(self) -> float | None:
        """The mean of what each request saw."""
        known = [request.decode_tps for request in self.requests if request.decode_tps is not None]
        return statistics.mean(known) if known else None

    @property
    def total_tps(self) -> float:
        """All answers' tokens over the whole time, waiting for first tokens included."""
        return sum(request.tokens for request in self.requests) / self.wall_s

    def row(self) -> tuple[str, ...]:
        """For people: scenario, requests, first token, tokens/s each, tokens/s in all."""
        waited, rate = self.ttft_s, self.decode_tps_each
        return (
            f"{self.scenario}: {SCENARIOS[self.scenario].what}",
            str(len(self.requests)),
            "nothing said" if waited is None else f"{waited:.3f} s",
            "too short" if rate is None else f"{rate:.1f}",
            f"{self.total_tps:.1f}",
        )

    def json(self) -> str:
        """One line."""
        fields = {
            "scenario": self.scenario,
            "requests": len(self.requests),
            "ttft_median_s": _rounded(self.ttft_s),
            "ttft_s": [_rounded(request.ttft_s) for request in self.requests],
            "decode_tps_each": _rounded(self.decode_tps_each),
            "total_tps": _rounded(self.total_tps),
            "wall_s": _rounded(self.wall_s),
            "tokens": [request.tokens for request in self.requests],
            "prompt_tokens": [request.prompt_tokens for request in self.requests],
            "cached": [request.cached_tokens for request in self.requests],
            "text": self.requests[0].text[:60],
        }
        return json.dumps(fields, ensure_ascii=False)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def find_scenarios(names: str) -> tuple[str, ...]:
    """From "c1,c4" to names of the table. Raises BadSetting for one that is not there."""
    found = tuple(name.strip() for name in names.split(","))
    for name in found:
        if name not in SCENARIOS:
            raise BadSetting(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return found


def check_url(url: str) -> str:
    """The URL without a slash at its end. Raises BadSetting for other machines: load is for one's own."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # half an IPv6 address, a port that is no number
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise BadSetting(f"--url {url}: write it as http://127.0.0.1:8000/v1")
    if not _is_loopback(host):
        raise BadSetting(
            f"--url {url}: {host} is not this machine; bench loads only servers at 127.0.0.1, "
            "::1 or localhost, so run it where the server runs"
        )
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LoadClient:
    """A context that speaks to one server. Every error that it raises is one line of our own tree."""

    def __init__(self, url: str, api_key: str | None = None, *, clock: Clock = time.perf_counter) -> None:
        """Raises BadSetting where `url` is not a server's on this machine."""
        self.url = check_url(url)
        self._clock = clock
        # Loopback: a proxy from the environment must not come between.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(WITHIN_S, connect=5.0),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_model(self, wanted: str | None) -> str:
        """`wanted`, or the only model there is. Raises ModelNotFound, BadSetting where there are several."""
        try:
            answer = await self._http.get(f"{self.url}/models")
            _check(answer)
            ids = [str(card["id"]) for card in answer.json()["data"]]
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(f"{self.url}/models is not a list of models: is the URL's end /v1?") from error
        if wanted is not None and wanted not in ids:
            raise ModelNotFound(f"no model {wanted!r} at {self.url}; there are {', '.join(ids) or 'none'}")
        if wanted is None and len(ids) != 1:
            raise BadSetting(f"{self.url} has {len(ids)} models: name one with --model ({', '.join(ids)})")
        return wanted or ids[0]

    async def warm_up(self, load: Load) -> None:
        """One token, not timed: a server may load a model only when it is asked for."""
        await self.ask(load.model, "Hello", max_tokens=1)

    async def run(self, name: str, load: Load) -> Figures:
        """One scenario of the table. Raises Refused, Full, OmlxError as the server answers."""
        scenario = SCENARIOS[name]
        most = scenario.max_tokens or load.max_tokens
        prompts = scenario.prompts(load.prompt_words)
        started = self._clock()
        if scenario.together:
            asked = [asyncio.create_task(self.ask(load.model, prompt, most)) for prompt in prompts]
            try:
                timings = await asyncio.gather(*asked)
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
        else:
            timings = [await self.ask(load.model, prompt, most) for prompt in prompts]
        return Figures(name, tuple(timings), self._clock() - started)

    async def ask(self, model: str, prompt: str, max_tokens: int, system: str | None = None) -> Timing:
        """One streamed greedy answer. Raises like `run`."""
        before = [] if system is None else [{"role": "system", "content": system}]
        body = {
            "model": model,
            "messages": [*before, {"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        first = last = None
        started = self._clock()
        async for event in self._events(body):
            usage = event.get("usage") or usage
            if text := _text(event):
                last = self._clock()
                first = last if first is None else first
                pieces.append(text)
        return Timing(
            started,
            first,
            last,
            self._clock(),
            # A server that tells no usage mostly sends one piece a token.
            tokens=usage.get("completion_tokens") or len(pieces),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            text="".join(pieces),
        )

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The stream's events up to [DONE]; comments are keep-alives."""
        try:
            async with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as answer:
                if not answer.is_success:
                    await answer.aread()
                _check(answer)
                async for line in _lines(answer):
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield self._event(data)
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        raise OmlxError(f"{self.url} ended an answer without [DONE]")

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except json.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise OmlxError(f"{self.url} streamed an event that is no JSON object: {data[:80]}")
        if error := event.get("error"):
            raise OmlxError(f"{self.url} broke the answer off: {_sentence(error)}")
        return event

    def _silent(self, error: httpx.HTTPError) -> OmlxError:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return Refused(
                f"no server answers at {self.url}: start one with `omlx serve MODEL_DIR`, "
                "or say where it is with --url"
            )
        if isinstance(error, httpx.TimeoutException):
            return OmlxError(f"{self.url} has been silent for {WITHIN_S:.0f} s")
        return OmlxError(f"{self.url} hung up in the middle of an answer ({type(error).__name__})")


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Split at line feeds alone: httpx's own lines also end at U+2028, which may stand inside a text."""
    rest = b""
    async for block in answer.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def _text(event: dict[str, Any]) -> str:
    """What the event adds to the answer or to the thinking before it."""
    names = ("content", "reasoning_content", "reasoning")
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
    return "".join(next((delta[name] for name in names if delta.get(name)), "") for delta in deltas)


def _check(answer: httpx.Response) -> None:
    """Raises what an HTTP error means for the caller, in the server's own sentence. The body was read."""
    if answer.is_success:
        return
    try:
        said = _sentence(answer.json().get("error"))
    except (ValueError, AttributeError):
        said = answer.text[:200].strip() or "no reason given"
    sentence = f"{answer.url} answered {answer.status_code}: {said}"
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise Full(sentence)
    if answer.is_client_error or answer.is_redirect:
        raise Refused(sentence)
    raise OmlxError(sentence)


def _sentence(error: object) -> str:
    if isinstance(error, dict) and error.get("message"):
        return str(error["message"])
    return str(error)
