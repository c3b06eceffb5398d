"""The machines of a cluster as a plan sees them: what each gives, how fast it is, what joins them."""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast, get_args

import psutil

from omlx.cache.budget import parse_size
from omlx.cluster.candidate import Role, budget_of
from omlx.cluster.members import Joined
from omlx.cluster.node_identity import chip
from omlx.cluster.rates import LINKS, LinkRate, Links, NodeRates, find_chip, rates_by_chip
from omlx.cluster.speed import kept_speed, own_speed

DEFAULT_ROLE: Role = "workstation"
LEAST_OF_AN_ID = 4
"""Characters by which a node may be called."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of the cluster, this one among them."""

    node_id: str
    """Empty: it is in no cluster."""
    name: str
    """Of no other one in this cluster."""
    memory_bytes: int
    budget_bytes: int
    """What models may take of it."""
    rates: NodeRates
    """As the table says of its chip, or as it was gauged."""
    link: LinkRate | None
    """To this machine, where it was measured."""
    host: str | None = None
    """Where it is reached over SSH; None: it is this one."""

    def is_called(self, word: str) -> bool:
        """By name, host, or the beginning of its id."""
        return word in (self.name, self.host) or (
            len(word) >= LEAST_OF_AN_ID and self.node_id.startswith(word)
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """This machine first."""

    machines: tuple[Machine, ...]

    def find(self, node_id: str) -> Machine | None:
        return next((one for one in self.machines if one.node_id == node_id), None)

    def links(self, default: LinkRate = LINKS["ethernet"]) -> Links:
        """By the machines' names."""
        here, *others = self.machines
        return Links.of([(here.name, one.name, one.link) for one in others if one.link is not None], default)


def this_machine(node_id: str, budget_bytes: int, *, busy: bool = False) -> Machine:
    """As it is; `budget_bytes`: what models may have of it at most.

    A chip that is in no table is measured, once: that takes seconds, and is not done where it is `busy`.
    """
    memory, named = int(psutil.virtual_memory().total), chip() or "unknown"
    speed = None
    if find_chip(named, memory) is None:
        speed = kept_speed() if busy else own_speed()
    rates = rates_by_chip(named, memory, None if speed is None else (speed.bandwidth, speed.compute))
    return Machine(node_id, platform.node().split(".")[0] or "here", memory, budget_bytes, rates, None)


def names_of(here: Machine, members: Iterable[Joined]) -> dict[str, str]:
    """By node id, in the members' order: what each calls itself, with a part of its id where another one is
    called so."""
    names = {here.node_id: here.name}
    taken = {here.name}
    for one in members:
        names[one.id] = one.name if one.name not in taken else f"{one.name}-{one.id[:LEAST_OF_AN_ID]}"
        taken.add(names[one.id])
    return names


def fleet_of(here: Machine, members: Iterable[Joined], told: Mapping[str, str]) -> Fleet:
    """`told`: by name, host or beginning of an id, what a node gives: a role, a share of its memory, or a
    size. Raises BadSetting for what is none of these."""
    members = tuple(members)
    names = names_of(here, members)
    if said := _said(told, here):
        here = replace(here, budget_bytes=given(said, here.memory_bytes))
    return Fleet((here, *(_machine(one, names[one.id], told) for one in members)))


def _machine(node: Joined, name: str, told: Mapping[str, str]) -> Machine:
    machine = Machine(
        node.id,
        name,
        node.memory_bytes,
        0,
        rates_by_chip(node.chip, node.memory_bytes, node.speed),
        None if node.fastest_link is None else LinkRate(*node.fastest_link),
        node.host,
    )
    # What it calls itself counts too, where another one has that name here.
    said = _said(told, machine) or told.get(node.name)
    return replace(machine, budget_bytes=given(said, node.memory_bytes))


def given(said: str | None, memory_bytes: int) -> int:
    """Bytes that a machine gives to models. Raises BadSetting."""
    role = said or DEFAULT_ROLE
    if role in get_args(Role):
        return budget_of(memory_bytes, cast(Role, role))
    return parse_size(role, memory_bytes, "nodes")


def _said(told: Mapping[str, str], machine: Machine) -> str | None:
    return next((what for word, what in told.items() if machine.is_called(word)), None)
