"""Chats that grow turn by turn, with the answers of a server that keeps nothing."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from omlx.cache.block_file import Line, parse_lines
from omlx.cache.folder import ROOT
from omlx.cache.shelf import Span, spans
from tests.walk.engines import TIE

WORDS = "robot sea count boats every morning one day storm came they were happy too".split()  # noqa: SIM905
ANSWER_TOKENS = 8
TRIES = 20
PATIENT: dict[str, Any] = {"timeout": 60, "trust_env": False}
BLOCK_TOKENS = 32
BLOCKS = {"cache_block_tokens": str(BLOCK_TOKENS), "cache_snapshot_tokens": str(2 * BLOCK_TOKENS)}
"""Settings of a server: small blocks, so that there are many."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client posts, and what it must be answered; no tie between two tokens is in the answer."""

    body: dict[str, Any]
    answer: str

    def to(self, model: str) -> "Turn":
        """The same for a model of another name."""
        return replace(self, body=self.body | {"model": model})


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int


def ask(url: str, turn: Turn) -> Answer:
    """Raises httpx.HTTPError where the server is killed meanwhile."""
    answered = _post(url, turn.body)
    return _answer(answered["choices"][0]["message"]["content"], answered["usage"])


def listen(url: str, turn: Turn) -> Answer:
    """Like `ask`, streamed."""
    body = turn.body | {"stream": True, "stream_options": {"include_usage": True}}
    text, usage = "", {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, **PATIENT) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return _answer(text, usage)


def check(url: str, turn: Turn) -> Answer:
    """Ask, and compare."""
    found = ask(url, turn)
    assert found.text == turn.answer, (found, turn)
    return found


def record(url: str, model: str, seed: int, turns: int, words: int = 60) -> list[Turn]:
    """A chat of so many turns, each of so many words; all chats begin with the same words."""
    draw = random.Random(seed)
    messages: list[dict[str, str]] = [{"role": "system", "content": " ".join(WORDS * 3)}]
    found = []
    for _ in range(turns):
        turn = _next_turn(url, model, messages, draw, words)
        messages = [*turn.body["messages"], {"role": "assistant", "content": turn.answer}]
        found.append(turn)
    return found


def _next_turn(
    url: str, model: str, messages: Sequence[dict[str, str]], draw: random.Random, words: int
) -> Turn:
    for _ in range(TRIES):
        said = {"role": "user", "content": " ".join(draw.choices(WORDS, k=words))}
        body = {
            "model": model,
            "messages": [*messages, said],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        answered = _post(url, body | {"logprobs": True, "top_logprobs": 2})
        tokens = answered["choices"][0]["logprobs"]["content"]
        best = [[top["logprob"] for top in token["top_logprobs"]] for token in tokens]
        if min(first - second for first, second in best) > TIE:
            return Turn(body, answered["choices"][0]["message"]["content"] or "")
    raise AssertionError("a tie in each of them")


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/chat/completions", json=body, **PATIENT)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def _answer(text: str | None, usage: dict[str, Any]) -> Answer:
    return Answer(text or "", usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


# ------------------------------------------------------------------ what lies in the cache folder


def all_spans(cold: Path) -> list[Span]:
    """Of all models, with their lines."""
    found = [span for root in sorted(cold.iterdir()) if ROOT.fullmatch(root.name) for span in spans(root)]
    for span in found:
        span.lines = dict(parse_lines(span.manifest()))
    return found


def chain(cold: Path) -> list[tuple[Path, Line]]:
    """Files of the whole blocks that lead to the last one, of one model in one span with one chat."""
    [span] = all_spans(cold)
    found = [max(span.lines.values(), key=lambda line: line.start)]
    while found[0].start:
        found.insert(0, span.lines[found[0].parent])
    return [(span.path(line.id), line) for line in found if len(line.tokens) == 4 * BLOCK_TOKENS]


def block_bytes(root: Path) -> int:
    """Of the folder, or of one model in it."""
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))
