"""Stages as child processes: taken into use, ended, and what a start needs."""

import asyncio
import subprocess
import sys

from omlx.cluster.local_actor import place_from, place_local, start_child

SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")
LEAVER = (sys.executable, "-c", "")


def test_a_spare_is_taken_before_a_new_one_is_started_and_only_once() -> None:
    async def walk() -> None:
        spare = start_child(LEAVER)
        spares = [spare]
        first = await place_from(spares)(0, "")
        assert first.pid == spare.process.pid
        assert spares == []
        await first.end(within_s=30)
        first.writer.close()

    asyncio.run(walk())


def test_a_spare_that_nobody_took_is_ended() -> None:
    spare = start_child(SLEEPER)
    spare.discard()
    assert spare.process.returncode is not None
    assert spare.control.fileno() == -1


def test_a_child_that_does_not_leave_is_killed_and_one_that_leaves_is_not() -> None:
    async def code(command: tuple[str, ...], within_s: float) -> int | None:
        actor = await place_local(0, command=command)
        await actor.end(within_s)
        actor.writer.close()
        code: int | None = actor.process.returncode  # type: ignore[attr-defined]
        return code

    async def walk() -> None:
        assert await code(SLEEPER, 0.0) == -9
        assert await code(LEAVER, 30.0) == 0

    asyncio.run(walk())


def test_a_child_sees_the_end_of_a_head_that_is_gone() -> None:
    """The child of a killed head must not have its own end of the socket kept open by a sibling."""
    code = "import socket, sys; sys.exit(len(socket.socket(fileno=int(sys.argv[2])).recv(1)))"
    first = start_child((sys.executable, "-c", code))
    second = start_child(SLEEPER)
    first.control.close()
    assert first.process.wait(timeout=30) == 0
    second.discard()


def test_starting_a_stage_needs_no_other_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, omlx.cluster.local_actor; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    foreign = {"msgspec", "mlx", "numpy", "psutil", "pydantic", "structlog", "typer", "rich"}
    assert not foreign & set(done.stdout.split())
