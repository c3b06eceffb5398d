"""Who answers is asked while streams stand still: nobody waits longer for the dead than for the living."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from omlx.cluster.liveness import ANSWER_WITHIN_S, DOUBTED_WITHIN_S, who_answers
from omlx.cluster.members import Joined
from omlx.cluster.nodes import NodeId
from tests.cluster.weights_node import joined_at

ALMOST_S = ANSWER_WITHIN_S / 2


@asynccontextmanager
async def machine(letter: str, greets_after_s: float | None) -> AsyncIterator[Joined]:
    """One that takes connections, as a frozen machine's kernel does; None: and never says a word."""

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greets_after_s is not None:
            await asyncio.sleep(greets_after_s)
            writer.write(b"SSH-2.0-test\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield replace(joined_at(port, "nobody"), id=NodeId(letter * 32))


def asked(*machines: tuple[str, float | None], doubted: str = "") -> tuple[str, float]:
    """Who answered, by their letters, and after how many seconds that was known."""

    async def ask() -> tuple[str, float]:
        nodes = []
        async with asyncio.TaskGroup() as group, asyncio.timeout(10):
            gone = asyncio.Event()

            async def stand(letter: str, after_s: float | None, up: asyncio.Event) -> None:
                async with machine(letter, after_s) as node:
                    nodes.append(node)
                    up.set()
                    await gone.wait()

            for letter, after_s in machines:
                up = asyncio.Event()
                group.create_task(stand(letter, after_s, up))
                await up.wait()
            started = time.monotonic()
            found = await who_answers(nodes, {letter * 32 for letter in doubted})
            took = time.monotonic() - started
            gone.set()
        return "".join(sorted(id[0] for id in found)), took

    return asyncio.run(ask())


def test_a_frozen_machine_is_no_living_one() -> None:
    who, _ = asked(("a", 0.0), ("b", None))
    assert who == "a"


def test_a_slow_machine_has_its_second_where_nobody_doubts_it() -> None:
    who, _ = asked(("a", 0.0), ("b", ALMOST_S))
    assert who == "ab"


def test_streams_do_not_stand_still_for_a_machine_that_was_lost() -> None:
    who, took = asked(("a", 0.0), ("b", None), doubted="b")
    assert who == "a"
    assert took < ANSWER_WITHIN_S


def test_a_machine_whose_stage_alone_died_is_used_again() -> None:
    who, _ = asked(("a", 0.0), ("b", DOUBTED_WITHIN_S / 4), doubted="b")
    assert who == "ab"


def test_where_every_machine_is_doubted_they_are_asked_all_the_same() -> None:
    who, took = asked(("a", 0.0), ("b", None), doubted="ab")
    assert who == "a"
    assert took < ANSWER_WITHIN_S
