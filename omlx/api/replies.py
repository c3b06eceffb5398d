"""Several answers as one stream of (choice, Delta): n choices, or the prompts of one legacy request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType

from omlx.api.models import Reply
from omlx.node.chat import Delta


class Replies:
    """Opened answers; `async with` reads them side by side and closes every one, whatever happens.

    Iterating gives (index of the choice, Delta) as they come, an answer's Deltas in order, and raises
    what the first failing answer raises.
    """

    def __init__(self, replies: list[Reply], closing: AsyncExitStack) -> None:
        self.replies = replies
        self._closing = closing
        self._pumps: list[asyncio.Task[None]] = []
        self._running = len(replies)
        # None: the pump of that choice has ended. The answers themselves bound the queue.
        self._queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()

    async def __aenter__(self) -> "Replies":
        self._pumps = [
            asyncio.create_task(self._pump(index, reply)) for index, reply in enumerate(self.replies)
        ]
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self._closing.aclose()

    def __aiter__(self) -> "Replies":
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        while self._running:
            index, delta = await self._queue.get()
            if delta is not None:
                return index, delta
            self._running -= 1
            await self._pumps[index]
        raise StopAsyncIteration

    async def _pump(self, index: int, reply: Reply) -> None:
        try:
            async for delta in reply:
                self._queue.put_nowait((index, delta))
        finally:
            self._queue.put_nowait((index, None))


async def open_replies(asks: Iterable[Callable[[], Awaitable[Reply]]]) -> Replies:
    """All of the answers, or none: when one is refused, those before it are closed.

    Raises what asking raises: BadRequest, PromptTooLong, Full, ModelFailed.
    """
    async with AsyncExitStack() as closing:
        replies: list[Reply] = []
        for ask in asks:
            reply = await ask()
            closing.push_async_callback(reply.aclose)
            replies.append(reply)
        return Replies(replies, closing.pop_all())
    raise AssertionError("the stack swallows nothing")
