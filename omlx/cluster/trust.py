"""The cluster's trust on disk: the authority on the coordinator, a bundle on every node.

    ~/.omlx/cluster/           0700
      lock                     held by who writes
      authority/               the coordinator alone: who has it can make nodes
        cluster.json           cluster id, the coordinator's own node id
        ca.crt  ca.key  ray_token  ssh_key  ssh_key.pub
        ledger.json            every certificate issued, which of them are revoked, the list's number
      node -> node-<random>/   every node, the coordinator too: what its processes show and believe
        member.json  node.crt  node.key  ca.crt  revocations.crl  ray_token

A set of files becomes visible by one rename, so nobody ever sees half of it.
"""

import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from omlx.cluster.certificates import (
    ALWAYS_NAMED,
    Pair,
    facts,
    make_authority,
    make_node,
    make_revocations,
    make_ssh_key,
)
from omlx.cluster.membership import (
    WARN_BEFORE,
    Bundle,
    News,
    checked,
    open_member,
    put_down,
    put_down_news,
)
from omlx.cluster.private_files import (
    check_folder,
    decoded,
    locked,
    new_folder,
    own_folder,
    read_private,
    write,
)
from omlx.errors import BadSetting
from omlx.node.tls import AUTHORITY

NODE_FOR = timedelta(days=365)
KEPT_AFTER_END = timedelta(days=30)
"""A certificate that ran out so long ago leaves the ledger, and the revocation list with it."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A line of the ledger."""

    serial: str
    """Hexadecimal: up to 160 bits."""
    node_id: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    until: datetime
    revoked: bool = False

    def serves(self, addresses: Iterable[str], now: datetime) -> bool:
        """Whether its certificate names all of these, and does not run out soon."""
        return self.until - now >= WARN_BEFORE and set(addresses) <= {*self.addresses, ALWAYS_NAMED}


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every certificate that has not long run out."""

    issued: tuple[Issued, ...] = ()
    number: int = 1
    """Of the revocation list that follows from it."""

    def add(self, line: Issued, now: datetime) -> "Ledger":
        kept = tuple(old for old in self.issued if old.until > now - KEPT_AFTER_END)
        return replace(self, issued=(*kept, line))

    def revoke(self, node_id: str) -> "Ledger":
        """All certificates of that node; the same ledger when none was left to revoke."""
        if not any(line.node_id == node_id and not line.revoked for line in self.issued):
            return self
        lines = (replace(line, revoked=line.revoked or line.node_id == node_id) for line in self.issued)
        return Ledger(tuple(lines), self.number + 1)

    def newest(self, node_id: str) -> Issued | None:
        return next((line for line in reversed(self.issued) if line.node_id == node_id), None)

    def find(self, serial: str) -> Issued | None:
        return next((line for line in self.issued if line.serial == serial), None)


@dataclass(frozen=True, slots=True)
class _Founded:
    """cluster.json."""

    cluster_id: str
    node_id: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trust:
    """The authority, on the coordinator. A value: what changes is in the ledger's file, under a lock."""

    folder: Path
    cluster_id: str
    node_id: str
    """The coordinator's own."""

    @property
    def authority(self) -> Path:
        return self.folder / "authority"

    @property
    def ssh_key(self) -> Path:
        return self.authority / "ssh_key"

    def ssh_public_key(self) -> str:
        """One line, as authorized_keys takes it."""
        return (self.authority / "ssh_key.pub").read_text("ascii").strip()

    def ledger(self) -> Ledger:
        return decoded(read_private(self.authority / "ledger.json"), Ledger, "the ledger")

    def news(self) -> News:
        """The signed list and Ray's token as of now, to be sent to every node: `install_news` there."""
        return News(_revocations(self._pair(), self.ledger()), self.token())

    def token(self) -> str:
        """Ray's."""
        return read_private(self.authority / "ray_token").decode("ascii")

    def _pair(self) -> Pair:
        return Pair(read_private(self.authority / AUTHORITY), read_private(self.authority / "ca.key"))


# ------------------------------------------------------------------ on the coordinator


def init_trust(folder: Path, node_id: str, names: Iterable[str], addresses: Iterable[str]) -> Trust:
    """A new cluster with this machine, as `node_id`, in it.

    Raises BadSetting where there is one already, or where this machine is a node of another one.
    """
    node_id, names, addresses = checked(node_id, names, addresses)
    folder = own_folder(folder)
    with locked(folder):
        if (folder / "authority").exists():
            raise BadSetting(f"{folder} already holds a cluster; it is not overwritten")
        if (folder / "node").is_symlink():
            held = open_member(folder)
            raise BadSetting(f"this machine is a node of cluster {held.cluster_id}: let it leave first")
        for half in folder.glob("authority-*"):  # of a start that a power cut ended
            shutil.rmtree(half)
        cluster_id = secrets.token_hex(8)
        pair = make_authority(cluster_id)
        private, public = make_ssh_key(f"omlx-{cluster_id}")
        files = {
            "cluster.json": msgspec.json.encode(_Founded(cluster_id, node_id, names, addresses)),
            AUTHORITY: pair.certificate,
            "ca.key": pair.key,
            "ray_token": _new_token(),
            "ssh_key": private,
            "ssh_key.pub": public,
            "ledger.json": msgspec.json.encode(Ledger()),
        }
        new_folder(folder, "authority", files).rename(folder / "authority")
        trust = Trust(folder, cluster_id, node_id)
        put_down(folder, _issue(trust, node_id, names, addresses, NODE_FOR))
    return trust


def open_trust(folder: Path) -> Trust:
    """The cluster that was made there. Raises BadSetting where there is none, or others can read it."""
    folder = folder.expanduser()
    if not (folder / "authority").is_dir():
        raise BadSetting(f"there is no cluster in {folder}: make one with `omlx cluster init`")
    check_folder(folder)
    known = decoded(read_private(folder / "authority" / "cluster.json"), _Founded, "cluster.json")
    trust = Trust(folder, known.cluster_id, known.node_id)
    with locked(folder):  # what a power cut may have left undone
        if not (folder / "node").is_symlink():
            put_down(folder, _issue(trust, known.node_id, known.names, known.addresses, NODE_FOR))
        put_down_news(folder, trust.news())
    return trust


def issue(
    trust: Trust,
    node_id: str,
    names: Iterable[str],
    addresses: Iterable[str],
    valid_for: timedelta = NODE_FOR,
) -> Bundle:
    """A certificate, key, token and all else for one node; what it had before stays valid.

    Raises BadSetting for an id, name or address that is none.
    """
    node_id, names, addresses = checked(node_id, names, addresses)
    with locked(trust.folder):
        return _issue(trust, node_id, names, addresses, valid_for)


def renew(
    trust: Trust, node_id: str, addresses: Iterable[str] | None = None, valid_for: timedelta = NODE_FOR
) -> Bundle:
    """A new certificate with the names of the last one, and its addresses where no others are given.

    Raises BadSetting for a stranger, and for an address that is none.
    """
    with locked(trust.folder):
        last = trust.ledger().newest(node_id)
        if last is None or last.revoked:
            raise BadSetting(f"{node_id!r} is no node of this cluster: join it first")
        shown = last.addresses if addresses is None else checked(node_id, (), addresses)[2]
        return _issue(trust, node_id, last.names, shown, valid_for)


def revoke(trust: Trust, node_id: str) -> News:
    """From now on no certificate of that node counts here, and Ray's token is another one; returns what
    the other nodes must be sent.

    Links that are open stay open until their epoch ends, and Ray must be started anew.
    Raises BadSetting for a node never issued to.
    """
    if node_id == trust.node_id:
        raise BadSetting(f"{node_id!r} is the coordinator itself: it cannot be revoked")
    with locked(trust.folder):
        before = trust.ledger()
        if before.newest(node_id) is None:
            raise BadSetting(f"{node_id!r} was never a node of this cluster")
        if (after := before.revoke(node_id)) is not before:
            write(trust.authority / "ledger.json", msgspec.json.encode(after))
            write(trust.authority / "ray_token", _new_token())
        news = trust.news()
        put_down_news(trust.folder, news)
    return news


def _issue(
    trust: Trust, node_id: str, names: tuple[str, ...], addresses: tuple[str, ...], valid_for: timedelta
) -> Bundle:
    authority = trust._pair()
    pair = make_node(authority, node_id, names, addresses, valid_for)
    fact = facts(pair.certificate)
    line = Issued(f"{fact.serial:x}", node_id, names, addresses, fact.until)
    ledger = trust.ledger().add(line, datetime.now(UTC))
    write(trust.authority / "ledger.json", msgspec.json.encode(ledger))
    listed = _revocations(authority, ledger)
    return Bundle(
        trust.cluster_id, node_id, pair.certificate, authority.certificate, listed, pair.key, trust.token()
    )


def _new_token() -> bytes:
    return secrets.token_hex(32).encode("ascii")


def _revocations(authority: Pair, ledger: Ledger) -> bytes:
    serials = [int(line.serial, 16) for line in ledger.issued if line.revoked]
    return make_revocations(authority, serials, ledger.number)
