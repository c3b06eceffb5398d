"""A node that only announces itself and listens: `python -m tests.lab.peer [LISTED_HOST ...]` in a host.

Prints a line of JSON when it is announced and for every event. Says goodbye when its standard input ends.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack

from omlx.cluster.discovery import Browser, announcing, browsing, multicast
from omlx.cluster.node_identity import node_id, this_node
from omlx.cluster.nodes import Node
from omlx.cluster.roster import Seen


def say(what: str, node: Node | None = None, **more: str) -> None:
    told: dict[str, object] = {"what": what, **more}
    if node is not None:
        told |= {"id": node.id, "name": node.name, "addresses": node.addresses}
        told |= {"source": node.source, "key": node.host_key_fingerprint}
    print(json.dumps(told), flush=True)


async def listen(browser: Browser) -> None:
    async for event in browser:
        if isinstance(event, Seen):
            say("seen", event.node)
        else:
            say("lost", id=event.id)


async def main(listed: list[str]) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        sockets = await stack.enter_async_context(multicast())
        browser = await stack.enter_async_context(browsing(sockets, listed))
        node = this_node(node_id(), sockets.addresses, at=time.time())
        await stack.enter_async_context(announcing(sockets, node))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        listening = group.create_task(listen(browser))
        loop.add_reader(0, over.set)
        say("announced", node)
        await over.wait()
        loop.remove_reader(0)
        listening.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
