"""How fast this machine is where its chip is in no table: a small model timed once, its figures kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from omlx.cluster.local_actor import compute_environment
from omlx.cluster.node_identity import chip, versions
from omlx.cluster.private_files import own_folder, write
from omlx.errors import BadSetting

log = structlog.get_logger()

SPEED_FILE = Path("~/.omlx/speed.json")
GAUGE = ("-m", "omlx.node.gauge")
GAUGE_WITHIN_S = 90.0
"""Three seconds on two quiet cores."""
MOST_FILE_BYTES = 4096

PerSecond = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class Speed(msgspec.Struct, frozen=True):
    """As `omlx.node.gauge` says."""

    bandwidth: PerSecond
    compute: PerSecond


class Kept(msgspec.Struct, frozen=True):
    """The file. `chip` and `mlx`: of what it holds, and of no other."""

    chip: str
    mlx: str
    speed: Speed


def kept_speed(file: Path = SPEED_FILE) -> Speed | None:
    """As it was measured with this chip and this MLX; None: never."""
    try:
        with file.expanduser().open("rb") as opened:
            kept = msgspec.json.decode(opened.read(MOST_FILE_BYTES), type=Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept.speed if (kept.chip, kept.mlx) == _whose() else None


def own_speed(file: Path = SPEED_FILE) -> Speed | None:
    """As it was measured before, or is measured now, in a process of its own: some seconds of all cores.

    None where that cannot be, and the log says why: a machine of unknown speed is a machine still.
    """
    if (kept := kept_speed(file)) is not None:
        return kept
    whose, file = _whose(), file.expanduser()
    log.info("this machine's speed is measured, once", chip=whose[0])
    try:
        speed = _measured()
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        log.warning("this machine's speed could not be measured", why=_said_by(error))
        return None
    try:
        own_folder(file.parent)
        write(file, msgspec.json.encode(Kept(*whose, speed)))
    except (OSError, BadSetting) as error:
        log.warning("this machine's speed is not kept", why=str(error))
    return speed


def _measured() -> Speed:
    done = subprocess.run(
        [sys.executable, *GAUGE],
        env=os.environ | compute_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=GAUGE_WITHIN_S,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Speed)


def _said_by(error: Exception) -> str:
    """With the last of what the process itself said."""
    words = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    last = words.decode("utf-8", "replace").strip().splitlines()[-1:]
    return "; ".join([str(error), *last])


def _whose() -> tuple[str, str]:
    return chip() or "", versions().mlx or ""
