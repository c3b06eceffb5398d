"""The OpenAI requests: every field that is taken, refused or ignored, and what it may be.

`null` means "not set" wherever a field has a default. A field that would change the answer and that we
do not serve is refused by name, unless its value asks for nothing. Fields that are not listed are refused.

Ignored, because the answer is the same with and without them:
    user, safety_identifier   name the caller; nothing is kept by caller here
    metadata, store           label an answer that a service keeps; nothing is kept here
    service_tier              chooses among queues that a service sells; there is one
    prompt_cache_key, prompt_cache_options, prompt_cache_retention, cache_control
                              hints for a cache, which never changes an answer
    parallel_tool_calls       speaks about tools only, and tools are refused
"""

from typing import Annotated, Any

from pydantic import Field

from omlx.api.openai.fields import (
    MAX_CHOICES,
    Content,
    Ignored,
    LogitBias,
    NoToolChoice,
    NoTools,
    Role,
    Stop,
    Strict,
    Whole,
    only,
)

ModelName = Annotated[str, Field(min_length=1, max_length=512)]
MAX_MESSAGES = 10_000
COMPLETION_MAX_TOKENS = 16
"""What the legacy route generates when it is not told; OpenAI's own default."""
MAX_COMPLETIONS = 128
"""Prompts times n in one legacy request."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False, because="streams are not padded")] = None


class Sampling(Strict):
    """What both routes share."""

    model: ModelName
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    """A negative one counts as itself modulo 2**63."""
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: Annotated[Whole, Field(ge=0)] | None = None
    """0: all."""
    top_p: float | None = Field(None, gt=0, le=1)
    user: Ignored = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(Strict):
    role: Role
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Of an assistant's earlier turn, as we gave it."""
    tool_calls: NoTools = None
    function_call: NoTools = None
    audio: Annotated[Any, only(because="this server answers text with text")] = None
    refusal: Annotated[Any, only(because="a refusal is text; send it as content")] = None
    annotations: Annotated[Any, only([], because="nothing here reads annotations")] = None
    tool_call_id: NoTools = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """Null: as many as the context holds; more than that is cut to it."""
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[
        Any, only("none", because='only "none" is; chat_template_kwargs reaches what a template offers')
    ] = None
    """"none" is the template's enable_thinking = false."""

    audio: Annotated[Any, only(because="this server answers with text")] = None
    function_call: NoToolChoice = None
    functions: NoTools = None
    modalities: Annotated[Any, only(["text"], because="this server answers with text")] = None
    moderation: Annotated[Any, only(because="answers are not moderated")] = None
    prediction: Annotated[Any, only(because="predicted outputs are not used")] = None
    response_format: Annotated[Any, only({"type": "text"}, because="answers are free text")] = None
    tool_choice: NoToolChoice = None
    tools: NoTools = None
    verbosity: Annotated[Any, only(because="models here have no such setting")] = None
    web_search_options: Annotated[Any, only(because="this server searches nothing")] = None

    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Any
    """A string, token ids, or a list of either; `translate` tells them apart."""
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """Null: COMPLETION_MAX_TOKENS."""
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    best_of: Annotated[Whole, Field(ge=1), only(1, because="every answer is returned; use n")] | None = None
    suffix: Annotated[Any, only("", because="models here continue a prompt, they do not fill gaps")] = None
