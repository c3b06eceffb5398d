"""From Deltas to OpenAI's chunks and bodies. Pure: what is sent, not when."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from omlx.node.chat import Delta, TokenInfo, TopToken
from omlx.node.sequence import Finish

Json: TypeAlias = dict[str, Any]
NO_CHANCE = -9999.0
"""OpenAI's number for a log-probability below every float; JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole response; a prompt with several answers counts once."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompts' tokens, those that were not computed."""
    completion_tokens: int
    reasoning_tokens: int

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class Collected:
    """One choice, put together again from its Deltas."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.tokens.extend(delta.tokens)
        self.finish = delta.finish or self.finish

    def delta(self) -> Delta:
        """All of it as one Delta."""
        return Delta("".join(self.text), "".join(self.reasoning), tuple(self.tokens), self.finish)


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of one response repeats."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    include_usage: bool
    """A last chunk tells the usage, and the others say that they do not."""

    def chunk(self, kind: str, choices: list[Json]) -> Json:
        chunk = self.body(kind, choices)
        return {**chunk, "usage": None} if self.include_usage else chunk

    def body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The shapes of /v1/chat/completions."""

    heading: Heading
    n: int
    logprobs: bool

    def opening(self) -> Iterator[Json]:
        """Before the first token: who speaks."""
        for index in range(self.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def chunks(self, index: int, delta: Delta) -> Iterator[Json]:
        """What `delta` adds to choice `index`; the finish reason comes in a chunk without text."""
        if delta.reasoning:
            yield self._chunk(index, {"reasoning_content": delta.reasoning})
        if delta.text or (self.logprobs and delta.tokens):
            logprobs = chat_logprobs(delta.tokens) if self.logprobs else None
            yield self._chunk(index, {"content": delta.text}, logprobs)
        if delta.finish is not None:
            yield self._chunk(index, {}, finish=delta.finish)

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self.heading.body("chat.completion.chunk", []), "usage": usage.json()}

    def body(self, choices: list[Delta], usage: Usage) -> Json:
        """The answer in one piece."""
        shown = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self.heading.body("chat.completion", shown), "usage": usage.json()}

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish: Finish | None = None
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else finish.value,
        }
        return self.heading.chunk("chat.completion.chunk", [choice])

    def _choice(self, index: int, delta: Delta) -> Json:
        message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(delta.tokens) if self.logprobs else None,
            "finish_reason": None if delta.finish is None else delta.finish.value,
        }


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The shapes of /v1/completions. One object serves one response: it counts characters."""

    heading: Heading
    echoes: tuple[str, ...]
    """Per choice, the prompt's text to put in front, or nothing."""
    logprobs: bool
    offsets: tuple["Offsets", ...]

    def opening(self) -> Iterator[Json]:
        """Before the first token: the prompts, where they are asked for."""
        for index, echo in enumerate(self.echoes):
            if echo:
                yield self._chunk(index, Delta(text=echo))

    def chunks(self, index: int, delta: Delta) -> Iterator[Json]:
        """What `delta` adds to choice `index`."""
        if delta.text or delta.finish is not None or (self.logprobs and delta.tokens):
            yield self._chunk(index, delta)

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self.heading.body("text_completion", []), "usage": usage.json()}

    def body(self, choices: list[Delta], usage: Usage) -> Json:
        """The answer in one piece."""
        shown = [self._choice(index, choice, self.echoes[index]) for index, choice in enumerate(choices)]
        return {**self.heading.body("text_completion", shown), "usage": usage.json()}

    def _chunk(self, index: int, delta: Delta) -> Json:
        return self.heading.chunk("text_completion", [self._choice(index, delta, "")])

    def _choice(self, index: int, delta: Delta, echo: str) -> Json:
        return {
            "index": index,
            "text": echo + delta.text,
            "logprobs": legacy_logprobs(delta.tokens, self.offsets[index]) if self.logprobs else None,
            "finish_reason": None if delta.finish is None else delta.finish.value,
        }


class Offsets:
    """Where in a text, in characters, each token begins, though a character may span several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def of(self, token: TokenInfo) -> int:
        """The next token's; call it once for each, in order."""
        start = self._characters
        self._characters += len(self._decoder.decode(bytes(token.bytes)))
        return start


def chat_logprobs(tokens: tuple[TokenInfo, ...]) -> Json:
    """`logprobs` of a chat choice."""
    return {
        "content": [
            {**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens
        ],
        "refusal": None,
    }


def legacy_logprobs(tokens: tuple[TokenInfo, ...], offsets: Offsets) -> Json:
    """`logprobs` of a legacy choice: lists side by side."""
    return {
        "tokens": [_legacy_text(token) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {_legacy_text(other): _finite(other.logprob) for other in token.top} for token in tokens
        ],
        "text_offset": [offsets.of(token) for token in tokens],
    }


def _token(token: TokenInfo | TopToken) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _legacy_text(token: TokenInfo | TopToken) -> str:
    """Half a character is written as its bytes: two different halves must not share a key."""
    try:
        bytes(token.bytes).decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def _finite(logprob: float) -> float:
    return max(logprob, NO_CHANCE)
