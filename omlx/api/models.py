"""The API's view of what it serves: a protocol that the coordinator fits, and the look-up by id."""

from collections.abc import AsyncIterator
from typing import Protocol

from omlx.errors import ModelNotFound
from omlx.ids import ModelId
from omlx.node.chat import Chat, Delta, ReplyOptions
from omlx.node.health import ModelCard, ModelHealth
from omlx.node.meters import ModelFigures


class Reply(Protocol):
    """One answer on its way. The counts are final when the iterator has ended."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int:
        """Of prompt_tokens."""

    @property
    def completion_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...
    async def aclose(self) -> None:
        """Gives the place up at once; does nothing the second time."""


class ChatModel(Protocol):
    """A loaded model. Both calls raise BadRequest, PromptTooLong, Full or ModelFailed before any Delta."""

    async def reply(self, chat: Chat) -> Reply: ...
    async def complete(self, prompt: str | tuple[int, ...], options: ReplyOptions) -> Reply: ...


class Models(Protocol):
    """Everything that is served here."""

    def cards(self) -> tuple[ModelCard, ...]: ...
    def health(self) -> tuple[ModelHealth, ...]: ...
    def figures(self) -> dict[str, ModelFigures]:
        """Of the loaded models, by id."""

    async def chat_model(self, model_id: ModelId) -> ChatModel:
        """Loads it on first use, which may take minutes; a caller that is cancelled stops no load.

        Raises ModelNotFound, BadModel, DoesNotFit, ModelFailed.
        """


def find_card(models: Models, model_id: str) -> ModelCard:
    """The card of `model_id`, which must match to the letter.

    An id that is not in the list goes no further than here: it never becomes a path or a download.
    Raises ModelNotFound, which names the ids there are.
    """
    cards = models.cards()
    for card in cards:
        if card.id == model_id:
            return card
    known = ", ".join(card.id for card in cards) or "none"
    raise ModelNotFound(f"no model {model_id!r} is served here; known models: {known}")
