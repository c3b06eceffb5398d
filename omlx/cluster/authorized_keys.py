"""Who may log into this account over SSH: the cluster's key joins those that a person put there."""

import os
import re
from pathlib import Path

from omlx.errors import BadSetting

AUTHORIZED_KEYS = Path("~/.ssh/authorized_keys")
_LINE = re.compile(r"(ssh-ed25519 [A-Za-z0-9+/=]{40,200}) (omlx-[0-9a-f]{1,64})")


def let_in(line: str, file: Path = AUTHORIZED_KEYS) -> bool:
    """Add a cluster's public key, unless it is there; whether it was added.

    Raises BadSetting for what is no such line, and where the file cannot be written.
    """
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise BadSetting("a cluster's SSH key that is none")
    file = file.expanduser()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = file.read_text(errors="replace") if file.exists() else ""
        if found[1] in there:
            return False
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as open_file:
            open_file.write(("\n" if there and not there.endswith("\n") else "") + line.strip() + "\n")
    except OSError as error:
        raise BadSetting(f"{file}: {error.strerror}") from error
    return True
