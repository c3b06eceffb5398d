"""Where all dialects meet: a Chat goes in, Deltas come out, and the engine sees token ids only."""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from omlx.errors import BadRequest, Closed, PromptTooLong
from omlx.ids import ModelId
from omlx.node.sequence import Finish, Request, Token
from omlx.node.step import SamplingParams
from omlx.node.text.answer import AnswerText
from omlx.node.text.checks import check_ids, check_text
from omlx.node.text.detokenize import Detokenizer
from omlx.node.text.stops import StopMatcher
from omlx.node.text.template import Turn, render
from omlx.node.text.thinking import CLOSE_TAG, OPEN_TAG, ThinkSplitter, leaves_open
from omlx.node.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `developer` is taken for `system`."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    """What an assistant thought before `content`; the template decides whether it is shown again."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """How the answer is made; the neutral values are those of SamplingParams."""

    max_tokens: int | None = None
    """None, or more than the context has left: as many as the context has left."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    """Any integer, taken modulo 2**63 (-1 is 2**63 - 1); None draws one."""
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: the drawn token's alone; n: also the n most likely ones'."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: tuple[Message, ...]
    options: ReplyOptions = ReplyOptions()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Handed to the chat template, such as enable_thinking."""


@dataclass(frozen=True, slots=True)
class TopToken:
    """A token that could have been drawn. `bytes` are its own, `text` shows them as far as they are UTF-8."""

    text: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token that was drawn, with natural logs of the model's own distribution."""

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TopToken, ...] = ()
    """Most likely first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[TokenInfo, ...] = ()
    finish: Finish | None = None


_NOTHING = Delta()


class TokenStream(Protocol):
    """One sequence's tokens. The last one has `finish`; the engine's errors come out of the iteration."""

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that were not computed; certain with the first token."""
        ...

    def __aiter__(self) -> AsyncIterator[Token]: ...

    async def __anext__(self) -> Token: ...

    async def aclose(self) -> None:
        """Cancels the sequence if it still runs; further calls do nothing."""
        ...


class TokenSource(Protocol):
    def submit(self, request: Request) -> TokenStream:
        """Raises Full or ModelFailed at once."""
        ...


class Reply:
    """One answer: an async iterator of Deltas, none of them empty, the last and only the last with `finish`.

    The counts are of tokens so far. A stop token counts, as do those within a stop string; the tags count
    as reasoning. `async with` closes it.
    """

    def __init__(
        self,
        stream: TokenStream,
        text: AnswerText,
        tokenizer: Tokenizer,
        request: Request,
        tags: frozenset[int],
    ) -> None:
        self._stream = stream
        self._text = text
        self._tokenizer = tokenizer
        self._wants_tokens = request.sampling.top_logprobs is not None
        self._tags = tags
        self._waiting: deque[tuple[int, TokenInfo]] = deque()
        self._ended = False
        self.prompt_tokens = len(request.prompt)
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def __aiter__(self) -> Self:
        return self

    @property
    def cached_tokens(self) -> int:
        """Of `prompt_tokens`, those whose keys and values were at hand; certain with the first Delta."""
        return self._stream.cached_tokens

    async def __anext__(self) -> Delta:
        """Raises ModelFailed if the model did, Closed if it was unloaded."""
        while not self._ended:
            token = await anext(self._stream, None)
            if token is None:
                self._ended = True
                raise Closed("the model was closed before its answer was finished")
            delta = self._take(token)
            if delta.finish is not None:
                self._ended = True
                if token.finish is None:
                    await self._stream.aclose()
            if delta != _NOTHING:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels what is still running; further calls do nothing."""
        if not self._ended:
            self._ended = True
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _take(self, token: Token) -> Delta:
        text = self._text
        self.completion_tokens += 1
        was_inside = text.inside
        reasoning, content = "", ""
        if token.finish is not Finish.STOP:
            self._note(token)
            reasoning, content = text.add(token.id)
        self.reasoning_tokens += was_inside or text.inside
        if token.finish is not None and not text.stopped:
            late_reasoning, late_content = text.finish()
            reasoning += late_reasoning
            content += late_content
        finish = Finish.STOP if text.stopped else token.finish
        return Delta(content, reasoning, self._released(), finish)

    def _note(self, token: Token) -> None:
        """Keep its log-probability until the first character from its place on is sent."""
        hidden = token.id in self._tokenizer.skipped or token.id in self._tags
        if not self._wants_tokens or hidden or not self._tokenizer.token_bytes(token.id):
            return
        assert token.logprob is not None, "asked for, so the last stage sends it"
        top = tuple(TopToken(*self._shown(id), logprob) for id, logprob in token.top)
        self._waiting.append((self._text.decoded, TokenInfo(*self._shown(token.id), token.logprob, top)))

    def _released(self) -> tuple[TokenInfo, ...]:
        released = []
        while self._waiting and self._waiting[0][0] < self._text.sent:
            released.append(self._waiting.popleft()[1])
        return tuple(released)

    def _shown(self, id: int) -> tuple[str, tuple[int, ...]]:
        spelled = self._tokenizer.token_bytes(id)
        return spelled.decode(errors="replace"), tuple(spelled)


class ChatModel:
    """A model that answers: text to token ids, to its engine, and back."""

    def __init__(self, id: ModelId, tokenizer: Tokenizer, source: TokenSource, context_tokens: int) -> None:
        """`context_tokens` is the longest prompt and answer together."""
        self.id = id
        self.context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._source = source

    async def reply(self, chat: Chat) -> Reply:
        """The answer to a chat, under way. Raises BadRequest, PromptTooLong, Full or ModelFailed.

        Where the vocabulary has thinking tags, what is between them comes as `reasoning`.
        """
        check_options(chat.options, self._tokenizer.vocab_size)
        text, ids = await asyncio.to_thread(self._prompt_of_chat, chat)
        tags = self._tokenizer.think_ids
        splitter = ThinkSplitter(OPEN_TAG, CLOSE_TAG, leaves_open(text)) if tags else None
        answer = AnswerText(Detokenizer(self._tokenizer), StopMatcher(chat.options.stop), splitter)
        return self._submit(ids, chat.options, answer, frozenset(tags or ()))

    async def complete(self, prompt: str | tuple[int, ...], options: ReplyOptions) -> Reply:
        """The prompt carried on, under way; nothing is split off. Raises like `reply`."""
        check_options(options, self._tokenizer.vocab_size)
        ids = await asyncio.to_thread(self._prompt_of_completion, prompt)
        detokenizer = Detokenizer(self._tokenizer, continues=True)
        return self._submit(ids, options, AnswerText(detokenizer, StopMatcher(options.stop)), frozenset())

    def _submit(
        self, ids: tuple[int, ...], options: ReplyOptions, answer: AnswerText, tags: frozenset[int]
    ) -> Reply:
        left = self.context_tokens - len(ids)
        request = Request(
            prompt=ids,
            sampling=_sampling(options),
            max_tokens=left if options.max_tokens is None else min(options.max_tokens, left),
            stop_tokens=self._tokenizer.eos_ids,
        )
        return Reply(self._source.submit(request), answer, self._tokenizer, request, tags)

    def _prompt_of_chat(self, chat: Chat) -> tuple[str, tuple[int, ...]]:
        if not chat.messages:
            raise BadRequest("messages is empty; send at least one", param="messages")
        turns = [_turn(message, f"messages[{n}]") for n, message in enumerate(chat.messages)]
        text = render(self._tokenizer, turns, chat.template_kwargs)
        check_text(text, "chat_template_kwargs")  # all else in it has been checked
        return text, self._checked(self._tokenizer.encode(text, special=False), "messages")

    def _prompt_of_completion(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not prompt:
            raise BadRequest("prompt is empty; send some text or token ids", param="prompt")
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            prompt = tuple(self._tokenizer.encode(prompt, special=True))
        return self._checked(prompt, "prompt")

    def _checked(self, ids: list[int] | tuple[int, ...], param: str) -> tuple[int, ...]:
        if not ids:
            raise BadRequest(f"{param} has no tokens; send some text", param=param)
        if len(ids) >= self.context_tokens:
            raise PromptTooLong(len(ids), self.context_tokens - 1, param)  # the answer needs one
        check_ids(ids, self._tokenizer.vocab_size, param)
        return tuple(ids)


_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("max_tokens", 1, 2**63 - 1),
    ("top_logprobs", 0, 20),
)


def check_options(options: ReplyOptions, vocab_size: int) -> None:
    """Raises BadRequest with the field's name; NaN and the infinities are in no range."""
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} is {value}; it must be from {low} to {high}", param=name)
    check_ids((id for id, _ in options.logit_bias), vocab_size, "logit_bias")
    for id, bias in options.logit_bias:
        if not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias of token {id} is {bias}; it must be from -100 to 100", "logit_bias")
    for n, stop in enumerate(options.stop):
        if not stop:
            raise BadRequest(f"stop[{n}] is empty; leave it out", param=f"stop[{n}]")
        check_text(stop, f"stop[{n}]")


def _sampling(options: ReplyOptions) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        seed=secrets.randbits(63) if options.seed is None else options.seed % 2**63,
        top_logprobs=options.top_logprobs,
    )


def _turn(message: Message, place: str) -> Turn:
    turn = {"role": message.role, "content": message.content}
    for key, value in (("name", message.name), ("reasoning_content", message.reasoning)):
        if value is not None:
            turn[key] = value
    for field_name in ("role", "content", "name", "reasoning"):
        check_text(getattr(message, field_name) or "", f"{place}.{field_name}")
    return turn
