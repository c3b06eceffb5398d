"""What strangers send that is of no use, told in the log without letting them fill it."""

import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

EVERY_S = 60.0
MOST_SOURCES = 256


class Complaints:
    """One line a minute about a source, and about MOST_SOURCES of them. `now` is in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._told: dict[str, float] = {}

    def tell(self, source: str, why: str) -> bool:
        """Both texts may be anybody's: they are cut and escaped. Returns whether a line was written."""
        now = self._now()
        self._told = {other: at for other, at in self._told.items() if now < at + EVERY_S}
        if source in self._told or len(self._told) >= MOST_SOURCES:
            return False
        self._told[source] = now
        log.warning("discovery", source=_plain(source[:100]), why=_plain(why[:300]))
        return True


def _plain(text: str) -> str:
    return ascii(text)[1:-1]
