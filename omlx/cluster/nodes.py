"""What a machine says about itself: Node, with ids, addresses, versions, and the checks that make texts safe.

Hearing of a machine is no reason to trust it. A Node is a claim: it has no field for trust, nor for life.
"""

import hashlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Literal, NewType

from omlx.errors import Refused

NodeId = NewType("NodeId", str)
"""A machine: 32 hexadecimal digits that it made itself; or `host:NAME`, a listed host not yet identified."""

MOST_ADDRESSES = 16

_ID = re.compile(r"[0-9a-f]{32}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_CHIP = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ().@+_/,-]{0,39}")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_!-]{0,23}")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_MARK = re.compile(r"[0-9a-f]{16}")
MOST_MEMORY_BYTES = 2**50

Source = Literal["mdns", "static"]


def cluster_mark(cluster_id: str) -> str:
    """What is announced of a cluster's id: 16 digits that tell clusters apart and give the id to nobody."""
    return hashlib.sha256(b"omlx cluster\0" + cluster_id.encode()).hexdigest()[:16]


def check_host(text: str) -> str:
    """A host name or an address that may be handed to a program. Raises Refused."""
    name = text.strip()
    if is_address(name) or (len(name) <= 253 and _HOST.fullmatch(name)):
        return name
    raise Refused(
        f"host {text[:80]!r} is neither a name nor an address; write it like studio.local or 10.0.0.2"
    )


@dataclass(frozen=True, slots=True)
class Versions:
    """What a machine has installed; None where it has not."""

    omlx: str | None = None
    python: str | None = None
    mlx: str | None = None
    mlx_lm: str | None = None
    ray: str | None = None

    def __post_init__(self) -> None:
        for name in self.names():
            _check(name, getattr(self, name), _VERSION)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(one.name for one in fields(cls))

    def differing(self, other: "Versions") -> tuple[str, ...]:
        """Names of the fields in which the two are not equal."""
        return tuple(name for name in self.names() if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node was, and when that was said last, in seconds since the epoch."""

    text: str
    at: float

    def __post_init__(self) -> None:
        if not is_address(self.text):
            raise Refused(f"address {self.text[:80]!r} is not one of IPv4 or IPv6")

    @property
    def link_local(self) -> bool:
        """169.254/16 and fe80::/10: Thunderbolt bridges have them, but they reach one cable only."""
        return ipaddress.ip_address(self.text).is_link_local

    def rank(self) -> tuple[bool, float, int, int]:
        """Sorts the best first. Equal moments are told apart by number, so that order never matters."""
        address = ipaddress.ip_address(self.text)
        return self.link_local, -self.at, address.version, int(address)


@dataclass(frozen=True, slots=True)
class Node:
    """What a machine, or somebody in its name, says about itself. Nothing here was proven.

    Every text was checked when it was made: a Node's name or address is safe in a terminal, and as an
    argument of a program where `check_host` is. Raises Refused, naming the field.
    """

    id: NodeId
    name: str
    reach: tuple[Address, ...]
    """At most MOST_ADDRESSES, as `reach_of` orders them."""
    seen_at: float
    """When this was said, in seconds since the epoch. Machines that change nothing say nothing."""
    ssh_port: int = 22
    agent_port: int | None = None
    versions: Versions = field(default_factory=Versions)
    chip: str | None = None
    memory_bytes: int | None = None
    host_key_fingerprint: str | None = None
    """As ssh-keygen writes it: SHA256: and 43 characters. None: it has no host key, or it is not known."""
    cluster: str | None = None
    """The `cluster_mark` of the cluster it says it belongs to."""
    source: Source = "mdns"
    asked_as: str | None = None
    """The listed host under which it answered."""

    def __post_init__(self) -> None:
        if not self.identified:
            if not self.id.startswith("host:"):
                raise Refused(f"node id {self.id[:80]!r} is not 32 hexadecimal digits")
            check_host(self.id.removeprefix("host:"))
        if len(self.reach) > MOST_ADDRESSES:
            raise Refused(
                f"node {self.id} has {len(self.reach)} addresses; at most {MOST_ADDRESSES} are kept"
            )
        _check("name", self.name, _NAME)
        _check("chip", self.chip, _CHIP)
        _check("host key fingerprint", self.host_key_fingerprint, _FINGERPRINT)
        _check("cluster", self.cluster, _MARK)
        if self.asked_as is not None:
            check_host(self.asked_as)
        for what, port in (("ssh port", self.ssh_port), ("agent port", self.agent_port)):
            if port is not None and not 1 <= port <= 65535:
                raise Refused(f"{what} {port} is not from 1 to 65535")
        if self.memory_bytes is not None and not 1 <= self.memory_bytes <= MOST_MEMORY_BYTES:
            raise Refused(f"memory of {self.memory_bytes} bytes is not from 1 to {MOST_MEMORY_BYTES}")

    @property
    def identified(self) -> bool:
        """False for a listed host that has not answered: its id stands for a name."""
        return _ID.fullmatch(self.id) is not None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Newest first; link-local ones after all others."""
        return tuple(address.text for address in self.reach)

    def answering(self, host: str) -> "Node":
        """The same, as the answer of a listed host."""
        return replace(self, asked_as=host)


def listed_host(host: str, addresses: Iterable[str], at: float, ssh_port: int = 22) -> Node:
    """The node that stands for a listed host until it is identified. Raises Refused."""
    name = check_host(host)
    reach = reach_of(addresses, at)
    label = re.sub(r"[^A-Za-z0-9._-]", "-", name.lstrip(":"))[:48]
    return Node(NodeId(f"host:{name}"), label, reach, at, ssh_port, source="static", asked_as=name)


def merge(one: Node, other: Node) -> Node:
    """Of the same machine: what was said last, and every address."""
    newest = max(one, other, key=order)
    asked_as = max((node.asked_as for node in (one, other) if node.asked_as), default=None)
    return replace(newest, reach=_best((*one.reach, *other.reach)), asked_as=asked_as)


def order(node: Node) -> tuple[bool, float, str]:
    """Newest last, one with a host key after one without; equal moments in the order of what was said."""
    said = replace(node, reach=(), asked_as=None)
    return node.host_key_fingerprint is not None, node.seen_at, repr(astuple(said))


def reach_of(addresses: Iterable[str], at: float) -> tuple[Address, ...]:
    """The best of `addresses`, best first. Raises Refused for what is none."""
    return _best(Address(text, at) for text in addresses)


def _best(reach: Iterable[Address]) -> tuple[Address, ...]:
    newest: dict[str, Address] = {}
    for address in reach:
        if address.text not in newest or newest[address.text].at < address.at:
            newest[address.text] = address
    return tuple(sorted(newest.values(), key=Address.rank)[:MOST_ADDRESSES])


def _check(what: str, text: str | None, allowed: re.Pattern[str]) -> None:
    if text is not None and not allowed.fullmatch(text):
        raise Refused(f"{what} {text[:80]!r} is too long or has characters that it must not have")


def is_address(text: str) -> bool:
    """In its usual spelling and without a scope (`%en0`), which is text of its own."""
    try:
        return str(ipaddress.ip_address(text)) == text and "%" not in text
    except ValueError:
        return False
