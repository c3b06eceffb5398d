"""Which prompts advance in a step, and how far: pure, first come first served within two classes.

A prompt with less than a step's tokens to go is short. Where short and long ones wait together, the short
have one half of the budget and the oldest long one has the other: a question behind a book does not wait for
the book, and no stream of questions starves it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from omlx.node.limits import Limits
from omlx.node.pacing import SMOOTH, Pace

UNMEASURED_PART = 4
"""Before anything was measured, chunks beside running answers have this part of a step's tokens."""
UNMEASURED_CHUNKS, LEAST_UNMEASURED = 4, 64
"""Before anything was measured: chunks of all prompts for each stage behind the first one, and the tokens of
each at least."""


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


def budget_of(
    pace: Pace, limits: Limits, prompts: Sequence[Prompt], rows: int, groups: int, swell: float
) -> Budget:
    """For chunks of one step, beside `rows` answers that are dealt into `groups`. swell: see `swelled`."""
    if not rows:
        first = _first_chunk(pace, limits, sum(p.prefix + p.left for p in prompts))
        # Nobody waits for one stage alone: chunks of equal time are for those behind it.
        seconds = pace.added(first, 0) if len(pace.stages) > 1 else inf
        return Budget(pace, first, seconds, strict=False)
    # Several who wait for their first token, and not for long, weigh as much as those who wait for the
    # next one: a burst of questions is answered together, not one behind the other.
    crowd = max(1.0, sum(prompt.left <= limits.step_tokens for prompt in prompts) / rows)
    if not pace.stages:
        tokens = min(limits.step_tokens, int(crowd * limits.step_tokens / UNMEASURED_PART))
        return Budget(pace, max(1, tokens))
    seconds = pace.chunk_seconds(rows, groups, limits.lanes_apart(groups), crowd * limits.slowdown)
    return Budget(pace, limits.step_tokens, swelled(swell, limits.stages) * seconds)


def _first_chunk(pace: Pace, limits: Limits, total: int) -> int:
    if pace.stages or limits.stages == 1:
        return pace.first_chunk(total, limits.step_tokens)
    # In one piece, one stage after the other would compute it while the others have nothing to do.
    part = -(-total // (UNMEASURED_CHUNKS * (limits.stages - 1)))
    return min(limits.step_tokens, max(LEAST_UNMEASURED, part))


def swelled(swell: float, stages: int) -> float:
    """What part of its time the next chunk beside running answers has, when the latest had `swell`."""
    return swell + (1 - swell) / stages


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
