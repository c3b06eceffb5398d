"""How long a machine that was lost gets no layers, where others can have them: longer each time. Pure.

A cable that is loose comes and goes: each loss costs everybody seconds, and so does each return.
"""

from dataclasses import dataclass

DOUBTED_S, MOST_DOUBTED_S = 15.0, 240.0
"""After a first loss; Ray lists a machine that is gone for some seconds more. And the longest."""
FORGIVEN_AFTER_S = 600.0
"""Who was well for so long is lost for the first time."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Of one machine. Times as of time.monotonic."""

    since: float
    seconds: float = DOUBTED_S

    def holds(self, now: float) -> bool:
        return now < self.since + self.seconds

    def again(self, now: float) -> "Doubt":
        """It gave a new reason. As long as the last one counts, that was the same occasion."""
        if self.holds(now):
            return Doubt(now, self.seconds)
        if now >= self.since + self.seconds + FORGIVEN_AFTER_S:
            return Doubt(now)
        return Doubt(now, min(MOST_DOUBTED_S, 2 * self.seconds))
