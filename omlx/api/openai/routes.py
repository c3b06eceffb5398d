"""The OpenAI routes: parse, translate, ask the model, show the answer in one piece or as a stream."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omlx.api.connection import while_connected
from omlx.api.errors import request_id_of
from omlx.api.models import ChatModel, Models, Reply, find_card
from omlx.api.openai.answer import ChatAnswer, Collected, CompletionAnswer, Heading, Json, Offsets, Usage
from omlx.api.openai.schema import ChatRequest, CompletionRequest, Sampling
from omlx.api.openai.translate import Completion, chats, completions
from omlx.api.parse import parse_body
from omlx.api.replies import Replies, open_replies
from omlx.api.sse import DONE, OPEN, EventStream, data
from omlx.node.chat import Chat
from omlx.node.health import ModelCard


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request on its way: whom it asks, what for, and how the answer looks."""

    model: Callable[[], Awaitable[ChatModel]]
    asks: tuple[Callable[[ChatModel], Awaitable[Reply]], ...]
    """One per choice; the n choices of a prompt stand side by side."""
    n: int
    """Choices per prompt."""
    answer: ChatAnswer | CompletionAnswer

    async def open(self) -> Replies:
        """Loads the model where it is not yet, and takes a place for every choice."""
        model = await self.model()
        return await open_replies(partial(ask, model) for ask in self.asks)

    async def collect(self) -> Json:
        """The answer in one piece."""
        choices = [Collected() for _ in self.asks]
        async with await self.open() as replies:
            async for index, delta in replies:
                choices[index].add(delta)
            return self.answer.body([choice.delta() for choice in choices], self._usage(replies))

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events."""
        async with await self.open() as replies:
            yield OPEN
            for chunk in self.answer.opening():
                yield data(chunk)
            async for index, delta in replies:
                for chunk in self.answer.chunks(index, delta):
                    yield data(chunk)
            if self.answer.heading.include_usage:
                yield data(self.answer.usage_chunk(self._usage(replies)))
            yield DONE

    def _usage(self, replies: Replies) -> Usage:
        prompts = replies.replies[:: self.n]
        return Usage(
            prompt_tokens=sum(reply.prompt_tokens for reply in prompts),
            cached_tokens=sum(reply.cached_tokens for reply in prompts),
            completion_tokens=sum(reply.completion_tokens for reply in replies.replies),
            reasoning_tokens=sum(reply.reasoning_tokens for reply in replies.replies),
        )


def router(models: Models, *, keepalive_s: float) -> APIRouter:
    """The routes over `models`."""
    routes = APIRouter(prefix="/v1")

    async def respond(request: Request, body: Sampling, exchange: Exchange) -> Response:
        if body.stream:
            return EventStream(exchange.events(), keepalive_s=keepalive_s, request_id=request_id_of(request))
        return JSONResponse(await while_connected(request.receive, exchange.collect()))

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = await parse_body(request, ChatRequest)
        card = find_card(models, body.model)
        asked = chats(body)
        exchange = Exchange(
            model=partial(models.chat_model, card.id),
            asks=tuple(partial(_reply, one) for one in asked),
            n=len(asked),
            answer=ChatAnswer(_heading("chatcmpl", card, body), len(asked), bool(body.logprobs)),
        )
        return await respond(request, body, exchange)

    @routes.post("/completions")
    async def complete(request: Request) -> Response:
        body = await parse_body(request, CompletionRequest)
        card = find_card(models, body.model)
        asked = completions(body)
        answer = CompletionAnswer(
            _heading("cmpl", card, body),
            echoes=tuple(one.prompt if body.echo and isinstance(one.prompt, str) else "" for one in asked),
            logprobs=body.logprobs is not None,
            offsets=tuple(Offsets() for _ in asked),
        )
        exchange = Exchange(
            model=partial(models.chat_model, card.id),
            asks=tuple(partial(_complete, one) for one in asked),
            n=body.n or 1,
            answer=answer,
        )
        return await respond(request, body, exchange)

    @routes.get("/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(card) for card in models.cards()]})

    @routes.get("/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        return JSONResponse(_model(find_card(models, model_id)))

    return routes


async def _reply(chat: Chat, model: ChatModel) -> Reply:
    return await model.reply(chat)


async def _complete(one: Completion, model: ChatModel) -> Reply:
    return await model.complete(one.prompt, one.options)


def _heading(prefix: str, card: ModelCard, body: Sampling) -> Heading:
    return Heading(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=card.id,
        include_usage=body.include_usage,
    )


def _model(card: ModelCard) -> Json:
    """OpenAI's four fields, and what a client needs to know beyond them."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "omlx",
        "context_length": card.context_tokens,
        "state": card.state,
    }
