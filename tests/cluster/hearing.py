"""Waiting for what a browser hears of one node."""

import asyncio
from collections.abc import Callable

from omlx.cluster.discovery import Browser
from omlx.cluster.roster import Lost, Seen

WITHIN_S = 5.0


async def event_of(
    browser: Browser, id: str, wanted: Callable[[Seen | Lost], bool] = lambda _: True
) -> Seen | Lost:
    async with asyncio.timeout(WITHIN_S):
        async for event in browser:
            said_of = event.node.id if isinstance(event, Seen) else event.id
            if said_of == id and wanted(event):
                return event
    raise AssertionError("the browser ended")
