"""Draw the next tokens on the last stage: each row by its own parameters, from (seed, position) alone.

The order is logit_bias, the penalties, temperature, top_k, top_p, min_p, draw. The draw inverts the
cumulative distribution at a number made by hashing (seed, position): no running generator whose state
the number of stages, the company in a batch or a rewind could change.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import pack

import mlx.core as mx

from omlx.ids import SeqId
from omlx.node.step import Admit, Sampled, SamplingParams, Slice


@dataclass(slots=True)
class History:
    """What one sequence's penalties look back at."""

    prompt: frozenset[int]
    answer: Counter[int]


@dataclass(slots=True)
class Sampler:
    """The last stage's memory of each sequence's parameters and, for penalties, of its tokens."""

    _params: dict[SeqId, SamplingParams] = field(default_factory=dict)
    _history: dict[SeqId, History] = field(default_factory=dict)

    def clear(self) -> None:
        self._params.clear()
        self._history.clear()

    def admit(self, admit: Admit) -> None:
        self._params[admit.seq] = admit.sampling
        if admit.sampling.needs_history:
            self._history[admit.seq] = History(frozenset(admit.prompt), Counter(admit.answer))

    def drop(self, seq: SeqId) -> None:
        del self._params[seq]
        self._history.pop(seq, None)

    def draw(self, logits: mx.array, slices: Sequence[Slice]) -> tuple[Sampled, ...]:
        """One token a row. logits: [B, vocabulary], row i belonging to slices[i]."""
        raw = logits.astype(mx.float32)
        params = [self._params[piece.seq] for piece in slices]
        tokens = self._tokens(self._shaped(raw, slices), params, [piece.start + 1 for piece in slices])
        logprobs = _logprobs(raw, tokens, params)
        drawn: list[int] = tokens.tolist()  # type: ignore[assignment]
        for piece, token in zip(slices, drawn, strict=True):
            if piece.seq in self._history:
                self._history[piece.seq].answer[token] += 1
        return tuple(
            Sampled(piece.seq, token, *logprobs.get(row, (None, ())))
            for row, (piece, token) in enumerate(zip(slices, drawn, strict=True))
        )

    def _shaped(self, logits: mx.array, slices: Sequence[Slice]) -> mx.array:
        """Bias and penalties, on the rows that have them."""
        rows = []
        changed = False
        for row, piece in enumerate(slices):
            params, history = self._params[piece.seq], self._history.get(piece.seq)
            line = logits[row]
            if params.logit_bias or history is not None:
                line = _with_bias(line, params)
                if history is not None:
                    line = _with_penalties(line, params, history)
                changed = True
            rows.append(line)
        return mx.stack(rows) if changed else logits

    @staticmethod
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
    seen = sorted(history.prompt | history.answer.keys())
    if params.repetition_penalty != 1.0 and seen:
        index = mx.array(seen)
        at = logits[index]
        penalty = params.repetition_penalty
        logits = mx.put_along_axis(logits, index, mx.where(at > 0, at / penalty, at * penalty), axis=0)
    if history.answer and (params.presence_penalty or params.frequency_penalty):
        ids, counts = zip(*sorted(history.answer.items()), strict=True)
        cost = params.presence_penalty + params.frequency_penalty * mx.array(counts, mx.float32)
        logits = logits.at[mx.array(ids)].subtract(cost)
    return logits


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
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """By row, for the rows that ask: (the drawn token's, the most likely ones'), of the raw model."""
    asking = [row for row, p in enumerate(params) if p.top_logprobs is not None]
    found: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
    for row in asking:
        line = logits[row] - mx.logsumexp(logits[row])
        wanted = params[row].top_logprobs or 0
        order = mx.argsort(-line)[:wanted] if wanted else mx.array([], mx.int32)
        ids: list[int] = order.tolist()  # type: ignore[assignment]
        values: list[float] = line[order].tolist() if wanted else []  # type: ignore[assignment]
        own: float = line[tokens[row]].item()  # type: ignore[assignment]
        found[row] = (own, tuple(zip(ids, values, strict=True)))
    return found
