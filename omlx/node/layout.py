"""Which layers of a model run where. A value: after a loss, or a move, an engine is given another one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOMY = 2**31
"""Tokens: more than anybody asks for."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stage's."""

    start: int
    end: int | None
    """Layers [start, end); None: all the rest."""
    memory_share: float
    """Of its machine's GPU limits."""
    node: str = ""
    """The id of its node; none: a child of this process, in whose order several are told apart."""
    folder: Path | None = None
    """The model's, where it is another one than here."""
    cache_folder: str = ""
    """Of the SSD's blocks, where it is another one than here; `~` is its machine's."""
    bytes: int = 0
    """What it takes of its machine, by the plan's arithmetic."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts in the order of their layers."""

    parts: tuple[Part, ...]
    capacity_tokens: int = ROOMY
    """Tokens whose keys and values fit, over all running sequences."""
    hot_bytes: tuple[int, ...] = ()
    """What each stage may keep of computed prefixes in RAM; none where nothing is kept."""

    @property
    def seats(self) -> tuple[str, ...]:
        """Who goes on in another layout: a node has one part of a model, a child its number."""
        return tuple(part.node or str(index) for index, part in enumerate(self.parts))

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(part.node for part in self.parts)

    def uses(self, seat: str) -> bool:
        """Whether the machine of whoever sat there has a part: children share this one."""
        return bool(self.nodes & {seat, ""})

    def runs_like(self, other: "Layout") -> bool:
        """Whether the same processes hold the same layers."""
        return self.seats == other.seats and self._spans == other._spans

    @property
    def _spans(self) -> tuple[tuple[int, int | None], ...]:
        return tuple((part.start, part.end) for part in self.parts)


def here(spans: Sequence[tuple[int, int | None]], memory_share: float | None = None) -> Layout:
    """Children of this process, in equal parts of the machine unless `memory_share` says more."""
    share = 1.0 / len(spans) if memory_share is None else memory_share
    return Layout(tuple(Part(start, end, share) for start, end in spans))
