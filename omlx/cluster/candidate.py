"""A node that a plan may use: the memory it gives, by its role, and how fast it is; as people write it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from omlx.cache.budget import bytes_of
from omlx.cluster.planner import NodeBudget, parse_node
from omlx.cluster.rates import NodeRates, find_chip, rates_by_bandwidth, rates_by_chip
from omlx.errors import BadSetting

Role = Literal["headless", "workstation"]

ROLE_SHARES: Mapping[Role, float] = {"headless": 0.9, "workstation": 0.65}
"""Of a Mac's memory, what a model may have: nobody else works on the first, somebody does on the second."""
# Not Gbps: those would be bits.
BYTES_PER_S = re.compile(r"(.*(?:B|[kmgt]b))(?:ps|/s)", re.ASCII)
SLOWEST_BANDWIDTH, FASTEST_BANDWIDTH = 10**6, 10**15


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that a plan may use."""

    budget: NodeBudget
    rates: NodeRates

    @property
    def name(self) -> str:
        return self.budget.name


def budget_of(memory_bytes: int, role: Role, *, ceiling_bytes: int | None = None) -> int:
    """The bytes that a node gives to a model: its role's share of the memory, never beyond `ceiling_bytes`
    (what its GPU may wire), where that is known."""
    share = int(memory_bytes * ROLE_SHARES[role])
    return share if ceiling_bytes is None else min(share, ceiling_bytes)


def parse_candidate(text: str) -> Candidate:
    """`name=SIZE`, with `@SPEED` and `,ROLE` where wanted: `studio=64GB@400GBps,headless`, `mini=16GB@m4`.

    SIZE without a role is what the node gives; with one it is the Mac's memory, of which it gives the role's
    share. SPEED is the nominal bandwidth of its memory (GBps, GB/s, MBps, ...) or a chip of the table;
    without it the node counts as the slowest chip. Raises BadSetting in one line.
    """
    size, comma, role = text.partition(",")
    size, at, speed = size.partition("@")
    budget = parse_node(size)
    rates = _rates(text, speed, budget.bytes) if at else rates_by_chip("unknown")
    if comma:
        given = int(budget.bytes * _share(text, role.strip().lower()))
        budget = NodeBudget(budget.name, max(1, given))
    return Candidate(budget, rates)


def _share(text: str, role: str) -> float:
    for known in get_args(Role):
        if role == known:
            return ROLE_SHARES[known]
    raise BadSetting(f"node {text!r} has the role {role!r}; there are {' and '.join(get_args(Role))}")


def _rates(text: str, speed: str, memory_bytes: int) -> NodeRates:
    if find_chip(speed) is not None:
        return rates_by_chip(speed, memory_bytes)
    per_second = BYTES_PER_S.fullmatch(speed.strip())
    amount = None if per_second is None else bytes_of(per_second[1])
    if amount is None:
        raise BadSetting(
            f"node {text!r} must end in @SPEED such as @400GBps (or MB/s, TB/s) or a chip such as @m4-max"
        )
    if not SLOWEST_BANDWIDTH <= amount <= FASTEST_BANDWIDTH:
        raise BadSetting(f"node {text!r} reads its memory at {speed.strip()}; it must be 1MBps to 1000TBps")
    return rates_by_bandwidth(amount)
