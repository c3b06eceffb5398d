"""The entry of the command line: a server's first stage is started before anything else is imported.

Importing MLX takes that stage about as long as the head needs to learn what it shall hold.
"""

import sys
from pathlib import Path

from omlx.cluster.local_actor import discard_all, start_child


def main() -> None:
    """Run the command that the process was started with."""
    words = sys.argv[1:]
    # A cluster's stages are started with its certificate.
    alone = not Path("~/.omlx/cluster/members.json").expanduser().exists()
    spares = [start_child()] if words[:1] == ["serve"] and "--help" not in words and alone else []
    try:
        from omlx.commands import run

        run(spares)
    finally:
        discard_all(spares)
