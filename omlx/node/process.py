"""A stage's process: `python -m omlx.node.process --fd N`, the head at the other end of socket N.

On another machine than the head's it is `--listener N --security FOLDER --peer NODE`: whoever shows a
certificate of that node at listener N is the head, and comes within ten seconds or never.

It starts light. mlx-lm imports transformers and huggingface_hub for tokenizers and downloads; a stage
does neither, and they cost two seconds of CPU and some 30 MB at every start and every failover. Here,
and nowhere else, empty modules stand in for them while mlx-lm is imported. Nor does a stage draw anything
on a terminal: structlog goes without rich here.
"""

import argparse
import socket
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omlx.errors import StageLost

# All that imports structlog comes after start_light.
if TYPE_CHECKING:
    from omlx.node.channel import Channel
    from omlx.node.tls import Security

HEAD_WITHIN_S = 10.0
HEAD_SILENT_S = 15.0
"""Far more than the head needs to take a silent stage for dead: it says something twice a second."""

ABSENT = ("transformers", "transformers.tokenization_utils_base", "huggingface_hub")


class _Nothing(type):
    """A class that may be a base class and has every class method, none of which does anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


def start_light() -> None:
    """Call before mlx_lm or structlog is imported."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # an import of it fails
    for name in ABSENT:
        module = _Absent(name)
        module.__path__ = []
        sys.modules.setdefault(name, module)


def main() -> None:
    """The process's frame: whatever is not in our error tree ends it, with a traceback."""
    parser = argparse.ArgumentParser(description="One stage of a model; started by the head.")
    control = parser.add_mutually_exclusive_group(required=True)
    control.add_argument("--fd", type=int, help="the control socket's file descriptor")
    control.add_argument("--listener", type=int, help="of a listening socket, to which the head connects")
    parser.add_argument("--security", help="the folder of this node's certificate; none: plain sockets")
    parser.add_argument("--peer", help="the head's node id")
    given = parser.parse_args()
    start_light()
    from omlx.node.tls import Security

    security = Security(given.security) if given.security else None
    if given.fd is not None:
        head: socket.socket | Channel = socket.socket(fileno=given.fd)
    elif security is not None and given.peer:
        # Before MLX is imported: strangers are cheap, and the head's connection is up early.
        head = wait_for_head(socket.socket(fileno=given.listener), security, given.peer)
    else:
        parser.error("--listener needs --security and --peer")
    from omlx.node.host import StageHost

    silent_s = HEAD_SILENT_S if given.fd is None else None
    StageHost(head, security=security, head_silent_s=silent_s).run()


def wait_for_head(listener: socket.socket, security: "Security", peer: str) -> "Channel":
    """The control connection; ends the process when nobody came who may."""
    from omlx.node.channel import Channel

    with listener:
        try:
            return Channel.accept(listener, security, peer, HEAD_WITHIN_S)
        except StageLost as lost:
            sys.exit(f"stage: {lost}: no head {peer} within {HEAD_WITHIN_S:.0f} s")


if __name__ == "__main__":
    main()
