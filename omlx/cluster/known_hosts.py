"""Our own list of host keys: which machine showed which key when it was first trusted.

OpenSSH's format, so that ssh-keygen can read and change it, and nobody else's file: what a user once accepted
for a terminal is no member of a cluster. Only plain names are understood, as we write them.
"""

import base64
import binascii
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omlx.errors import BadSetting

SSH_PORT = 22
OTHERS_MAY_WRITE = 0o022
LARGEST_BYTES = 1 << 20
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")

Verdict = Literal["known", "unknown", "changed"]


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public key as SSH names it: `kind` such as ssh-ed25519, `data` as it travels."""

    kind: str
    data: bytes

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it."""
        digest = base64.b64encode(hashlib.sha256(self.data).digest()).decode("ascii")
        return f"SHA256:{digest.rstrip('=')}"


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """The file; it is read again each time, for a person may change it."""

    file: Path

    def keys(self, host: str, port: int) -> tuple[HostKey, ...]:
        """Pinned for that machine. Raises BadSetting where the file cannot be trusted, with its line."""
        wanted = entry_name(host, port)
        found = (_entry(line, number, self.file) for number, line in enumerate(self._lines(), 1))
        return tuple(
            key for entry in found if entry is not None for names, key in (entry,) if wanted in names
        )

    def pin(self, host: str, port: int, key: HostKey) -> None:
        """From now on the machine is known by this key. Raises BadSetting where it cannot be written."""
        if key in self.keys(host, port):
            return
        line = f"{entry_name(host, port)} {key.kind} {base64.b64encode(key.data).decode('ascii')}\n"
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "r+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                # Somebody may have left the last line open.
                starts = b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""
                file.write(starts + line.encode("ascii"))  # one write: two at once do not mix
                os.fsync(handle)
        except OSError as error:
            raise BadSetting(f"{self.file}: {error.strerror}; let this user read and write it") from error

    def removal(self, host: str, port: int) -> str:
        """The command that forgets the machine."""
        return f"ssh-keygen -R '{entry_name(host, port)}' -f '{self.file}'"

    def _lines(self) -> list[str]:
        try:
            with self.file.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(LARGEST_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadSetting(f"{self.file}: {error.strerror}; let this user read and write it") from error
        if mode & OTHERS_MAY_WRITE:
            raise BadSetting(f"{self.file} can be written by others; chmod 600 it, and look what it says")
        if len(data) > LARGEST_BYTES:
            raise BadSetting(f"{self.file} has over {LARGEST_BYTES:,} bytes; it is not ours, move it away")
        return data.decode("utf-8", "replace").splitlines()


def entry_name(host: str, port: int) -> str:
    """How the file names a machine: names are told apart without regard to case."""
    name = host.lower().rstrip(".")
    return name if port == SSH_PORT else f"[{name}]:{port}"


def judge_key(shown: HostKey, pinned: tuple[HostKey, ...]) -> Verdict:
    """Known by one of several keys is known; pinned by none is unknown, whatever it shows."""
    if not pinned:
        return "unknown"
    return "known" if shown in pinned else "changed"


def check_fingerprint(text: str) -> str:
    """Raises BadSetting unless it is one of SHA-256."""
    if FINGERPRINT.fullmatch(text):
        return text
    raise BadSetting(
        f"fingerprint {text[:80]!r} is not SHA256: and 43 characters; on the other machine, "
        "`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints it"
    )


def _entry(line: str, number: int, file: Path) -> tuple[list[str], HostKey] | None:
    """The names and the key of a line; None where it has none."""
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    try:
        names, kind, data = words[:3]
        key = HostKey(kind, base64.b64decode(data, validate=True))
    except (ValueError, binascii.Error) as error:
        raise BadSetting(f"{file}, line {number}: not `host type key`; mend the line or delete it") from error
    if names[0] in "@|" or "*" in names or "?" in names or "!" in names:
        raise BadSetting(f"{file}, line {number}: {names[:20]!r} is no plain host name; delete the line")
    return names.split(","), key
