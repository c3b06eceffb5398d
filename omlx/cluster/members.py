"""The machines that joined, on the coordinator's disk: where to reach each, and what it was when it joined.

Its authority says who may be a node; this says where the nodes are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from omlx.cluster.findings import LinkFinding
from omlx.cluster.nodes import NodeId
from omlx.cluster.private_files import check_folder, decoded, locked, read_private, write
from omlx.errors import BadSetting

MOST_MEMBERS = 256


@dataclass(frozen=True, slots=True)
class Joined:
    """A machine of the cluster, other than the coordinator."""

    id: NodeId
    name: str
    """What it calls itself."""
    host: str
    """Where it is reached over SSH: a name or an address, as it was given."""
    user: str
    port: int
    fingerprint: str
    """Of its SSH host key."""
    chip: str
    memory_bytes: int
    addresses: tuple[str, ...]
    """Those that were reached from here, the fastest first."""
    links: tuple[LinkFinding, ...]
    """As measured when it joined."""
    joined_at: datetime
    speed: tuple[float, float] | None = None
    """Bytes/s and flop/s as they were gauged when it joined; None: its chip's figures are known."""

    @property
    def fastest_link(self) -> tuple[float, float] | None:
        """Seconds one way and bytes/s (the slower direction) of the link with the shortest round trip."""
        whole = [
            (link.round_trip_s / 2, min(link.bytes_per_s_there, link.bytes_per_s_back))
            for link in self.links
            if link.round_trip_s and link.bytes_per_s_there and link.bytes_per_s_back
        ]
        return min(whole, default=None)


@dataclass(frozen=True, slots=True)
class Members:
    """All of them, by id. A value: the file changes under a lock."""

    joined: tuple[Joined, ...] = ()

    def __iter__(self) -> Iterator[Joined]:
        return iter(self.joined)

    def find(self, word: str) -> Joined:
        """By host, name, or the beginning of an id. Raises BadSetting where that is none, or several."""
        found = [one for one in self.joined if word in (one.host, one.name, one.name.partition(".")[0])]
        found = found or [one for one in self.joined if len(word) >= 4 and one.id.startswith(word)]
        if len(found) == 1:
            return found[0]
        if found:
            same = ", ".join(f"{one.name} ({one.id[:8]})" for one in found)
            raise BadSetting(f"{word!r} means several nodes: {same}; give the beginning of the id")
        known = ", ".join(one.name for one in self.joined) or "none has joined"
        raise BadSetting(f"no node {word!r} in this cluster; there are: {known}")

    def with_(self, joined: Joined) -> "Members":
        """It replaces what was known of that id. Raises BadSetting where there are too many."""
        others = tuple(one for one in self.joined if one.id != joined.id)
        if len(others) >= MOST_MEMBERS:
            raise BadSetting(f"a cluster has {MOST_MEMBERS} nodes at most: let one leave first")
        return replace(self, joined=(*others, joined))

    def without(self, id: NodeId) -> "Members":
        return replace(self, joined=tuple(one for one in self.joined if one.id != id))


def read_members(folder: Path) -> Members:
    """Of the cluster in `folder`; none before the first one joined. Raises BadSetting."""
    file = folder.expanduser() / "members.json"
    if not file.exists():
        return Members()
    check_folder(file.parent)
    return decoded(read_private(file), Members, str(file))


def add_member(folder: Path, joined: Joined) -> None:
    """Raises BadSetting."""
    folder = folder.expanduser()
    with locked(folder):
        write(folder / "members.json", msgspec.json.encode(read_members(folder).with_(joined)))


def remove_member(folder: Path, id: NodeId) -> None:
    """Raises BadSetting."""
    folder = folder.expanduser()
    with locked(folder):
        write(folder / "members.json", msgspec.json.encode(read_members(folder).without(id)))


def now() -> datetime:
    return datetime.now(UTC)
