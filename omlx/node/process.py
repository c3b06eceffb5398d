"""A stage's process: `python -m omlx.node.process --fd N`, the head at the other end of socket N.

It starts light. mlx-lm imports transformers and huggingface_hub for tokenizers and downloads; a stage
does neither, and they cost two seconds of CPU and some 30 MB at every start and every failover. Here,
and nowhere else, empty modules stand in for them while mlx-lm is imported.
"""

import argparse
import socket
import sys
from types import ModuleType
from typing import Any

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
    """Call before mlx_lm is imported."""
    for name in ABSENT:
        module = _Absent(name)
        module.__path__ = []
        sys.modules.setdefault(name, module)


def main() -> None:
    """The process's frame: whatever is not in our error tree ends it, with a traceback."""
    parser = argparse.ArgumentParser(description="One stage of a model; started by the head.")
    parser.add_argument("--fd", type=int, required=True, help="the control socket's file descriptor")
    fd: int = parser.parse_args().fd
    start_light()
    from omlx.node.host import StageHost

    StageHost(socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main()
