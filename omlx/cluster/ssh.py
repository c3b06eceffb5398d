"""SSH to another machine of the cluster, and the only importer of asyncssh.

One way in: our own key, a host key that is pinned or that somebody has just vouched for by its fingerprint.
No password, no certificate, nothing of the user's own SSH configuration; the user's keys only where a machine
is looked at or joins, so that it need not know ours before.
"""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from omlx.cluster.facts import printable
from omlx.cluster.known_hosts import HostKey, KnownHosts, Verdict, judge_key
from omlx.cluster.nodes import check_host
from omlx.errors import BadSetting, SshFailed

CONNECT_S = 3.0
LOGIN_S = 5.0
KEEPALIVE_S = 1.0
KEEPALIVES_LOST = 3
CLOSE_S = 1.0
# The first that a machine has is shown: it announces the fingerprint of its ed25519 key.
HOST_KEY_KINDS = (
    *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-512", "rsa-sha2-256"),
)
OWN_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
"""In ~/.ssh, as ssh-keygen names them."""
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to go. Made by `target`, which has looked at each part."""

    host: str
    user: str
    port: int


@dataclass(frozen=True, slots=True)
class Access:
    """What we show and whom we believe. Files of ours."""

    key_file: Path
    known_hosts: KnownHosts
    own_keys: bool = False
    """Whether the person's own keys and agent are tried too: where nobody let the cluster's key in yet."""


def target(host: str, user: str, port: int) -> Target:
    """Raises Refused with what is wrong: a name that a program could take for an option goes nowhere."""
    if not USER.fullmatch(user):
        raise BadSetting(f"user {user[:80]!r} is no user name; write it like admin, without spaces or signs")
    if not 1 <= port <= 65535:
        raise BadSetting(f"SSH port {port} is not between 1 and 65535")
    return Target(check_host(host), user, port)


class RemoteProcess:
    """A command under way on the other machine: bytes in, bytes out."""

    def __init__(self, process: "asyncssh.SSHClientProcess[bytes]") -> None:
        self._process = process

    async def write(self, data: bytes) -> None:
        """Raises SshFailed when the connection is gone. That the command has ended is told by `read`, after
        what it said."""
        with _translated("connection"), suppress(BrokenPipeError):
            self._process.stdin.write(data)
            await self._process.stdin.drain()

    async def read(self, most: int) -> bytes:
        """What has come, at most so many bytes; empty at the end. Raises SshFailed."""
        with _translated("connection"):
            return await self._process.stdout.read(most)

    async def complaint(self, most: int) -> str:
        """What the command has said on standard error, on one line; ask after its end. Raises SshFailed."""
        with _translated("connection"):
            return printable((await self._process.stderr.read(most)).decode("utf-8", "replace"))

    async def exit_code(self) -> int | None:
        """None: it was killed, or it has not ended within CLOSE_S."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait_closed()
        except TimeoutError:
            return None
        return self._process.exit_status


class RemoteFile:
    """A file on the other machine, open for writing at any place."""

    def __init__(self, file: asyncssh.SFTPClientFile) -> None:
        self._file = file

    async def write(self, data: bytes, offset: int, within_s: float) -> None:
        """All of it: several requests are on their way at once, some megabytes at most. Raises SshFailed."""
        with _translated_file():
            async with asyncio.timeout(within_s):
                await self._file.write(data, offset)


class RemoteFiles:
    """The other machine's files, over SFTP. Paths are bytes and never pass a shell."""

    def __init__(self, client: asyncssh.SFTPClient) -> None:
        self._client = client

    @asynccontextmanager
    async def open(self, path: bytes) -> AsyncIterator[RemoteFile]:
        """A file that is there already. Raises SshFailed."""
        with _translated_file():
            async with asyncio.timeout(LOGIN_S):
                file = await self._client.open(path, "r+b")
        try:
            yield RemoteFile(file)
        finally:
            # Whoever writes reads back what came of it; a close that fails says nothing new.
            with suppress(asyncssh.Error, OSError):
                async with asyncio.timeout(LOGIN_S):
                    await file.close()


@dataclass(frozen=True, slots=True)
class Shell:
    """An open, checked connection."""

    connection: asyncssh.SSHClientConnection
    host_key: HostKey

    @property
    def local_address(self) -> str:
        """Our own end's."""
        return str(self.connection.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        """The address that was connected to."""
        return str(self.connection.get_extra_info("peername")[0])

    @asynccontextmanager
    async def start(self, command: str) -> AsyncIterator[RemoteProcess]:
        """`command` is a constant of ours; what varies goes in through `write`. Killed at the end.

        Raises SshFailed.
        """
        with _translated("connection"):
            process = await self.connection.create_process(command, encoding=None)
        try:
            yield RemoteProcess(process)
        finally:
            process.close()

    @asynccontextmanager
    async def sftp(self) -> AsyncIterator[RemoteFiles]:
        """Raises SshFailed, also where that sshd has no SFTP."""
        with _translated("file transfer"):
            async with asyncio.timeout(LOGIN_S):
                client = await self.connection.start_sftp_client()
        try:
            yield RemoteFiles(client)
        finally:
            client.exit()


@asynccontextmanager
async def open_ssh(target: Target, access: Access, vouched: str | None = None) -> AsyncIterator[Shell]:
    """Connect, check the host key, log in.

    vouched: a fingerprint that a person has compared; a machine not known yet that shows it is pinned. It
    does not help against a changed key: whoever trusts that one first forgets the old one.
    Raises SshFailed within CONNECT_S + LOGIN_S, BadSetting where a file of ours cannot be used.
    """
    pinned = access.known_hosts.keys(target.host, target.port)
    watch = _Watch(pinned, vouched)
    try:
        with _translated("connection"):
            connection = await _connect(target, access, watch)
    except asyncssh.PermissionDenied as error:
        if watch.trusted:  # its key has been proved by then, and the next try need not ask
            access.known_hosts.pin(target.host, target.port, watch.trusted)
        raise _refused_login(target, access, watch) from error
    except asyncssh.HostKeyNotVerifiable as error:
        raise _refused_host(target, access, watch, pinned) from error
    assert watch.trusted is not None
    try:
        access.known_hosts.pin(target.host, target.port, watch.trusted)
        yield Shell(connection, watch.trusted)
    finally:
        connection.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await connection.wait_closed()
        except TimeoutError:
            connection.abort()


class _Watch(asyncssh.SSHClient):
    """Decides about the host key that is shown, and remembers it: asyncssh tells only that it was refused."""

    def __init__(self, pinned: tuple[HostKey, ...], vouched: str | None) -> None:
        self.pinned = pinned
        self.vouched = vouched
        self.shown: HostKey | None = None
        self.verdict: Verdict = "unknown"
        self.trusted: HostKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = HostKey(key.get_algorithm(), key.public_data)
        self.verdict = judge_key(self.shown, self.pinned)
        # What a person says must be so of a machine that we know as well: they may have meant another one.
        as_vouched = self.vouched in (None, self.shown.fingerprint)
        enough: tuple[Verdict, ...] = ("known",) if self.vouched is None else ("known", "unknown")
        if as_vouched and self.verdict in enough:
            self.trusted = self.shown
        return self.trusted is not None


async def _connect(target: Target, access: Access, watch: _Watch) -> asyncssh.SSHClientConnection:
    try:
        keys = [asyncssh.read_private_key(access.key_file)]
    except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadSetting(
            f"the cluster's SSH key {access.key_file}: {why}; `omlx cluster init` makes it"
        ) from error
    agent = os.environ.get("SSH_AUTH_SOCK") if access.own_keys else None
    if access.own_keys:
        keys += _own_keys()
    return await asyncssh.connect(
        target.host,
        target.port,
        username=target.user,
        client_factory=lambda: watch,
        client_keys=keys,
        preferred_auth="publickey",
        known_hosts=([], [], []),  # never None, which turns the check off: `watch` decides alone
        x509_trusted_certs=None,
        server_host_key_algs=_preferred(watch),
        agent_path=agent,
        config=None,
        connect_timeout=CONNECT_S,
        login_timeout=LOGIN_S,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVES_LOST,
    )


def _own_keys() -> list[asyncssh.SSHKey]:
    """The person's, as far as they need no passphrase: for those that do there is the agent."""
    found = []
    for name in OWN_KEYS:
        with suppress(OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError):
            found.append(asyncssh.read_private_key(Path("~/.ssh").expanduser() / name))
    return found


def _preferred(watch: _Watch) -> list[str]:
    """Kinds that are pinned come first, so that a machine shows the key that it is known by."""
    pinned = {key.kind for key in watch.pinned}
    return sorted(HOST_KEY_KINDS, key=lambda kind: _key_kind(kind) not in pinned)


def _key_kind(algorithm: str) -> str:
    return "ssh-rsa" if algorithm.startswith("rsa-") else algorithm


def _refused_login(target: Target, access: Access, watch: _Watch) -> SshFailed:
    return SshFailed(
        what="login",
        seen=f"{target.host} does not let {target.user} in with our key",
        wanted="a login by the cluster's key, or by one of yours",
        fix=f"add the line in {access.key_file}.pub to ~{target.user}/.ssh/authorized_keys there",
        fingerprint=watch.shown.fingerprint if watch.shown else None,
    )


def _refused_host(target: Target, access: Access, watch: _Watch, pinned: tuple[HostKey, ...]) -> SshFailed:
    if watch.shown is None:  # a certificate, which our watch is never asked about
        fix = "let its sshd show a plain host key"
        return SshFailed("host key", f"{target.host} shows none that we take", "an ed25519 key", fix)
    fingerprint, kind = watch.shown.fingerprint, watch.shown.kind
    if watch.verdict == "changed":
        known = ", ".join(f"{key.fingerprint} ({key.kind})" for key in pinned)
        return SshFailed(
            what="host key changed",
            seen=f"{target.host} shows {fingerprint} ({kind}), and is known by {known}",
            wanted="the key that it was first trusted with; another machine may be answering in its place",
            fix="if it was set up anew, forget the old key: "
            + access.known_hosts.removal(target.host, target.port),
            fingerprint=fingerprint,
        )
    if watch.vouched:
        return SshFailed(
            what="host key",
            seen=f"{target.host} shows {fingerprint} ({kind})",
            wanted=watch.vouched,
            fix="compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there; do not go on before",
            fingerprint=fingerprint,
        )
    return SshFailed(
        what="host key unknown",
        seen=f"{target.host} shows {fingerprint} ({kind})",
        wanted="a key that somebody has compared once",
        fix="compare it with what `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints there, "
        f"then give --fingerprint {fingerprint}",
        fingerprint=fingerprint,
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """asyncssh's words and the system's as ours; refusals that need more are left to `open_ssh`."""
    try:
        yield
    except (asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable):
        raise
    except socket.gaierror as error:
        fix = "write the address, or look whether the machine is on"
        raise SshFailed(
            what, f"there is no such name ({error.strerror})", "a name or an address", fix
        ) from error
    except TimeoutError as error:
        fix = "look whether the machine is on, awake and on this network"
        raise SshFailed(what, "no answer in time", f"one within {CONNECT_S:g} s", fix) from error
    except ConnectionRefusedError as error:
        fix = "turn on Remote Login there (System Settings > General > Sharing), or give sshd's --port"
        raise SshFailed(what, "it takes no SSH connections", "a running sshd", fix) from error
    except asyncssh.ChannelOpenError as error:
        raise _lost(what, error.reason) from error
    except asyncssh.Error as error:
        raise _lost(what, error.reason) from error
    except OSError as error:
        raise _lost(what, error.strerror or type(error).__name__) from error


@contextmanager
def _translated_file() -> Iterator[None]:
    """What is wrong with a file there is told apart from a connection that is gone."""
    with _translated("file transfer"):
        try:
            yield
        except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection):
            raise
        except asyncssh.SFTPError as error:
            raise SshFailed(
                what="file transfer",
                seen=f"a file there cannot be written ({printable(error.reason)})",
                wanted="files that can be written",
                fix="look whether that disk is full, and to whom ~/.omlx there belongs",
            ) from error


def _lost(what: str, why: str) -> SshFailed:
    fix = "look at the network between both machines and at sshd's log there, then try again"
    return SshFailed(what, f"it broke off ({printable(why)})", "SSH that stays up", fix)
