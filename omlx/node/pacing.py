"""How a model's stages are kept busy: into how many groups answers are dealt, how long chunks may take.

Pure decisions from the stages' fitted costs. Sources: the arithmetic of pipelines (a round of M groups over
S stages takes max(sum of stages, M * slowest)), and SGLang's dynamic chunking (blog of 2026-01-15): a chunk
is as long as takes the time of the first one, since attention's share grows with the prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from omlx.node.costs import StageCost

HOP_S = 0.0006
"""One plan's way from a stage to the next, and its launch there."""
GAIN = 0.95
"""Regrouping moves keys and values: with more groups the round must be so much shorter."""
BACK = 0.98
LEAST_CHUNK = 32
"""Tokens; the least that the first prompt gets on by, or fewer where they are dear."""
MANY = 2**30
"""Tokens; where chunks were measured to cost nothing beside their forward."""
MOST_CHUNKS = 16
"""Of a prompt, for each stage behind the first one: more chunks would fill and drain hardly any faster, and a
fit that makes little of a forward's fixed part would ask for hundreds."""
SMOOTH = 0.7
"""0: chunks of equal length, 1: of equal time. Between, so that the last ones do not become tiny."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the stages are known to take."""

    stages: tuple[StageCost, ...] = ()
    """Empty while any stage is unmeasured."""
    known_rows: frozenset[int] = frozenset()
    """Batch sizes that were measured."""

    def round_s(self, rows: int, groups: int) -> float:
        """From one token of an answer to its next one, while `rows` answers in `groups` have the stages
        to themselves."""
        size = -(-rows // groups)
        steps = [stage.decode(size) + HOP_S for stage in self.stages]
        return max(sum(steps), groups * max(steps))

    def rounds(self, rows: int) -> tuple[tuple[int, float], ...]:
        """(groups, round_s) for every number of groups that may be chosen; empty while nothing is known."""
        if not self.stages or not rows:
            return ()
        most = min(len(self.stages) + 1, rows) if len(self.stages) > 1 else 1
        return tuple((groups, self.round_s(rows, groups)) for groups in range(1, most + 1))

    def groups(self, rows: int, now: int, stages: int) -> int:
        """Into how many groups so many answers are dealt, 1 to stages + 1.

        One step of all is weighed against more steps of fewer. A batch size beyond the measured is tried.
        """
        if stages == 1 or rows < 2:
            return 1
        if not self.stages or not self.known_rows:
            return min(stages, rows)
        if -(-rows // min(stages, rows)) < min(self.known_rows):
            return min(stages, rows)
        if rows > max(self.known_rows):
            return 1
        rounds = {groups: self.round_s(rows, groups) for groups in range(1, min(stages + 1, rows) + 1)}
        chosen = min(now, max(rounds))
        best = min(rounds, key=rounds.__getitem__)
        if rounds[best] < GAIN * rounds[chosen]:
            chosen = best
        # Stages that share a machine take longer side by side than each alone, and fewer groups read the
        # weights less often: back to them as soon as hardly anything is lost.
        return min(groups for groups, took_s in rounds.items() if BACK * took_s <= rounds[chosen])

    def chunk_seconds(self, rows: int, groups: int, apart: int, slowdown: float) -> float:
        """What chunks may add to a plan of the slowest stage while `rows` answers decode, so that a round
        takes at most `slowdown` times as long as without them. The stages must be measured.

        apart: plans in a round that chunks have to themselves; 0: they are in the groups' own plans.
        """
        size = -(-rows // groups)
        busy = groups * max(stage.decode(size) for stage in self.stages)
        carriers = apart or groups
        shared = not apart and all(stage.mixes for stage in self.stages)
        own = max(stage.chunk + (stage.beside - stage.fixed if shared else 0.0) for stage in self.stages)
        room = slowdown * self.round_s(rows, groups) - busy - carriers * max(0.0, own)
        return max(0.0, room) / carriers

    @property
    def least_chunk(self) -> int:
        """Tokens: a smaller chunk pays twice as much for its forward as for itself."""
        slowest = max(self.stages, key=lambda stage: stage.token, default=None)
        if slowest is None or slowest.token <= 0:
            return LEAST_CHUNK
        return max(1, min(LEAST_CHUNK, round(slowest.chunk / slowest.token / 2)))

    def first_chunk(self, total: int, most: int) -> int:
        """Tokens of a chunk without a prefix while no answer waits.

        total: of the prompts that wait, whether computed already or not. Filling and draining S stages takes
        S - 1 times as long as the longest chunk, so there is nothing in making the later ones shorter, and
        each chunk costs its forward's fixed part: their sum is least at
        sqrt(total * fixed / (token * (S - 1))) tokens.
        """
        if len(self.stages) < 2:
            return most
        slowest = max(self.stages, key=lambda stage: stage.token)
        if slowest.token <= 0:
            return most
        others = len(self.stages) - 1
        best = max(sqrt(total * slowest.chunk / (slowest.token * others)), total / (MOST_CHUNKS * others))
        return max(min(LEAST_CHUNK, most), min(most, round(best)))

    def tokens_within(self, seconds: float, prefix: int) -> int:
        """Tokens behind `prefix` that add at most so many seconds to a plan of any stage."""
        return int(min(MANY, *(stage.tokens_within(seconds, prefix) for stage in self.stages)))

    def added(self, tokens: int, prefix: int) -> float:
        """Seconds that such a chunk adds to the slowest stage's plan."""
        return max(stage.chunk_part(tokens, tokens * (prefix + tokens / 2)) for stage in self.stages)


def pace_of(costs: Sequence[StageCost | None], known_rows: Sequence[frozenset[int]]) -> Pace:
    stages = tuple(cost for cost in costs if cost is not None)
    if len(stages) < len(costs) or not costs:
        return Pace()
    return Pace(stages, frozenset.intersection(*known_rows))
