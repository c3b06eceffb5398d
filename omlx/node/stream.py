"""One answer on its way from the engine to whoever asked: tokens, then an end."""

import asyncio
from collections.abc import Callable

from omlx.errors import OmlxError
from omlx.node.sequence import Token


class Stream:
    """One sequence's tokens, in order; an async iterator that ends after the token with a finish.

    Raises RequestFailed when this sequence cannot be computed, ModelFailed or Closed when the engine
    cannot go on. `aclose` cancels the sequence.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._items: asyncio.Queue[Token | OmlxError] = asyncio.Queue()  # bounded by max_tokens
        self._ended = False
        self.started = False
        self.cached_tokens = 0
        """Of the prompt, those that were laid back instead of computed; certain with the first token."""

    def put(self, item: Token | OmlxError) -> None:
        self.started = True
        self._items.put_nowait(item)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Token:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, OmlxError):
            self._ended = True
            raise item
        self._ended = item.finish is not None
        return item

    async def aclose(self) -> None:
        """Nobody wants the rest; safe to call at any time."""
        self._ended = True
        self._cancel()
