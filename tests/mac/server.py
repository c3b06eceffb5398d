"""`omlx serve` as a child, and its answers as they stream over HTTP."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.mac.machines import OMLX, Failed, complaint

READY_WITHIN_S = 1800.0
"""A node that lacks its layers is sent them first."""
ENDS_WITHIN_S = 60.0
ANSWER_WITHIN_S = 300.0
SILENT_S = 60.0
"""Longest time without a byte; a server that computes sends comments."""
LOOK_WITHIN_S = 10.0
LOOK_EVERY_S = 0.2
QUESTION = "Write a long story about the sea."
TOKENS = 96
FEW = 5
"""Pieces after which an answer is under way."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed greedy answer, thinking included. Times in seconds."""

    text: str
    finish: str | None
    error: str | None
    """In the server's words; None: it is whole."""
    tokens: int
    first_s: float
    decode_s: float
    """From the first piece to the last."""
    longest_pause_s: float

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def figures(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, the first after {self.first_s:.2f} s"


@dataclass(slots=True)
class _Hearing:
    """An answer while it comes in."""

    started: float
    text: str = ""
    finish: str | None = None
    error: str | None = None
    pieces: int = 0
    told_tokens: int = 0
    first: float | None = None
    last: float | None = None
    pause_s: float = 0.0

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = sentence(event)
            return
        self.told_tokens = (event.get("usage") or {}).get("completion_tokens") or self.told_tokens
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            if piece := (delta.get("reasoning_content") or "") + (delta.get("content") or ""):
                self._note(piece)
            self.finish = choice.get("finish_reason") or self.finish

    def _note(self, piece: str) -> None:
        now = time.monotonic()
        if self.last is not None:
            self.pause_s = max(self.pause_s, now - self.last)
        self.first, self.last = now if self.first is None else self.first, now
        self.text += piece
        self.pieces += 1

    def answer(self) -> Answer:
        end = time.monotonic()
        first = end if self.first is None else self.first
        last = end if self.last is None else self.last
        if self.error is None and self.finish is None:
            self.error = "the stream ended before the answer did"
        return Answer(
            self.text,
            self.finish,
            self.error,
            self.told_tokens or self.pieces,
            first - self.started,
            last - first,
            self.pause_s,
        )


@dataclass(slots=True)
class Server:
    """One `omlx serve`, with a key of its own: whatever the settings say, this client may ask it."""

    process: "subprocess.Popen[bytes]"
    log: Path
    url: str
    key: str
    tokens: int = TOKENS
    """Of each answer."""

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> None:
        """Raises Failed with what it said where it ends instead."""
        end = time.monotonic() + within_s
        while not any(line.startswith("serving ") for line in self.said().splitlines()):
            if self.process.poll() is not None:
                raise Failed(f"omlx serve ended: {self.complaint()}")
            if time.monotonic() > end:
                raise Failed(f"omlx serve is not ready after {within_s:g} s: {self.complaint()}")
            time.sleep(LOOK_EVERY_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def complaint(self) -> str:
        """Its last line for people, and why its log says that something is not as it should be."""
        lines = self.said().splitlines()
        whys = dict.fromkeys(why for line in lines if (why := warning(line)))
        spoken = [line for line in lines if not line.startswith("{")]
        return "; ".join([complaint("\n".join(spoken)), *list(whys)[-3:]])

    def get(self, path: str) -> Any:
        """Raises Failed."""
        try:
            answer = httpx.get(
                self.url + path, headers=self._headers(), timeout=LOOK_WITHIN_S, trust_env=False
            )
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Failed(f"GET {path} of omlx serve: {error or type(error).__name__}") from error

    def model(self) -> dict[str, Any]:
        """The only one, as the shard map has it. Raises Failed."""
        found: dict[str, Any] = self.get("/omlx/v1/cluster")["models"][0]
        return found

    def ask(self, midway: Callable[[], None] | None = None) -> Answer:
        """The question, streamed; `midway` is called once a few pieces have come. Raises Failed where the
        server is not to be heard at all: what it says is in the answer."""
        body = {
            "model": self.get("/v1/models")["data"][0]["id"],
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": self.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        hearing = _Hearing(time.monotonic())
        for event in self._events(body):
            hearing.take(event)
            if midway is not None and hearing.pieces >= FEW:
                midway()
                midway = None
        return hearing.answer()

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        silent = httpx.Timeout(SILENT_S, connect=5.0)
        end = time.monotonic() + ANSWER_WITHIN_S
        try:
            with httpx.stream(
                "POST",
                f"{self.url}/v1/chat/completions",
                json=body,
                headers=self._headers(),
                timeout=silent,
                trust_env=False,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    yield {"error": response.read().decode(errors="replace")[:500]}
                    return
                for line in _lines(response):
                    if line.startswith("data: {"):
                        yield json.loads(line[6:])
                    if time.monotonic() > end:
                        yield {"error": f"no end of the answer within {ANSWER_WITHIN_S:g} s"}
                        return
        except httpx.HTTPError as error:
            raise Failed(f"omlx serve broke an answer off ({type(error).__name__})") from error

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def family(self) -> list[psutil.Process]:
        """Its process and all below it: stages, Ray."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """As launchd does. Raises Failed where it has to be killed."""
        self.process.terminate()
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"omlx serve has not ended within {ENDS_WITHIN_S:g} s; it was killed") from None
        finally:
            self.process.kill()
            self.process.wait()


def start_server(model: Path, log: Path, *flags: str) -> Server:
    """Not ready yet. Raises Failed."""
    key = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command: list[str | Path] = [OMLX, "serve", model, "--host", "127.0.0.1", "--port", port, *flags]
    try:
        with log.open("wb") as words:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMLX_API_KEY": key},
            )
    except OSError as error:
        raise Failed(f"{OMLX}: {error.strerror}") from error
    return Server(process, log, f"http://127.0.0.1:{port}", key)


def _lines(response: httpx.Response) -> Iterator[str]:
    """Split at line feeds alone: httpx's own lines also end at U+2028, which may stand inside a text."""
    rest = b""
    for block in response.iter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")


def sentence(event: Mapping[str, Any]) -> str:
    """Of an error as the server sends it, or of what came instead."""
    error = event["error"]
    if isinstance(error, str) and error.startswith("{"):
        try:
            error = json.loads(error).get("error", error)
        except ValueError:
            return str(error)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def warning(line: str) -> str | None:
    """The reason in a line of the log that is a warning or worse."""
    if not line.startswith("{"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return str(told["why"]) if told.get("level") in ("warning", "error") and "why" in told else None


def same_as(answer: Answer, wanted: Answer, who: str) -> None:
    """Raises Failed where it is another one."""
    if answer.error is not None:
        raise Failed(f"{who}: {answer.error}")
    if answer.text != wanted.text:
        at = parting(answer.text, wanted.text)
        here, there = answer.text[at : at + 40], wanted.text[at : at + 40]
        raise Failed(f"{who}: from character {at} on it says {here!r} instead of {there!r}")
    if answer.finish != wanted.finish:
        raise Failed(f"{who}: it ended with {answer.finish} instead of {wanted.finish}")


def parting(one: str, other: str) -> int:
    """Of two texts that differ: where."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
