"""The other side of a comparison: plain loops (bench/loops.py) in a process of their own.

The process has the environment of a stage, so both sides compute with the same libraries and threads.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec

from omlx.cluster.local_actor import compute_environment


class Ask(msgspec.Struct, frozen=True):
    """One run. decode: mlx_lm's own generate loop. together: plain batched steps, every row with a prompt
    of its own that is as long as `prompt`. steps: Stage.step, a token a step, all `spans` in this
    process. empty: the same with plans that compute nothing."""

    loop: Literal["decode", "together", "steps", "empty"]
    count: int
    """Tokens or steps."""
    prompt: tuple[int, ...] = (10,)
    spans: tuple[tuple[int, int], ...] = ()
    """Half-open layer spans; empty: the whole model as one stage."""
    rows: int = 1
    """Of `together`."""


class Told(msgspec.Struct, frozen=True):
    token_s: float
    """Seconds a token, or a step, after the first."""
    tokens: tuple[int, ...]


class Bare:
    """The parent's end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, ask: Ask) -> Told:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(ask) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("bench: the bare loop's process ended; what it said is above")
        return msgspec.json.decode(line, type=Told)


@asynccontextmanager
async def running_bare(folder: Path) -> AsyncIterator[Bare]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.loops", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | compute_environment(),
    )
    try:
        yield Bare(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
