"""Events on their way from discovery to whoever folds them: bounded, and of each node only the newest."""

import asyncio

from omlx.cluster.nodes import NodeId, merge
from omlx.cluster.roster import Lost, Seen

MOST_WAITING = 512


class Inbox:
    """Belongs to one event loop; one reader."""

    def __init__(self) -> None:
        self._events: dict[tuple[NodeId, str | None], Seen | Lost] = {}
        self._news = asyncio.Event()
        self._failed: BaseException | None = None

    def put(self, event: Seen | Lost) -> bool:
        """False where there is no place for another node."""
        node = event.node if isinstance(event, Seen) else event
        key = node.id, node.host_key_fingerprint
        before = self._events.get(key)
        if before is None and len(self._events) >= MOST_WAITING:
            return False
        if isinstance(before, Seen) and isinstance(event, Seen):
            event = Seen(merge(before.node, event.node))
        self._events[key] = event
        self._news.set()
        return True

    def fail(self, error: BaseException) -> None:
        """Whoever reads gets this, after what waits."""
        self._failed = error
        self._news.set()

    async def get(self) -> Seen | Lost:
        while not self._events:
            if self._failed is not None:
                raise self._failed
            self._news.clear()
            await self._news.wait()
        return self._events.pop(next(iter(self._events)))
