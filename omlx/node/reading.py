"""Whether reading a block is worth it: what the slowest SSD takes, against what computing would take."""

from dataclasses import dataclass

RETRY_SLOW_S = 10.0
"""After so long an SSD that was too slow is tried again."""
SAMPLES = 8
"""Fewer reads say nothing."""
SLOWER = 2.0
"""So many times as slow as computing is too slow: both figures are rough, and computing holds others up."""
WEIGHT, MOST_SLOWER = 0.2, 4.0
"""One slow read counts as so many times the usual at most: the machine was busy with something else."""


@dataclass(slots=True)
class Reading:
    """Seconds that a block takes from the SSD, smoothed."""

    seconds: float = 0.0
    samples: int = 0
    slow_since: float | None = None
    """On the clock of `too_slow`."""

    def note(self, seconds: float) -> None:
        """A block has been read."""
        self.samples += 1
        if self.samples == 1:
            self.seconds = seconds
        else:
            self.seconds += WEIGHT * (min(seconds, MOST_SLOWER * self.seconds) - self.seconds)

    def too_slow(self, compute_s: float, now: float) -> bool:
        """compute_s: what computing a block is thought to take; 0: nobody knows."""
        if self.samples < SAMPLES or not compute_s or self.seconds <= SLOWER * compute_s:
            self.slow_since = None
            return False
        if self.slow_since is None:
            self.slow_since = now
        if now - self.slow_since > RETRY_SLOW_S:
            self.samples, self.slow_since = 0, None
            return False
        return True
