"""Budgets that follow free memory: what a plan may count with of a node as others come and go there. Pure.

A node gives its role's share of memory, but never more than is there: what our stages hold, what is free,
and not the last of it. Others' memory that comes and goes within half a minute changes nothing; what stays
taken is given up then, and what becomes free again is used after five minutes.

Heat needs nothing here: a machine that throttles is seen as slower steps, by `measure.py`.
"""

from dataclasses import dataclass, replace

SHRINK_AFTER_S = 30.0
GROW_AFTER_S = 300.0
STEP = 0.05
"""Of the role's bytes: smaller changes of the budget are not made."""
RESERVE = 0.05
"""Of the role's bytes: so much of what is free stays free, for whoever needs it next."""
MOST_GAP_S = 30.0
"""Between samples; after a longer silence waiting starts anew, for nobody knows what was meanwhile."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """A look at a node's memory."""

    at_s: float
    """By a clock that does not jump."""
    free_bytes: int
    """What could be taken without swapping."""
    held_bytes: int
    """What our stages hold there."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Since when all samples have asked for another budget, and the mildest of them."""

    since_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Headroom:
    """One node's budget, and what may change it soon."""

    role_bytes: int
    """By its role (`candidate.budget_of`): the most that it ever gives."""
    budget_bytes: int
    """To plan with."""
    seen_s: float
    """When the last sample was taken."""
    less: Waiting | None = None
    more: Waiting | None = None

    @property
    def step_bytes(self) -> int:
        return max(1, int(self.role_bytes * STEP))


def begin(role_bytes: int, sample: MemorySample) -> Headroom:
    """At the first sample: what others hold already is theirs."""
    return Headroom(role_bytes, bearable(role_bytes, sample), sample.at_s)


def bearable(role_bytes: int, sample: MemorySample) -> int:
    """The bytes that our stages could hold now; at least 1, which no layer fits into."""
    free = max(0, sample.free_bytes - int(role_bytes * RESERVE))
    return max(1, min(role_bytes, sample.held_bytes + free))


def follow(headroom: Headroom, sample: MemorySample) -> Headroom:
    """With one sample more. The budget changes where all samples of the last SHRINK_AFTER_S or GROW_AFTER_S
    ask for it, and then only as far as all of them do: a peak or a dip in between does not count."""
    now = bearable(headroom.role_bytes, sample)
    if not 0 <= sample.at_s - headroom.seen_s <= MOST_GAP_S:
        headroom = replace(headroom, less=None, more=None)
    # The last part of the way back may be less than a step.
    whole = headroom.budget_bytes < now == headroom.role_bytes
    less: Waiting | None = None
    more: Waiting | None = None
    if now <= headroom.budget_bytes - headroom.step_bytes:
        before = headroom.less or Waiting(sample.at_s, now)
        less = Waiting(before.since_s, max(before.bytes, now))
    elif now >= headroom.budget_bytes + headroom.step_bytes or whole:
        before = headroom.more or Waiting(sample.at_s, now)
        more = Waiting(before.since_s, min(before.bytes, now))
    for waiting, after_s in ((less, SHRINK_AFTER_S), (more, GROW_AFTER_S)):
        if waiting is not None and sample.at_s - waiting.since_s >= after_s:
            return Headroom(headroom.role_bytes, waiting.bytes, sample.at_s)
    return replace(headroom, seen_s=sample.at_s, less=less, more=more)
