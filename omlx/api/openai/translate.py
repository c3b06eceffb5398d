"""From OpenAI requests to the chat layer's values. Pure: no model, no socket, no clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from omlx.api.openai.schema import (
    COMPLETION_MAX_TOKENS,
    MAX_COMPLETIONS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Sampling,
)
from omlx.errors import BadRequest
from omlx.node.chat import Chat, Message, ReplyOptions

NUMBERS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
"""Named alike on both sides; where one is not given, the chat layer's default holds."""

Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt to continue; one choice of the answer."""

    prompt: Prompt
    options: ReplyOptions


def chats(request: ChatRequest) -> tuple[Chat, ...]:
    """One chat per choice: they differ in their seeds only. Raises BadRequest."""
    _check_stream_options(request)
    chat = Chat(
        messages=tuple(_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)),
        options=_options(request, _chat_max_tokens(request), _chat_top_logprobs(request)),
        template_kwargs=_template_kwargs(request),
    )
    return tuple(replace(chat, options=options) for options in _choices(chat.options, request.n or 1))


def completions(request: CompletionRequest) -> tuple[Completion, ...]:
    """n choices per prompt, prompt by prompt. Raises BadRequest."""
    _check_stream_options(request)
    prompts = _prompts(request.prompt)
    n = request.n or 1
    if len(prompts) * n > MAX_COMPLETIONS:
        raise BadRequest(
            f"prompt: {len(prompts)} prompts x n = {n} are more than {MAX_COMPLETIONS} choices", "prompt"
        )
    if request.echo and request.logprobs is not None:
        raise BadRequest("logprobs: not supported together with echo", "logprobs", "unsupported_parameter")
    if request.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("echo: not supported for a prompt of token ids", "echo", "unsupported_parameter")
    options = _options(request, request.max_tokens or COMPLETION_MAX_TOKENS, request.logprobs)
    return tuple(Completion(prompt, choice) for prompt in prompts for choice in _choices(options, n))


def _check_stream_options(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only allowed when stream is true", "stream_options")


def _message(message: ChatMessage, path: str) -> Message:
    match message.content:
        case None if message.role != "assistant":
            raise BadRequest(
                f"{path}.content: this field is required", f"{path}.content", "missing_parameter"
            )
        case None:
            text = ""
        case str() as text:
            pass
        case parts:
            text = "".join(part.text for part in parts)
    if message.reasoning_content is not None and message.role != "assistant":
        name = f"{path}.reasoning_content"
        raise BadRequest(f"{name}: only an assistant's message has it", name)
    return Message(role=message.role, content=text, name=message.name, reasoning=message.reasoning_content)


def _options(request: Sampling, max_tokens: int | None, top_logprobs: int | None) -> ReplyOptions:
    given = request.model_dump(include=NUMBERS, exclude_none=True)
    return ReplyOptions(
        max_tokens=max_tokens,
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        seed=request.seed,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        top_logprobs=top_logprobs,
        **given,
    )


def _choices(options: ReplyOptions, n: int) -> Iterator[ReplyOptions]:
    """Choice i draws from seed + i, so that n answers to one seed differ and come out the same again."""
    for i in range(n):
        yield options if options.seed is None else replace(options, seed=options.seed + i)


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        name = "max_completion_tokens"
        raise BadRequest(f"{name}: {new} contradicts max_tokens: {old}; give one of them", name)
    return old if new is None else new


def _chat_top_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs is not None:
            raise BadRequest("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        return None
    return request.top_logprobs or 0


def _template_kwargs(request: ChatRequest) -> Mapping[str, object]:
    kwargs: dict[str, object] = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is None:
        return kwargs
    if kwargs.get("enable_thinking", False) is not False:
        name = "reasoning_effort"
        raise BadRequest(f"{name}: contradicts chat_template_kwargs.enable_thinking", name)
    return {**kwargs, "enable_thinking": False}


def _prompts(value: object) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either. Raises BadRequest for anything else, naming the item."""
    match value:
        case str():
            return (value,)
        case [int(), *_]:
            return (_token_ids(value, "prompt"),)
        case [str(), *_]:
            return tuple(_text(item, f"prompt[{i}]") for i, item in enumerate(value))
        case [list(), *_]:
            return tuple(_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value))
        case _:
            message = (
                "prompt: should be a string, a list of strings, token ids, or a list of lists of token ids"
            )
            raise BadRequest(message, "prompt", "invalid_value")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{path}: should be a string like the ones before it", path, "invalid_value")
    return value


def _token_ids(value: object, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{path}: should be a list of token ids, not empty", path, "invalid_value")
    for i, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise BadRequest(f"{path}[{i}]: should be a token id", f"{path}[{i}]", "invalid_value")
    return tuple(value)
