"""Which prompts advance in a step, and how far: pure, first come first served within two classes.

A prompt with less than a step's tokens to go is short. Where short and long ones wait together, the short
have one half of the budget and the oldest long one has the other: a question behind a book does not wait for
the book, and no stream of questions starves it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from omlx.node.pacing import SMOOTH, Pace


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is computed of one, and what is left, in tokens."""

    prefix: int
    left: int


@dataclass(slots=True)
class Budget:
    """What chunks may take in one step; `spend` takes from it."""

    pace: Pace
    tokens: int
    seconds: float = inf
    """Of the slowest stage, beside what the step takes without chunks; inf while nothing was measured."""
    strict: bool = True
    """Else the seconds are an aim: chunks are between equal time and equal length."""

    def spend(self, prompt: Prompt, portion: float = 1.0) -> int:
        """How far it gets with this portion of what is left."""
        tokens = int(self.tokens * portion)
        size = min(prompt.left, tokens)
        if self.seconds < inf:
            even = self.pace.tokens_within(self.seconds * portion, prompt.prefix)
            if not self.strict:
                even = round(SMOOTH * even + (1 - SMOOTH) * tokens)
            size = min(size, even)
        self.take(prompt, size)
        return size

    def take(self, prompt: Prompt, size: int) -> None:
        self.tokens -= size
        if self.seconds < inf:
            self.seconds = max(0.0, self.seconds - self.pace.added(size, prompt.prefix))


def deal(prompts: Sequence[Prompt], budget: Budget, short: int) -> list[int]:
    """Tokens for each of `prompts`, which come in the order of their turn.

    short: with so many tokens left, or fewer, a prompt is short. The first one whose turn it is gets on by
    `least_chunk` at least, whatever the seconds say.
    """
    sizes = [0] * len(prompts)

    def spend(places: Iterable[int], portion: float = 1.0) -> None:
        for place in places:
            prompt = prompts[place]
            rest = Prompt(prompt.prefix + sizes[place], prompt.left - sizes[place])
            sizes[place] += budget.spend(rest, portion)

    quick = [place for place, prompt in enumerate(prompts) if prompt.left <= short]
    slow = [place for place, prompt in enumerate(prompts) if prompt.left > short]
    if prompts:
        oldest = prompts[0]
        sizes[0] = min(budget.pace.least_chunk, oldest.left, budget.tokens)
        budget.take(oldest, sizes[0])
    if quick and slow:
        spend(slow[:1], 0.5)
    spend(quick)
    spend(slow)
    return sizes
