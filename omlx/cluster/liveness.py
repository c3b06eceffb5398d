"""Whether a machine answers at this moment: its SSH server greets whoever calls.

A machine that is frozen takes connections all the same, by its kernel; only the greeting shows that
programs run there. Nobody is trusted for it.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from omlx.cluster.members import Joined

ANSWER_WITHIN_S = 1.0
GREETING = b"SSH-"


async def answers(address: str, port: int, within_s: float = ANSWER_WITHIN_S) -> bool:
    """Whether an SSH server greets there in time."""
    writer = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(address, port)
            return await reader.readexactly(len(GREETING)) == GREETING
    except (OSError, EOFError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def who_answers(members: Iterable[Joined], within_s: float = ANSWER_WITHIN_S) -> frozenset[str]:
    """The node ids of those that answer at one of their addresses; all are asked at once."""

    async def one(node: Joined) -> bool:
        asked = [
            answers(address, node.port, within_s) for address in dict.fromkeys([*node.addresses, node.host])
        ]
        return any(await asyncio.gather(*asked))

    nodes = list(members)
    found = await asyncio.gather(*(one(node) for node in nodes))
    return frozenset(node.id for node, there in zip(nodes, found, strict=True) if there)
