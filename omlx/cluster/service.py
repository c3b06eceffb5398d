"""Services of launchd and systemd: their files as pure text, and how they are put in and out.

As an ordinary user they are that user's own (a LaunchAgent, a user unit). As root they are the system's: they
run without anybody logged in, under the account that called sudo.
"""

import os
import plistlib
import pwd
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omlx.errors import BadSetting, Refused

AGAIN_S = 10
"""Seconds before what has ended is started again."""
ENDS_WITHIN_S = 20
CALL_S = 25.0
"""For one call of launchctl or systemctl. A stop waits for ENDS_WITHIN_S."""
BOOTSTRAP_S = 5.0
LOOK_AGAIN_S = 0.2

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class Service:
    """A program that is to run always."""

    label: str
    """For launchd, `ai.omlx.node`."""
    unit: str
    """For systemd, `omlx-node`."""
    title: str
    command: tuple[str, ...]
    """The first is an absolute path."""
    log: Path
    user: str | None = None
    """A system's service runs as this account; None: as root. A user's own needs none."""

    def __post_init__(self) -> None:
        for name in (self.label, self.unit):
            if not _LABEL.fullmatch(name):
                raise BadSetting(f"{name!r} is no name of a service")
        if self.user is not None and not _USER.fullmatch(self.user):
            raise BadSetting(f"{self.user!r} is no name of an account that a service could run as")
        for text in (self.title, *self.command, str(self.log)):
            if not text.isprintable():
                raise BadSetting(f"{text!r} has characters that no service file can hold")
        for path in (self.command[0], str(self.log)):
            if not path.startswith("/"):
                raise BadSetting(f"{path!r} is not an absolute path; a service has no folder to start from")


# ------------------------------------------------------------------ texts


def plist(service: Service) -> bytes:
    """For launchd, see launchd.plist(5)."""
    entries: dict[str, object] = {
        "Label": service.label,
        "ProgramArguments": list(service.command),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": AGAIN_S,
        "ExitTimeOut": ENDS_WITHIN_S,
        # Stages are the coordinator's: an agent that is started again leaves answers alone.
        "AbandonProcessGroup": True,
        "Umask": 0o077,
        "StandardOutPath": str(service.log),
        "StandardErrorPath": str(service.log),
    }
    if service.user is not None:
        entries["UserName"] = service.user
    return plistlib.dumps(entries, sort_keys=False)


def unit(service: Service, *, system: bool) -> bytes:
    """For systemd, see systemd.service(5) and, for the quoting, systemd.syntax(7)."""
    network = "Wants=network-online.target\nAfter=network-online.target\n" if system else ""
    account = f"User={service.user}\n" if service.user is not None else ""
    log = str(service.log).replace("%", "%%")
    return f"""\
[Unit]
Description={service.title.replace("%", "%%")}
{network}StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={command_line(service.command)}
Restart=always
RestartSec={AGAIN_S}
TimeoutStopSec={ENDS_WITHIN_S}
# Stages are the coordinator's: an agent that is started again leaves answers alone.
KillMode=process
{account}UMask=0077
NoNewPrivileges=yes
StandardOutput=append:{log}
StandardError=append:{log}

[Install]
WantedBy={"multi-user.target" if system else "default.target"}
""".encode()


def command_line(command: Sequence[str]) -> str:
    """As ExecStart= takes it: all quoted, specifiers and variables taken for what they are."""
    program, *arguments = (
        word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") for word in command
    )
    # Variables are not looked for in the program's own path.
    return " ".join(f'"{word}"' for word in (program, *(word.replace("$", "$$") for word in arguments)))


# ------------------------------------------------------------------ in and out


class Manager(Protocol):
    """What keeps services running on this machine."""

    def file(self, service: Service) -> Path: ...

    def elsewhere(self, service: Service) -> Path | None:
        """Its file as the system's while we are a user, or the other way round; None where there is none."""

    def put_in(self, service: Service) -> None:
        """Write the file and start the service, anew if it was there before. Raises Refused."""

    def take_out(self, service: Service) -> bool:
        """Stop it and remove its file; False where there was none. Raises Refused."""

    def pid(self, service: Service) -> int | None:
        """Of its process now; None while there is none. Raises Refused."""


@dataclass(frozen=True, slots=True)
class Launchd:
    """`domain` is `gui/UID`, of the user logged in at the screen, or `system`."""

    domain: str
    folder: Path
    other_folder: Path

    def file(self, service: Service) -> Path:
        return self.folder / f"{service.label}.plist"

    def elsewhere(self, service: Service) -> Path | None:
        file = self.other_folder / self.file(service).name
        return file if file.exists() else None

    def put_in(self, service: Service) -> None:
        file = self.file(service)
        self._unload(service)
        write_file(file, plist(service))
        _call("launchctl", "enable", self._target(service))
        end = time.monotonic() + BOOTSTRAP_S
        # Unloading goes on after `bootout` has returned, and until it is through this fails.
        while (done := _call("launchctl", "bootstrap", self.domain, str(file))).returncode:
            if time.monotonic() > end:
                raise Refused(f"launchctl bootstrap {self.domain} {file}: {_said(done)}{self._perhaps()}")
            time.sleep(LOOK_AGAIN_S)

    def take_out(self, service: Service) -> bool:
        done = self._unload(service)
        if not wait_until(lambda: self.pid(service) is None, ENDS_WITHIN_S + LOOK_AGAIN_S):
            raise Refused(f"launchctl bootout {self._target(service)}: {_said(done)}; it still runs")
        return remove_file(self.file(service))

    def pid(self, service: Service) -> int | None:
        said = _call("launchctl", "print", self._target(service)).stdout
        found = re.search(r"^\s*pid = ([1-9][0-9]*)$", said, re.MULTILINE)
        return int(found[1]) if found else None

    def _unload(self, service: Service) -> subprocess.CompletedProcess[str]:
        """It fails for what is not loaded."""
        return _call("launchctl", "bootout", self._target(service))

    def _target(self, service: Service) -> str:
        return f"{self.domain}/{service.label}"

    def _perhaps(self) -> str:
        if not self.domain.startswith("gui/"):
            return ""
        return "; if nobody is logged in at this Mac's own screen, install it with sudo, for the whole system"


@dataclass(frozen=True, slots=True)
class Systemd:
    """The system's, or a user's own."""

    system: bool
    folder: Path
    other_folder: Path

    def file(self, service: Service) -> Path:
        return self.folder / f"{service.unit}.service"

    def elsewhere(self, service: Service) -> Path | None:
        file = self.other_folder / self.file(service).name
        return file if file.exists() else None

    def put_in(self, service: Service) -> None:
        write_file(self.file(service), unit(service, system=self.system))
        self._call("daemon-reload")
        self._call("enable", f"{service.unit}.service")
        self._call("restart", f"{service.unit}.service")

    def take_out(self, service: Service) -> bool:
        if not self.file(service).exists():
            return False
        self._call("disable", "--now", f"{service.unit}.service")
        remove_file(self.file(service))
        self._call("daemon-reload")
        return True

    def pid(self, service: Service) -> int | None:
        number = self._call("show", "--property=MainPID", "--value", f"{service.unit}.service").strip()
        return int(number) if number.isdecimal() and int(number) else None

    def _call(self, *words: str) -> str:
        scope = "--system" if self.system else "--user"
        done = _call("systemctl", scope, "--no-ask-password", *words)
        if done.returncode:
            raise Refused(f"systemctl {scope} {' '.join(words)}: {_said(done)}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class Account:
    """For whom services run here."""

    name: str
    home: Path
    system: bool
    """Put in by root: it runs for the whole machine, as this account."""

    @property
    def own(self) -> bool:
        """It is the account that we are."""
        return not self.system or self.name == "root"


def find_account() -> Account:
    """Ours, or with sudo that of its caller. The home is what the system says: a service has no other."""
    if os.geteuid() != 0:
        ours = pwd.getpwuid(os.geteuid())
        return Account(ours.pw_name, Path(ours.pw_dir), False)
    name = os.environ.get("SUDO_USER") or "root"
    try:
        return Account(name, Path(pwd.getpwnam(name).pw_dir), True)
    except KeyError:
        raise BadSetting(f"SUDO_USER is {name!r}, and there is no such account") from None


def find_manager(account: Account) -> Manager:
    """Raises Refused where nothing keeps services running, as in most containers."""
    if sys.platform == "darwin":
        _find("launchctl")
        domain = "system" if account.system else f"gui/{os.geteuid()}"
        return Launchd(
            domain, *_folders(account, Path("/Library/LaunchDaemons"), account.home / "Library/LaunchAgents")
        )
    _find("systemctl")
    if not Path("/run/systemd/system").is_dir():
        raise Refused(f"systemd does not run this machine{INSTEAD}")
    return Systemd(
        account.system,
        *_folders(account, Path("/etc/systemd/system"), account.home / ".config/systemd/user"),
    )


def _folders(account: Account, systems: Path, users: Path) -> tuple[Path, Path]:
    return (systems, users) if account.system else (users, systems)


INSTEAD = ", so nothing here keeps services running: have `omlx node run` started by whatever starts the rest"


def wait_until(true: Callable[[], bool], within_s: float) -> bool:
    """False when it did not become true in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


# ------------------------------------------------------------------ effects


def write_file(path: Path, text: bytes) -> None:
    """Whole or not at all, readable by all, writable by the owner alone: launchd takes no other."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        beside.replace(path)
    except OSError as error:
        raise Refused(f"service file {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def remove_file(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise Refused(f"service file {path}: {error.strerror}") from error
    return True


def _find(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise Refused(f"there is no {program} here{INSTEAD}")
    return found


def _call(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [_find(program), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{program} {' '.join(words)} has not returned within {CALL_S:g} s") from None
    except OSError as error:
        raise Refused(f"{program}: {error.strerror}") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}"
