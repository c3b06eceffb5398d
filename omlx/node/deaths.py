"""When a model whose stages die again and again is given up."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

MOST, WITHIN_S = 3, 60.0
"""So many lost epochs within so many seconds, where the same stages were started again each time; three times
as many where it went on elsewhere."""


@dataclass(slots=True)
class Deaths:
    """Of one engine. `now` is in seconds."""

    now: Callable[[], float] = time.monotonic
    _at: deque[float] = field(default_factory=deque)

    def count(self, *, elsewhere: bool) -> int:
        """One more; returns how many there were lately if these are too many, else 0."""
        now = self.now()
        self._at.append(now)
        while self._at[0] < now - WITHIN_S:
            self._at.popleft()
        return len(self._at) if len(self._at) >= MOST * (3 if elsewhere else 1) else 0
