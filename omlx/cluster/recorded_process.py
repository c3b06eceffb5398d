"""A process told by its pid and when it started: a pid alone may be another's by now."""

from contextlib import suppress
from dataclasses import dataclass

import psutil

CLOCK_STEPS_S = 2.0
"""The kernel counts from boot; what that is in seconds since 1970 moves when the clock is set."""


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """What is left of a process on paper. `started`: seconds since 1970, as its machine says it."""

    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> "RecordedProcess":
        """Raises psutil.NoSuchProcess."""
        return cls(process.pid, process.create_time())

    def find(self) -> psutil.Process | None:
        """None once it is gone."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < CLOCK_STEPS_S
            if same and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None
