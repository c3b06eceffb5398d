"""Which machines have been heard of: Roster, and the pure fold of what was heard into it.

Hearing of a machine is no reason to trust it and silence is no reason to think it dead. So a Node, which is
what discovery makes, has no field for either: only `Joined`, after its host key was shown over SSH, gives a
node a place in the cluster, and whether a machine lives is told by its links and its agent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from omlx.cluster.nodes import Node, NodeId, is_address, merge, order
from omlx.errors import Refused

MOST_NODES = 256
MOST_IMPOSTORS = 4
MOST_PROVEN = 4


@dataclass(frozen=True, slots=True)
class Known:
    """A node's line in the roster."""

    node: Node
    joined: bool = False
    """It showed the host key of `node` over SSH and has a certificate of ours."""
    goodbye_at: float | None = None
    problems: tuple[str, ...] | None = None
    """What validation found that blocks; empty: nothing; None: it has not looked."""
    checked_at: float | None = None
    proven: tuple[str, ...] = ()
    """Addresses at which it showed its host key, newest first. No announcement pushes them out."""
    impostors: tuple[Node, ...] = ()
    """Who else claims this id, with another host key. They never take the node's place."""

    @property
    def gone(self) -> bool:
        """It said goodbye after it was last heard. Not that it is dead; nor, if False, that it lives."""
        return self.goodbye_at is not None and self.goodbye_at > self.node.seen_at

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where to try, in this order."""
        return tuple(dict.fromkeys(self.proven + self.node.addresses))

    def rank(self) -> tuple[bool, bool, bool, float, str]:
        """What is worth keeping sorts last."""
        node = self.node
        return self.joined, node.source == "static", not self.gone, node.seen_at, node.id


@dataclass(frozen=True, slots=True)
class Roster:
    """Nodes by id; a value, changed by `fold` alone. At most MOST_NODES."""

    known: Mapping[NodeId, Known] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return len(self.known)

    def __iter__(self) -> Iterator[Known]:
        """By name, then id."""
        return iter(sorted(self.known.values(), key=lambda known: (known.node.name, known.node.id)))

    def get(self, id: NodeId) -> Known | None:
        return self.known.get(id)

    @property
    def joined(self) -> tuple[Known, ...]:
        return tuple(known for known in self if known.joined)

    @property
    def conflicts(self) -> tuple[Known, ...]:
        """Nodes whose id somebody else claims."""
        return tuple(known for known in self if known.impostors)


# ------------------------------------------------------------------ what can happen


@dataclass(frozen=True, slots=True)
class Seen:
    """A node announced itself, or a listed host was found."""

    node: Node


@dataclass(frozen=True, slots=True)
class Lost:
    """An announcement was withdrawn or ran out. Anybody can send that, so it marks and does no more."""

    id: NodeId
    host_key_fingerprint: str | None
    at: float


@dataclass(frozen=True, slots=True)
class Checked:
    """What validation found at the machine that showed this host key at this address."""

    id: NodeId
    host_key_fingerprint: str
    address: str
    at: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """The node showed `node.host_key_fingerprint` at `address` and was given a certificate."""

    node: Node
    address: str


@dataclass(frozen=True, slots=True)
class Left:
    """The node was taken out of the cluster. If it announces itself again it is new."""

    id: NodeId


Event = Seen | Lost | Checked | Joined | Left


def fold(roster: Roster, event: Event) -> Roster:
    """The roster after `event`. Seen events of one moment may come in any order, unless two host keys claim
    one id: then the one that was there stays.

    Raises Refused for a Joined when MOST_NODES have joined, or without id or host key.
    """
    match event:
        case Seen(node):
            return _seen(roster, node)
        case Lost(id, fingerprint, at):
            known = roster.get(id)
            if known is None or known.node.host_key_fingerprint != fingerprint:
                return roster
            return _with(roster, replace(known, goodbye_at=max(at, known.goodbye_at or at)))
        case Checked():
            return _checked(roster, event)
        case Joined(node, address):
            return _joined(roster, node, address)
        case Left(id):
            return Roster(MappingProxyType({key: one for key, one in roster.known.items() if key != id}))


def _seen(roster: Roster, node: Node) -> Roster:
    if not node.identified and any(
        one.node.identified and one.node.asked_as == node.asked_as for one in roster.known.values()
    ):
        return roster
    known = roster.get(node.id)
    if known is None:
        return _with(roster, Known(node))
    theirs, ours = node.host_key_fingerprint, known.node.host_key_fingerprint
    if theirs == ours or (ours is None and not known.joined):
        return _with(roster, replace(known, node=merge(known.node, node)))
    return roster if theirs is None else _with(roster, _disputed(known, node))


def _checked(roster: Roster, event: Checked) -> Roster:
    known = roster.get(event.id)
    if known is None or known.node.host_key_fingerprint != event.host_key_fingerprint:
        return roster
    if known.checked_at is not None and known.checked_at > event.at:
        return roster
    proven = _prove(known, event.address)
    return _with(roster, replace(known, problems=event.problems, checked_at=event.at, proven=proven))


def _joined(roster: Roster, node: Node, address: str) -> Roster:
    if not node.identified or node.host_key_fingerprint is None:
        raise Refused(f"node {node.name} cannot join without an id and a host key; check it over SSH first")
    known = roster.get(node.id) or Known(node)
    if known.node.host_key_fingerprint != node.host_key_fingerprint:
        if known.joined:
            return _with(roster, _disputed(known, node))
        before = known
        known = Known(node)
        for other in (*before.impostors, *([before.node] if before.node.host_key_fingerprint else [])):
            if other.host_key_fingerprint != node.host_key_fingerprint:
                known = _disputed(known, other)
    if not known.joined and len(roster.joined) >= MOST_NODES:
        raise Refused(f"{MOST_NODES} nodes have joined, which is the most; let one leave before {node.name}")
    merged = merge(known.node, node)
    return _with(roster, replace(known, node=merged, joined=True, proven=_prove(known, address)))


def _disputed(known: Known, other: Node) -> Known:
    by_key = {one.host_key_fingerprint: one for one in known.impostors}
    before = by_key.get(other.host_key_fingerprint)
    by_key[other.host_key_fingerprint] = other if before is None else merge(before, other)
    newest = sorted(by_key.values(), key=order, reverse=True)[:MOST_IMPOSTORS]
    return replace(known, impostors=tuple(newest))


def _prove(known: Known, address: str) -> tuple[str, ...]:
    if not is_address(address):
        raise Refused(f"address {address[:80]!r} is not one of IPv4 or IPv6")
    return tuple(dict.fromkeys((address, *known.proven)))[:MOST_PROVEN]


def _with(roster: Roster, known: Known) -> Roster:
    """One line put in, and out what it replaces or what there is no room for."""
    lines = {**roster.known, known.node.id: known}
    if known.node.identified and known.node.asked_as is not None:
        lines.pop(NodeId(f"host:{known.node.asked_as}"), None)
    if len(lines) > MOST_NODES:
        least = min(lines.values(), key=Known.rank)
        if not least.joined:
            del lines[least.node.id]
    return Roster(MappingProxyType(lines))
