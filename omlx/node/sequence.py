"""One sequence as the head knows it: tokens known, issued and computed."""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from omlx.ids import BlockId, SeqId
from omlx.node.step import Admit, SamplingParams


class Finish(Enum):
    """Why a sequence ended; the values are the OpenAI words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine is asked: token ids in, token ids out; it knows no text."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_tokens: frozenset[int]
    """Drawing one of these ends the sequence with Finish.STOP."""

    def within(self, capacity_tokens: int) -> "Request | None":
        """This request, its answer no longer than memory for so many tokens allows; None: not even one."""
        most = capacity_tokens - len(self.prompt)
        return None if most < 1 else replace(self, max_tokens=min(self.max_tokens, most))


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. A stop token is delivered too, with finish = STOP."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Sequence:
    """Owned by the scheduler; nobody else writes to it.

    0 <= computed <= issued and computed <= known, where known = len(tokens). Looking ahead, `issued` may
    pass `known`: by one for each draw on its way beyond the first.
    """

    id: SeqId
    request: Request
    group: int = 0
    """Sequences of one group decode in the same plan."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and the committed answer."""
    issued: int = 0
    computed: int = 0
    suspected: int = 0
    """How often it was in a forward that could not be computed."""
    alone_until: int = 0
    """While it knows fewer tokens, it shares no plan with others."""
    cut_off: bool = False
    """Whether a loss came while it answered: until it is computed again, others may wait for it."""
    begun: bool = False
    """Whether it was looked for in what is kept, in this epoch."""
    looked_at: int = 0
    """How many blocks had been named then."""
    follows: tuple[SeqId, int] | None = None
    """Who computes what this one begins with, and up to which token: it waits for that."""
    path: list[BlockId] = field(default_factory=list)
    """The names of its blocks, as far as they are whole and computed or laid back."""
    restoring: deque[BlockId] = field(default_factory=deque)
    """Blocks to be laid back before anything is computed."""
    restore_end: int = 0
    """Tokens that it has then."""
    distrusts: bool = False
    """Whether an epoch ended while something was laid back for it: it is computed then, come what may."""
    prompt_kept: bool = False
    """Whether the rest of its prompt behind the last whole block is kept."""

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def draws_in_flight(self) -> int:
        """Draws whose tokens the head does not know yet."""
        return max(0, self.issued - self.known + 1)

    @property
    def decodes(self) -> bool:
        """Whether the prompt is issued up to its last token at least."""
        return not self.restoring and self.issued >= self.known - 1

    @property
    def computes(self) -> bool:
        """Whether chunks of its prompt are to be computed."""
        return not self.restoring and self.issued < self.known - 1

    @property
    def may_draw(self) -> bool:
        """Whether it decodes, and the answer is not issued to its end.

        The answer's last token is drawn and never computed.
        """
        last = len(self.request.prompt) + self.request.max_tokens - 1
        return self.decodes and self.issued < last

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.request.prompt) :])

    def shrink(self, capacity_tokens: int) -> bool:
        """End the answer where the memory ends; False where it is there already."""
        fitting = self.request.within(capacity_tokens)
        if fitting is None or self.known >= capacity_tokens:
            return False
        self.request = fitting
        return True

    def admit(self) -> Admit:
        """What its last stage has to know of it."""
        sampling = self.request.sampling
        if not sampling.needs_history:
            return Admit(self.id, sampling, (), ())
        return Admit(self.id, sampling, self.request.prompt, self.answer)

    def finish(self, token: int) -> Finish | None:
        """Why the answer ends with this token, which is its last one now; None: it goes on."""
        if token in self.request.stop_tokens:
            return Finish.STOP
        if len(self.answer) >= self.request.max_tokens:
            return Finish.LENGTH
        return None
