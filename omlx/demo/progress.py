"""How long work in this package tells where it is; showing it is the command line's business."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: in bytes while downloading, in tensors while converting."""


def silent(what: str, done: int, total: int) -> None:
    """For callers that do not care."""
