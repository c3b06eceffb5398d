"""What travels between the head and the stages: one plan for every stage, one result from the last.

Frozen values, encoded by msgspec; nothing here knows MLX or sockets. Every stage gets the same plans
in the same order, so the contents of all stages agree without talking about it.
"""

from collections.abc import Iterable

import msgspec

from omlx.ids import BlockId, Epoch, PlanId, SeqId


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence's next token is drawn. Neutral values switch a part off.

    The order on the last stage: logit_bias, the penalties, temperature, top_k, top_p, min_p, draw.
    The draw is a function of (seed, position) alone, so neither the number of stages, nor the
    company in the batch, nor a rewind changes it.
    """

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens already in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the token is in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """0 <= seed < 2**63; the head draws one where the client gave none."""
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: the drawn token's alone; n: also the n most likely ones'."""

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        return (
            self.temperature == 0
            and not self.logit_bias
            and not self.needs_history
            and self.top_logprobs is None
        )

    @property
    def needs_history(self) -> bool:
        """Whether the last stage must know which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A run of a sequence's tokens to compute: tokens[0] stands at position `start`.

    Without tokens it looks ahead: one token, the one that this sequence's latest draw gives, which the
    head does not know yet.
    """

    seq: SeqId
    tokens: tuple[int, ...]
    start: int
    """How many of the sequence's tokens are in the caches already."""
    sample: bool
    """Draw the next token after it. Slices of several tokens are sampled only where stages mix."""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + max(1, len(self.tokens))


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters: from here on slices may name it."""

    seq: SeqId
    sampling: SamplingParams
    prompt: tuple[int, ...]
    """The prompt's tokens where penalties need them, else empty."""
    answer: tuple[int, ...]
    """Tokens generated before a rewind, where penalties need them, else empty."""


class Keep(msgspec.Struct, frozen=True, array_like=True):
    """Put the tokens [start, end) of a running sequence, computed by earlier plans, into the hot tier."""

    seq: SeqId
    block: BlockId
    start: int
    end: int


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Once this plan's slice is computed, set [start, end) aside for a Keep: a sliding window moves on, a
    recurrent state changes."""

    seq: SeqId
    start: int
    end: int
    snapshot: bool
    """Take recurrent states too: the slice ends at `end`."""


class Restore(msgspec.Struct, frozen=True, array_like=True):
    """Lay hot blocks behind what a sequence has in its caches."""

    seq: SeqId
    blocks: tuple[BlockId, ...]
    start: int
    end: int
    """Tokens in the caches afterwards; of the last block perhaps not all are used."""
    room: int
    """Tokens that will follow for certain, those of this restore included: what to allocate for."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """How much slices ask of a stage."""

    rows: int
    """Single tokens that are drawn from."""
    tokens: int
    """Tokens of prompt chunks, the last ones included, which are drawn from."""
    pairs: float
    """Pairs of a chunk's token and a position before it, or itself by half."""


def work_of(slices: Iterable[Slice]) -> Work:
    rows = tokens = 0
    pairs = 0.0
    for piece in slices:
        size = piece.end - piece.start
        if piece.sample and size == 1:
            rows += 1
        else:
            tokens += size
            pairs += size * (piece.start + size / 2)
    return Work(rows, tokens, pairs)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step, for every stage: keep, drop, admit, restore, compute, cut, evict, in this order."""

    id: PlanId
    epoch: Epoch
    drops: tuple[SeqId, ...]
    admits: tuple[Admit, ...]
    slices: tuple[Slice, ...]
    committed: PlanId = PlanId(0)
    """All plans of this epoch before this one are over: what was sent for them has been sent."""
    keeps: tuple[Keep, ...] = ()
    restores: tuple[Restore, ...] = ()
    cuts: tuple[Cut, ...] = ()
    evicts: tuple[BlockId, ...] = ()
    """Out of the hot tier."""

    @property
    def work(self) -> Work:
        return work_of(self.slices)


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """One drawn token. Log-probabilities are natural logs of the model's own distribution."""

    seq: SeqId
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), most likely first."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """From the last stage: what was drawn, in the order of the plan's sampled slices."""

    plan: PlanId
    epoch: Epoch
    sampled: tuple[Sampled, ...]
