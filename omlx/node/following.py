"""Who waits for whom: of prompts that begin alike, one is computed and the others lay back what it keeps."""

from collections.abc import Iterable, Mapping

from omlx.ids import SeqId
from omlx.node.sequence import Sequence

LEAST_SHARED = 512
"""Tokens that waiting must spare."""


def leader(sequence: Sequence, running: Iterable[Sequence], step: int) -> tuple[SeqId, int] | None:
    """The sequence that is about to compute most of what `sequence` begins with, and up to which token.

    step: what is kept is a multiple of so many tokens; 0: nothing is kept. Nobody follows a follower, so
    nobody waits in a circle. Pure.
    """
    best: tuple[int, SeqId] | None = None
    for elder in running if step else ():
        if elder is sequence or elder.follows or elder.distrusts or elder.decodes:
            continue
        until = shared(elder.tokens, sequence.tokens[:-1]) // step * step
        if until >= sequence.restore_end + LEAST_SHARED and (best is None or until > best[0]):
            best = until, elder.id
    return None if best is None else (best[1], best[0])


def waits(sequence: Sequence, running: Mapping[SeqId, Sequence]) -> bool:
    """Whether the one that it follows still computes what it waits for; if not, it follows no more."""
    if sequence.follows is None:
        return False
    seq, until = sequence.follows
    elder = running.get(seq)
    over = elder is None or elder.distrusts or elder.computed >= until
    if over or sequence.issued or sequence.known < sequence.alone_until:
        sequence.follows = None
    return sequence.follows is not None


def shared(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same; by halving, for lists compare much faster than their items."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
