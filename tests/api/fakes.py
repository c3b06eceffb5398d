"""A scripted model behind the real server: what it says, when, and how it fails is written in the test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import openai
import uvicorn

from omlx.api.app import create_app
from omlx.ids import ModelId
from omlx.node.chat import Chat, Delta, ReplyOptions
from omlx.node.health import ModelCard, ModelHealth
from omlx.node.meters import ModelFigures
from omlx.node.sequence import Finish

Step = Delta | Exception | asyncio.Event
"""A Delta to give, an error to raise, or an event to wait for."""

STOP = Delta(finish=Finish.STOP)
KEY = "correct-horse"


class ScriptedReply:
    """Walks through its steps; one token a Delta with text."""

    def __init__(self, model: "ScriptedModel", steps: Sequence[Step], cached_tokens: int) -> None:
        self._model = model
        self._cached_tokens = cached_tokens
        self._steps = list(steps)
        self._closed = False
        self.prompt_tokens = 7
        self.cached_tokens = 0
        """The real one knows it from the first token on, too."""
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        model.open_replies += 1

    def __aiter__(self) -> "ScriptedReply":
        return self

    async def __anext__(self) -> Delta:
        while self._steps:
            match self._steps.pop(0):
                case asyncio.Event() as event:
                    self._model.waiting.set()
                    await event.wait()
                case Exception() as error:
                    raise error
                case Delta() as delta:
                    self.cached_tokens = self._cached_tokens
                    self.completion_tokens += bool(delta.text or delta.reasoning)
                    self.reasoning_tokens += bool(delta.reasoning)
                    return delta
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._model.open_replies -= 1
            if not self._model.open_replies:
                self._model.quiet.set()


class ScriptedModel:
    """Answers each request by the next script, the last one over and over."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        self._scripts = list(scripts)
        self.open_replies = 0
        self.chats: list[Chat] = []
        self.completions: list[tuple[str | tuple[int, ...], ReplyOptions]] = []
        self.refusals: dict[int, Exception] = {}
        """By the number of the request, 0 first."""
        self.cached_tokens: dict[int, int] = {}
        """By the number of the request as well; else none."""
        self.waiting = asyncio.Event()
        """Some reply waits for an event of its script."""
        self.quiet = asyncio.Event()
        """The last open reply was closed."""

    async def reply(self, chat: Chat) -> ScriptedReply:
        self.chats.append(chat)
        return self._next()

    async def complete(self, prompt: str | tuple[int, ...], options: ReplyOptions) -> ScriptedReply:
        self.completions.append((prompt, options))
        return self._next()

    def _next(self) -> ScriptedReply:
        number = len(self.chats) + len(self.completions) - 1
        if number in self.refusals:
            raise self.refusals[number]
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        return ScriptedReply(self, script, self.cached_tokens.get(number, 0))


class FakeModels:
    """Serves one scripted model under the id `tiny`, beside one that is listed only."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model
        self.loads: list[str] = []
        self.loading: asyncio.Event | None = None
        """Where there is one, a load waits for it."""
        self.load_started = asyncio.Event()
        self.load_error: Exception | None = None
        self.measured: dict[str, ModelFigures] = {}
        self.states: tuple[ModelHealth, ...] = (ModelHealth(ModelId("tiny"), "ready", 1, 2, 0.5),)

    def cards(self) -> tuple[ModelCard, ...]:
        return (
            ModelCard(ModelId("tiny"), 1_700_000_000, 4096, "ready"),
            ModelCard(ModelId("Org/Name"), 1_700_000_001, 8192, "idle"),
        )

    def health(self) -> tuple[ModelHealth, ...]:
        return self.states

    def figures(self) -> dict[str, ModelFigures]:
        return self.measured

    async def chat_model(self, model_id: ModelId) -> ScriptedModel:
        self.loads.append(model_id)
        self.load_started.set()
        if self.loading is not None:
            await self.loading.wait()
        if self.load_error is not None:
            raise self.load_error
        return self.model


def words(*texts: str) -> list[Step]:
    """A script that says these and stops."""
    return [*(Delta(text=text) for text in texts), STOP]


@asynccontextmanager
async def serving(
    models: FakeModels,
    *,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
    max_body_bytes: int = 2**20,
    keepalive_s: float = 30.0,
    body_timeout_s: float = 30.0,
) -> AsyncIterator[str]:
    """A real server on a free loopback port; gives its URL. In the end no reply may be open."""
    app = create_app(
        models,
        api_key=api_key,
        allowed_hosts=allowed_hosts,
        max_body_bytes=max_body_bytes,
        keepalive_s=keepalive_s,
        body_timeout_s=body_timeout_s,
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # a client that comes before the server accepts waits here
        server = uvicorn.Server(uvicorn.Config(app, http="h11", lifespan="off", log_level="critical"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
    assert models.model.open_replies == 0


@asynccontextmanager
async def talking(
    *scripts: Sequence[Step], prepare: Callable[[FakeModels], None] | None = None, **settings: float
) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeModels]]:
    """The official client on a server whose model follows `scripts`."""
    models = FakeModels(ScriptedModel(*scripts))
    if prepare is not None:
        prepare(models)
    async with (
        serving(models, **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client, models
