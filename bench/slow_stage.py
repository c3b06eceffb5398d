"""A stage whose device is emulated: `python -m bench.slow_stage COST --fd N`, COST from `Cost.command`.

It is the server's own stage process, with sockets, threads and plans as ever; only a forward takes the time
that COST says. So many stages are measured on a few cores, each as if it had a machine to itself.
"""

import argparse
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from omlx.node.process import start_light
from omlx.node.step import Work, work_of

if TYPE_CHECKING:
    from omlx.node.host import MakeStage
    from omlx.node.slicing import Cut
    from omlx.node.stage import Finished, Launched, Stage

LOOKS_BACK = 64
"""Positions that the real attention sees. A long prefix costs what COST says, not this machine's time."""


class Cost(msgspec.Struct, frozen=True):
    """What a forward takes a device, in seconds."""

    fixed: float
    """Once, however much is in it."""
    row: float
    """Each token that is drawn from."""
    token: float
    """Each token of a prompt's chunk."""
    pair: float
    """Each pair of a chunk's token and a position before it."""

    def seconds(self, work: Work) -> float:
        fixed = self.fixed if work.rows or work.tokens else 0.0
        return fixed + self.row * work.rows + self.token * work.tokens + self.pair * work.pairs

    def part(self, share: float) -> "Cost":
        """Of a stage that has this share of the model's layers, or of a device so many times as slow."""
        return Cost(*(share * value for value in msgspec.structs.astuple(self)))

    @property
    def command(self) -> tuple[str, ...]:
        """Starts such a stage; `--fd N` follows."""
        return (sys.executable, "-m", "bench.slow_stage", msgspec.json.encode(self).decode())


def emulate(cost: Cost) -> "MakeStage":
    """Imported here: mlx-lm comes after `start_light`."""
    from mlx_lm.models.cache import RotatingKVCache

    from omlx.node.stage import Stage

    class SlowStage(Stage):
        """The tiny model still computes, and that has to be over within the emulated time."""

        device_free = 0.0
        """On time.monotonic."""

        def wait(self, launched: "Launched") -> None:
            super().wait(launched)
            self.device_free = max(launched.began, self.device_free) + cost.seconds(work_of(launched.slices))
            time.sleep(max(0.0, self.device_free - time.monotonic()))

    def make(cut: "Cut", tell: "Callable[[Finished], None]") -> "Stage":
        cut.prototypes[:] = [RotatingKVCache(max_size=LOOKS_BACK) for _ in cut.prototypes]
        return SlowStage(cut, tell)

    return make


def main() -> None:
    """The process's frame, as that of omlx.node.process."""
    parser = argparse.ArgumentParser(description="One emulated stage of a model; started by a bench.")
    parser.add_argument("cost", type=lambda text: msgspec.json.decode(text, type=Cost))
    parser.add_argument("--fd", type=int, required=True, help="the control socket's file descriptor")
    arguments = parser.parse_args()
    start_light()
    from omlx.node.host import StageHost

    StageHost(socket.socket(fileno=arguments.fd), emulate(arguments.cost)).run()


if __name__ == "__main__":
    main()
