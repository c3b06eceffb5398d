"""Whether a machine answers at this moment: its SSH server greets whoever calls.

A machine that is frozen takes connections all the same, by its kernel; only the greeting shows that
programs run there. Nobody is trusted for it.
"""

import asyncio
from collections.abc import Collection, Iterable
from contextlib import suppress

from omlx.cluster.members import Joined

ANSWER_WITHIN_S = 1.0
DOUBTED_WITHIN_S = 0.4
"""One whose stage was lost: while its word is waited for, everybody's answer stands still."""
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


async def who_answers(
    members: Iterable[Joined], doubted: Collection[str] = (), within_s: float = ANSWER_WITHIN_S
) -> frozenset[str]:
    """The node ids of those that answer at one of their addresses; all are asked at once.

    doubted: ids of those that are likely gone. Once the others have answered they have DOUBTED_WITHIN_S left.
    """

    async def one(node: Joined) -> bool:
        asked = [
            answers(address, node.port, within_s) for address in dict.fromkeys([*node.addresses, node.host])
        ]
        return any(await asyncio.gather(*asked))

    asked = {node.id: asyncio.create_task(one(node)) for node in members}
    try:
        await asyncio.gather(*(task for id, task in asked.items() if id not in doubted))
        if doubtful := [task for id, task in asked.items() if id in doubted]:
            await asyncio.wait(doubtful, timeout=DOUBTED_WITHIN_S)
        return frozenset(id for id, task in asked.items() if task.done() and task.result())
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
