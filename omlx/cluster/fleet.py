"""The machines of a cluster as a plan sees them: what each gives, how fast it is, what joins them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast, get_args

from omlx.cache.budget import parse_size
from omlx.cluster.candidate import Candidate, Role, budget_of
from omlx.cluster.members import Joined
from omlx.cluster.planner import NodeBudget
from omlx.cluster.rates import LINKS, LinkRate, Links, NodeRates, rates_by_chip

DEFAULT_ROLE: Role = "workstation"


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster, this one among them."""

    node_id: str
    name: str
    """Of no other one in this cluster."""
    memory_bytes: int
    budget_bytes: int
    """What models may take of it."""
    rates: NodeRates
    link: LinkRate | None
    """To this machine, where it was measured."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """This machine first."""

    machines: tuple[Machine, ...]

    def find(self, node_id: str) -> Machine | None:
        return next((one for one in self.machines if one.node_id == node_id), None)

    def named(self, name: str) -> Machine:
        return next(one for one in self.machines if one.name == name)

    def links(self, default: LinkRate = LINKS["ethernet"]) -> Links:
        """By the machines' names."""
        here, *others = self.machines
        return Links.of([(here.name, one.name, one.link) for one in others if one.link is not None], default)

    def candidates(self, among: Iterable[str], taken: Mapping[str, int]) -> list[Candidate]:
        """Those whose node ids are `among`, with what others leave of them; none with nothing left."""
        wanted = set(among)
        left = {one: one.budget_bytes - taken.get(one.node_id, 0) for one in self.machines}
        return [
            Candidate(NodeBudget(one.name, bytes), one.rates)
            for one, bytes in left.items()
            if one.node_id in wanted and bytes > 0
        ]


def fleet_of(here: Machine, members: Iterable[Joined], told: Mapping[str, str]) -> Fleet:
    """`told`: by name, host or beginning of an id, what a node gives: a role, a share of its memory, or a
    size. Raises BadSetting for what is none of these."""
    machines, names = [here], {here.name}
    for one in members:
        name = one.name if one.name not in names else f"{one.name}-{one.id[:4]}"
        names.add(name)
        machines.append(
            Machine(
                one.id,
                name,
                one.memory_bytes,
                given(_said(told, one.id, one.name, one.host), one.memory_bytes),
                rates_by_chip(one.chip, one.memory_bytes),
                None if one.fastest_link is None else LinkRate(*one.fastest_link),
            )
        )
    if said := _said(told, here.node_id, here.name):
        machines[0] = replace(here, budget_bytes=given(said, here.memory_bytes))
    return Fleet(tuple(machines))


def given(said: str | None, memory_bytes: int) -> int:
    """Bytes that a machine gives to models. Raises BadSetting."""
    role = said or DEFAULT_ROLE
    if role in get_args(Role):
        return budget_of(memory_bytes, cast(Role, role))
    return parse_size(role, memory_bytes, "nodes")


def _said(told: Mapping[str, str], id: str, *names: str) -> str | None:
    for word, what in told.items():
        if word in names or (len(word) >= 4 and id.startswith(word)):
            return what
    return None
