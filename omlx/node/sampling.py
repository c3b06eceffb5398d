"""Draw the next tokens on the last stage: each row by its own parameters, from (seed, position) alone.

The order is logit_bias, the penalties, temperature, top_k, top_p, min_p, draw. The draw inverts the
cumulative distribution at a number made by hashing (seed, position): no running generator whose state
the number of stages, the company in a batch or a rewind could change.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

import mlx.core as mx
import numpy as np

from omlx.ids import SeqId
from omlx.node.step import Admit, Sampled, SamplingParams, Slice


@dataclass(slots=True)
class History:
    """What one sequence's penalties look back at. It stays on the device: a draw may follow the one
    before without anybody having read that one's token."""

    prompt: mx.array
    """[vocabulary] bool."""
    answer: mx.array
    """[vocabulary] float32, how often each token was drawn."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One batch's drawn tokens, perhaps not computed yet."""

    slices: tuple[Slice, ...]
    tokens: mx.array
    """[B] ids."""
    logprobs: dict[int, tuple[mx.array, mx.array, mx.array]]
    """By row, for the rows that ask: the drawn token's, the most likely tokens, theirs."""

    @property
    def arrays(self) -> list[mx.array]:
        """All that `read` will want."""
        return [self.tokens, *(array for row in self.logprobs.values() for array in row)]

    def read(self) -> tuple[Sampled, ...]:
        """Wait for the tokens."""
        tokens: list[int] = self.tokens.tolist()  # type: ignore[assignment]
        return tuple(
            Sampled(piece.seq, token, *self._logprob(row))
            for row, (piece, token) in enumerate(zip(self.slices, tokens, strict=True))
        )

    def _logprob(self, row: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if row not in self.logprobs:
            return None, ()
        own, ids, values = (array.tolist() for array in self.logprobs[row])
        return own, tuple(zip(ids, values, strict=True))  # type: ignore[arg-type, return-value]


@dataclass(slots=True)
class Sampler:
    """The last stage's memory of each sequence's parameters and, for penalties, of its tokens."""

    _admits: dict[SeqId, Admit] = field(default_factory=dict)
    _history: dict[SeqId, History] = field(default_factory=dict)

    def clear(self) -> None:
        self._admits.clear()
        self._history.clear()

    def admit(self, admit: Admit) -> None:
        self._admits[admit.seq] = admit

    def drop(self, seq: SeqId) -> None:
        del self._admits[seq]
        self._history.pop(seq, None)

    def draw(self, logits: mx.array, slices: tuple[Slice, ...]) -> Draw:
        """One token a row, lazily. logits: [B, vocabulary], row i belonging to slices[i]."""
        params = [self._admits[piece.seq].sampling for piece in slices]
        if all(p.is_plain for p in params):
            return Draw(slices, mx.argmax(logits, axis=-1), {})
        raw = logits.astype(mx.float32)
        shaped = self._shaped(raw, slices)
        tokens = _tokens(shaped, params, [piece.end for piece in slices])
        for row, piece in enumerate(slices):
            if (history := self._history.get(piece.seq)) is not None:
                history.answer = history.answer.at[tokens[row]].add(1.0)
        return Draw(slices, tokens, _logprobs(raw, tokens, params))

    def _shaped(self, logits: mx.array, slices: tuple[Slice, ...]) -> mx.array:
        """Bias and penalties, on the rows that have them."""
        rows = []
        changed = False
        for row, piece in enumerate(slices):
            params = self._admits[piece.seq].sampling
            line = logits[row]
            if params.logit_bias or params.needs_history:
                line = _with_bias(line, params)
                if params.needs_history:
                    line = _with_penalties(line, params, self._looked_back(piece.seq, line.shape[0]))
                changed = True
            rows.append(line)
        return mx.stack(rows) if changed else logits

    def _looked_back(self, seq: SeqId, vocabulary: int) -> History:
        if seq not in self._history:
            admit = self._admits[seq]
            prompt, answer = np.zeros(vocabulary, bool), np.zeros(vocabulary, np.float32)
            prompt[list(admit.prompt)] = True
            np.add.at(answer, list(admit.answer), 1)
            self._history[seq] = History(mx.array(prompt), mx.array(answer))
        return self._history[seq]


def _tokens(logits: mx.array, params: list[SamplingParams], positions: list[int]) -> mx.array:
    """[B] token ids; only the rows with a temperature pay for a sort."""
    greedy = mx.argmax(logits, axis=-1)
    warm = [row for row, p in enumerate(params) if p.temperature > 0]
    if not warm:
        return greedy
    numbers = [uniform(params[row].seed, positions[row]) for row in warm]
    index = mx.array(warm)
    greedy[index] = _invert(logits[index], [params[row] for row in warm], numbers).astype(greedy.dtype)
    return greedy


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone, on every machine."""
    digest = blake2b(pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _with_bias(logits: mx.array, params: SamplingParams) -> mx.array:
    if not params.logit_bias:
        return logits
    ids, values = zip(*params.logit_bias, strict=True)
    return logits.at[mx.array(ids)].add(mx.array(values, mx.float32))


def _with_penalties(logits: mx.array, params: SamplingParams, history: History) -> mx.array:
    """Repetition as in CTRL (arXiv 1909.05858), over prompt and answer; presence and frequency as the
    OpenAI reference has them, over the answer."""
    said = history.answer > 0
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        pushed = mx.where(logits > 0, logits / penalty, logits * penalty)
        logits = mx.where(history.prompt | said, pushed, logits)
    return logits - params.presence_penalty * said - params.frequency_penalty * history.answer


def _invert(logits: mx.array, params: list[SamplingParams], numbers: list[float]) -> mx.array:
    """Token ids [B] at which each row's filtered cumulative distribution passes its number.

    logits: [B, vocabulary] float32.
    """
    vocabulary = logits.shape[-1]

    def column(values: list[float]) -> mx.array:
        return mx.array(values, mx.float32)[:, None]

    scaled = logits / column([p.temperature for p in params])
    order = mx.argsort(-scaled, axis=-1)
    probs = mx.softmax(mx.take_along_axis(scaled, order, axis=-1), axis=-1)
    rank = mx.arange(vocabulary)[None]
    keep = rank < column([p.top_k or vocabulary for p in params])
    probs = mx.where(keep, probs, 0.0)
    probs = probs / probs.sum(axis=-1, keepdims=True)
    above = mx.cumsum(probs, axis=-1) - probs
    keep = (above < column([p.top_p for p in params])) & (
        probs >= probs[:, :1] * column([p.min_p for p in params])
    )
    keep = keep | (rank == 0)
    probs = mx.where(keep & (probs > 0), probs, 0.0)
    mass = mx.cumsum(probs, axis=-1)
    target = column(numbers) * mass[:, -1:]
    last = (probs > 0).sum(axis=-1) - 1
    place = mx.minimum((mass <= target).sum(axis=-1), last)
    return mx.take_along_axis(order, place[:, None], axis=-1)[:, 0]


def _logprobs(
    logits: mx.array, tokens: mx.array, params: list[SamplingParams]
) -> dict[int, tuple[mx.array, mx.array, mx.array]]:
    """By row, for the rows that ask, of the raw model: see Draw.logprobs."""
    found = {}
    for row, wanted in enumerate(p.top_logprobs for p in params):
        if wanted is not None:
            line = logits[row] - mx.logsumexp(logits[row])
            best = mx.argsort(-line)[:wanted]
            found[row] = (line[tokens[row]], best, line[best])
    return found
