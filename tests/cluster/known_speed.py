"""A home whose machine was timed before: what is planned there is the same in each run, and at once."""

from pathlib import Path

import msgspec

from omlx.cluster.node_identity import chip, versions
from omlx.cluster.rates import rates_by_chip
from omlx.cluster.speed import SPEED_FILE, Kept, Speed

GUESS = rates_by_chip("unknown")


def know_speed(home: Path) -> None:
    """Of a machine with this one's processor and packages: that of the slowest chip."""
    file = home / SPEED_FILE.relative_to("~")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = Kept(chip() or "", versions().mlx or "", Speed(GUESS.bandwidth, GUESS.compute))
    file.write_bytes(msgspec.json.encode(kept))
