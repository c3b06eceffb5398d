"""How fast nodes and links are: measured, told, gauged, looked up by chip, or a cautious guess. Pure.

Who measures is `measure.py`'s business; here are the values that travel from there to the planner.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from omlx.errors import Refused
from omlx.node.manifest import LayerBytes

Source = Literal["measured", "told", "gauged", "table", "guess"]
"""`gauged`: a small model was timed there (`omlx.node.gauge`)."""

ACHIEVED = 0.7
"""Of a chip's nominal bandwidth and arithmetic, what decoding and long chunks get from one. Published runs of
7B models on M1 to M3 lie between 0.45 (4 bits, Ultra) and 0.8 (base chips); a measurement replaces it."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Nominal figures: memory in bytes/s, half-precision arithmetic of the GPU in flop/s."""

    bandwidth: float
    compute: float


def _chip(gigabytes: float, teraflop: float) -> Chip:
    return Chip(gigabytes * 1e9, teraflop * 1e12)


CHIPS: Mapping[str, Chip] = {
    "m1": _chip(68, 2.6),
    "m1 pro": _chip(200, 5.3),
    "m1 max": _chip(400, 10.4),
    "m1 ultra": _chip(800, 21),
    "m2": _chip(100, 3.6),
    "m2 pro": _chip(200, 6.8),
    "m2 max": _chip(400, 13.6),
    "m2 ultra": _chip(800, 27.2),
    "m3": _chip(100, 3.6),
    "m3 pro": _chip(150, 6.4),
    "m3 max": _chip(300, 10.6),
    "m3 ultra": _chip(819, 28),
    "m4": _chip(120, 4.3),
    "m4 pro": _chip(273, 9.2),
    "m4 max": _chip(410, 14.7),
    "m5": _chip(153, 12),
    "m5 pro": _chip(307, 24),
    "m5 max": _chip(460, 38),
}
LARGE_CHIPS: Mapping[str, tuple[frozenset[int], Chip]] = {
    "m3 max": (frozenset({48, 64, 128}), _chip(400, 14.2)),
    "m4 max": (frozenset({48, 64, 128}), _chip(546, 18.4)),
    "m5 max": (frozenset({48, 64, 128}), _chip(614, 48)),
}
"""Sold with fewer or more cores under one name: the GiB of memory that only the larger one comes with."""
SLOWEST = CHIPS["m1"]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What one layer of a kind takes on a node, as measured: seconds."""

    step_s: float
    """A step that decodes, whatever its rows."""
    row_s: float
    """Each decoding row on top."""
    token_s: float
    """Each token of a prompt's chunk, on top of step_s."""

    def __post_init__(self) -> None:
        for name in ("step_s", "row_s", "token_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < inf:
                raise Refused(f"{name} = {seconds} is no time that a layer takes; measure it again")


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What one node gets done. `kinds` holds what was measured by `layer_kind`, and wins where it has one."""

    bandwidth: float
    """Bytes of weights and cache read in a second."""
    compute: float
    """Floating-point operations in a second."""
    source: Source = "measured"
    kinds: tuple[tuple[str, LayerTimes], ...] = ()
    head: LayerTimes | None = None
    """Norm and head together, as one layer; by bandwidth where None."""

    def times(self, kind: str) -> LayerTimes | None:
        return next((times for name, times in self.kinds if name == kind), None)


def layer_kind(layer: LayerBytes) -> str:
    """Layers of one kind cost the same on a node: as many bytes of weights, and the same cache."""
    kv = layer.kv
    return f"{layer.weights}w{kv.per_token}t{kv.fixed}f{kv.window_tokens or 0}"


def find_chip(name: str, memory_bytes: int | None = None) -> Chip | None:
    """The figures of `Apple M4 Max`, `m4-max` or `M4Max`; None for a chip that is not in the table."""
    match = re.fullmatch(
        r"(?:apple[\s_-]*)?(m\d{1,2})[\s_-]*(pro|max|ultra)?", name.strip().lower(), re.ASCII
    )
    if match is None:
        return None
    key = " ".join(word for word in match.groups() if word)
    if key in LARGE_CHIPS and memory_bytes is not None:
        sizes, chip = LARGE_CHIPS[key]
        if round(memory_bytes / 2**30) in sizes or round(memory_bytes / 1e9) in sizes:
            return chip
    return CHIPS.get(key)


def rates_by_chip(
    name: str, memory_bytes: int | None = None, gauged: tuple[float, float] | None = None
) -> NodeRates:
    """From the table; of a chip that is not in it as `gauged` (bytes/s, flop/s), and as the slowest one where
    that was not (source `guess`)."""
    chip = find_chip(name, memory_bytes)
    if chip is None and gauged is not None:
        return NodeRates(*gauged, "gauged")
    known = chip or SLOWEST
    return NodeRates(known.bandwidth * ACHIEVED, known.compute * ACHIEVED, "table" if chip else "guess")


def rates_by_bandwidth(bytes_per_s: float) -> NodeRates:
    """For a nominal bandwidth that a person told us: arithmetic in the proportion of an M-series chip."""
    compute = bytes_per_s * SLOWEST.compute / SLOWEST.bandwidth
    return NodeRates(bytes_per_s * ACHIEVED, compute * ACHIEVED, "told")


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One way between two nodes: seconds until the first byte arrives, bytes/s after that."""

    latency_s: float
    bytes_per_s: float
    source: Source = "measured"

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < inf and self.bytes_per_s > 0):
            raise Refused(
                f"a link of {self.latency_s} s and {self.bytes_per_s} bytes/s cannot be; measure it again"
            )

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s


LINKS: Mapping[str, LinkRate] = {
    "ethernet": LinkRate(0.3e-3, 117e6, "table"),
    "10gbe": LinkRate(0.2e-3, 1.17e9, "table"),
    "thunderbolt": LinkRate(0.3e-3, 3e9, "table"),
    "wifi": LinkRate(8e-3, 40e6, "table"),
}
"""One TCP connection over each, as measured by others (reference/peers.md section 10)."""


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster: `default`, except between the pairs of names that are in `known`."""

    default: LinkRate = LINKS["ethernet"]
    known: Mapping[frozenset[str], LinkRate] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str, LinkRate]], default: LinkRate = LINKS["ethernet"]) -> "Links":
        """Of several rates between two nodes (one for each direction, say) the last one counts."""
        return cls(default, {frozenset((one, other)): rate for one, other, rate in pairs})

    def between(self, one: str, other: str) -> LinkRate:
        return self.known.get(frozenset((one, other)), self.default)
