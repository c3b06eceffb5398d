"""Where Ray's head of this cluster is, on a node's disk: `head.json`, written when the coordinator says so.

Read once a second by the node's agent, so nothing heavy is imported.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omlx.cluster.private_files import check_folder, decoded, locked, read_private, write
from omlx.errors import BadSetting

HEAD_FILE = "head.json"
"""In the cluster folder."""


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Checked when it is made: raises BadSetting for an address other than IPv4, or a port that is none."""

    address: str
    port: int
    number: int = 0
    """Which start of the head: each has a larger one, so that a head started anew at the same place is told
    from the one before."""

    def __post_init__(self) -> None:
        try:
            ipaddress.IPv4Address(self.address)
        except ValueError:
            raise BadSetting(f"Ray's head at {self.address[:80]!r}: that is no IPv4 address") from None
        if not 1 <= self.port <= 65535 or self.number < 0:
            raise BadSetting(f"Ray's head at port {self.port}, number {self.number}: there is none such")

    @property
    def place(self) -> tuple[str, int]:
        return self.address, self.port

    def pack(self) -> bytes:
        """As JSON on one line."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, data: bytes, what: str = "the head's address") -> "HeadAddress":
        """Raises BadSetting."""
        return decoded(data, cls, what)


def read_head(folder: Path) -> HeadAddress | None:
    """As the coordinator said it last; None before it did. Raises BadSetting for a file of another kind, or
    one that others can read."""
    file = folder.expanduser() / HEAD_FILE
    if not file.exists():
        return None
    check_folder(file.parent)
    return HeadAddress.unpack(read_private(file), str(file))


def write_head(folder: Path, head: HeadAddress) -> None:
    """Kept until the next one comes, or the machine leaves. Raises BadSetting where it is in no cluster."""
    folder = folder.expanduser()
    with locked(folder):
        if not (folder / "node").is_symlink():
            raise BadSetting(f"this machine is in no cluster ({folder} holds no certificate)")
        write(folder / HEAD_FILE, head.pack())
