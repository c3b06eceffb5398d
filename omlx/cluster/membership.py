"""A node's part of the cluster's trust: the bundle it was handed, put down, renewed and read again.

A bundle lies in a folder of its own, and `node` is a link to the newest: it changes by one rename, so a
handshake sees a certificate with its own key, never half of each.
"""

import ipaddress
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from omlx.cluster.certificates import Pair, check_pair, revocations_number
from omlx.cluster.head_address import HEAD_FILE
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
from omlx.node.tls import AUTHORITY, CERTIFICATE, KEY, REVOCATIONS, Security, check_private

WARN_BEFORE = timedelta(days=30)
LARGEST_BUNDLE = 2**20

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN = re.compile(r"[0-9a-f]{32,256}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a node is handed when it joins, over the verified SSH channel and nothing else."""

    cluster_id: str
    node_id: str
    certificate: bytes
    authority: bytes
    revocations: bytes
    key: bytes = field(repr=False)
    token: str = field(repr=False)

    def pack(self) -> bytes:
        """As JSON, for the other machine's `unpack`."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Bundle":
        """Raises BadSetting for what is no bundle; what it says is checked by `install_bundle`."""
        if len(data) > LARGEST_BUNDLE:
            raise BadSetting(f"a bundle of {len(data)} bytes is none: at most {LARGEST_BUNDLE}")
        return decoded(data, cls, "a bundle")


@dataclass(frozen=True, slots=True)
class News:
    """What every node is sent once another one is revoked.

    Ray looks at no revocation list, so who is thrown out must not know Ray's token either.
    """

    revocations: bytes
    token: str = field(repr=False)

    def pack(self) -> bytes:
        """As JSON, for the other machine's `unpack`."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> "News":
        """Raises BadSetting for what is none; what it says is checked by `install_news`."""
        if len(data) > LARGEST_BUNDLE:
            raise BadSetting(f"news of {len(data)} bytes are none: at most {LARGEST_BUNDLE}")
        return decoded(data, cls, "news")


@dataclass(frozen=True, slots=True)
class Member:
    """This machine as a node of a cluster."""

    cluster_id: str
    node_id: str
    until: datetime
    """When its certificate runs out."""
    security: Security
    token_path: Path
    """Of Ray's token, for RAY_AUTH_TOKEN_PATH."""

    def days_left(self, now: datetime) -> int:
        """Whole days; negative once it has run out."""
        return (self.until - now).days

    def warning(self, now: datetime) -> str | None:
        """A sentence when the certificate is about to run out, or has."""
        what = f"the certificate of node {self.node_id}"
        if now >= self.until:
            return f"{what} ran out on {self.until:%Y-%m-%d}: join the node again from the coordinator"
        if now >= self.until - WARN_BEFORE:
            return f"{what} runs out in {self.days_left(now)} days: renew it from the coordinator"
        return None


@dataclass(frozen=True, slots=True)
class _Cluster:
    cluster_id: str
    node_id: str


def install_bundle(folder: Path, bundle: Bundle) -> Member:
    """Make this machine the node that the bundle says, or renew it.

    Raises BadSetting for a bundle that does not agree with itself, and where the machine is in another
    cluster.
    """
    folder = own_folder(folder)
    with locked(folder):
        return put_down(folder, bundle)


def install_news(folder: Path, news: News) -> bool:
    """Take a newer list and Ray's token that goes with it; False when there was nothing to take.

    Raises BadSetting for what another authority signed.
    """
    folder = folder.expanduser()
    with locked(folder):
        return put_down_news(folder, news)


def open_member(folder: Path) -> Member:
    """This machine as a node, its certificate run out or not. Raises BadSetting where it is none."""
    folder = folder.expanduser()
    if not (folder / "node").is_symlink():
        raise BadSetting(f"this machine is in no cluster ({folder} holds no certificate): join it first")
    check_folder(folder)
    here = folder / "node"
    known = decoded(read_private(here / "member.json"), _Cluster, "member.json")
    pair = Pair(read_private(here / CERTIFICATE), read_private(here / KEY))
    fact = check_pair(pair, read_private(here / AUTHORITY))
    check_private(here / "ray_token")
    return Member(known.cluster_id, known.node_id, fact.until, Security(str(here)), here / "ray_token")


def remove_bundle(folder: Path) -> None:
    """This machine is in no cluster any more; nothing where it was in none. An authority stays."""
    folder = folder.expanduser()
    if not folder.is_dir():
        return
    with locked(folder):
        (folder / HEAD_FILE).unlink(missing_ok=True)
        (folder / "node").unlink(missing_ok=True)
        for old in folder.glob("node-*"):
            _throw_away(old)


def put_down(folder: Path, bundle: Bundle) -> Member:
    """`install_bundle` for who holds the lock."""
    checked(bundle.node_id, (), ())
    if not _NODE_ID.fullmatch(bundle.cluster_id) or not _TOKEN.fullmatch(bundle.token):
        raise BadSetting("a bundle whose cluster id or token is none")
    fact = check_pair(Pair(bundle.certificate, bundle.key), bundle.authority)
    if fact.node_id != bundle.node_id:
        raise BadSetting(f"a bundle for node {bundle.node_id!r} with the certificate of {fact.node_id!r}")
    number = revocations_number(bundle.revocations, bundle.authority)
    link, before = folder / "node", None
    listed, token = bundle.revocations, bundle.token.encode("ascii")
    if link.is_symlink():
        before = link.resolve()
        if (link / AUTHORITY).read_bytes() != bundle.authority:
            held = open_member(folder)
            raise BadSetting(f"this machine is a node of cluster {held.cluster_id}: let it leave first")
        if revocations_number((link / REVOCATIONS).read_bytes(), bundle.authority) > number:
            listed, token = (link / REVOCATIONS).read_bytes(), read_private(link / "ray_token")
    files = {
        "member.json": msgspec.json.encode(_Cluster(bundle.cluster_id, bundle.node_id)),
        CERTIFICATE: bundle.certificate,
        KEY: bundle.key,
        AUTHORITY: bundle.authority,
        REVOCATIONS: listed,
        "ray_token": token,
    }
    made = new_folder(folder, "node", files)
    beside = made.with_name(f"{made.name}.link")
    beside.symlink_to(made.name)
    beside.replace(link)
    for old in folder.glob("node-*"):
        if old != made and old.resolve() != before:  # a handshake may be reading the one before
            _throw_away(old)
    return open_member(folder)


def _throw_away(old: Path) -> None:
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old)


def put_down_news(folder: Path, news: News) -> bool:
    """`install_news` for who holds the lock."""
    here = folder / "node"
    if not here.is_symlink():
        raise BadSetting(f"this machine is in no cluster ({folder} holds no certificate)")
    if not _TOKEN.fullmatch(news.token):
        raise BadSetting("news whose token is none")
    authority = (here / AUTHORITY).read_bytes()
    number = revocations_number(news.revocations, authority)
    held = revocations_number((here / REVOCATIONS).read_bytes(), authority)
    token = news.token.encode("ascii")
    if number < held or (number == held and token == read_private(here / "ray_token")):
        return False
    write(here / "ray_token", token)
    write(here / REVOCATIONS, news.revocations)
    return True


def checked(
    node_id: str, names: Iterable[str], addresses: Iterable[str]
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Without doubles and scopes. Raises BadSetting for what could not be a node's."""
    if not _NODE_ID.fullmatch(node_id):
        raise BadSetting(f"{node_id!r} is no node id: letters, digits, '.', '_' and '-', 64 at most")
    kept = tuple(dict.fromkeys(names))
    for name in kept:
        if len(name) > 253 or not _NAME.fullmatch(name):
            raise BadSetting(f"{name!r} is no host name")
    found = []
    for address in addresses:
        try:
            found.append(str(ipaddress.ip_address(address.partition("%")[0])))
        except ValueError:
            raise BadSetting(f"{address!r} is no IP address") from None
    return node_id, kept, tuple(dict.fromkeys(found))
