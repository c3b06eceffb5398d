"""Mutual TLS between the cluster's machines: who may speak to us, and how a stranger is told so.

The standard library alone, so a stage's process stays light. A `Security` says where a process finds what
it shows and what it believes; None in its place is a plain socket, and nothing else differs.
"""

import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omlx.errors import BadSetting, LinkLost

CERTIFICATE, KEY, AUTHORITY, REVOCATIONS = "node.crt", "node.key", "ca.crt", "revocations.crl"
"""The files of a bundle's folder."""
NODE_URI = "omlx:node:"
HANDSHAKE_WITHIN_S = 3.0
WELCOME = b"\x06"
"""The server's first byte. In TLS 1.3 a client is through before its own certificate is looked at; once
it has this byte, it was."""


PeerCertificate = Mapping[str, Any]
"""As `SSLSocket.getpeercert` gives it."""


class Stranger(Exception):
    """Who is at the other end is not who may be; `str(error)` says why."""


@dataclass(frozen=True, slots=True)
class Security:
    """The folder of a bundle. Read again for each connection: what is renewed or revoked counts at once."""

    folder: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3, both sides certified by the cluster's authority and not revoked, no resumption.

        Raises BadSetting for a folder without its files, or with a key that others can read.
        """
        # A bundle is replaced by moving a link: take all files from the same one.
        folder = Path(self.folder).resolve()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Addresses change and names are anybody's; the node id in the certificate is checked instead.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        if server:
            context.num_tickets = 0  # a resumed session would not look at the revocation list
        check_private(folder / KEY)
        try:
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
            context.load_verify_locations(folder / AUTHORITY)
            context.load_verify_locations(folder / REVOCATIONS)
        except OSError as error:  # of which ssl.SSLError is one
            raise BadSetting(f"the certificates in {folder} cannot be used: {said(error)}") from None
        return context


def check_private(path: Path) -> None:
    """Raises BadSetting when the file is missing, no plain file, or open to others than its owner."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise BadSetting(f"{path}: {error.strerror}") from None
    if not path.is_file() or path.is_symlink():
        raise BadSetting(f"{path} is no plain file")
    if mode & 0o077:
        raise BadSetting(
            f"{path} is open to others (mode {mode & 0o777:04o}): `chmod 600 {path}`, "
            "and make it anew if somebody may have read it"
        )


def usable(security: Security, *, server: bool) -> ssl.SSLContext:
    """Its context, for who can only lose a link: raises LinkLost when the certificates cannot be used."""
    try:
        return security.context(server=server)
    except BadSetting as error:
        raise LinkLost(str(error)) from error


def wrap(sock: socket.socket, security: Security | None, *, server: bool) -> socket.socket:
    """The socket to use from now on; nothing is sent yet.

    Raises LinkLost when our own certificates cannot be used, OSError when the other side is gone already;
    `sock` is closed then.
    """
    if security is None:
        return sock
    try:
        context = usable(security, server=server)
    except LinkLost:
        sock.close()
        raise
    return context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)


def greet(sock: socket.socket, peer: str | None) -> str | None:
    """The server's part of a handshake, within the socket's timeout; gives the other node's id.

    `peer` is the id that must be shown; None: any node of the cluster. A plain socket is let through.
    Raises Stranger.
    """
    if not isinstance(sock, ssl.SSLSocket):
        return None
    try:
        sock.do_handshake()
        found = node_shown(sock.getpeercert(), peer)
        sock.sendall(WELCOME)
    except OSError as error:
        raise Stranger(said(error)) from None
    return found


def introduce(sock: socket.socket, peer: str | None) -> str | None:
    """The client's part: returns once the server has let us in. Raises LinkLost with the reason."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    try:
        sock.do_handshake()
        found = node_shown(sock.getpeercert(), peer)
        welcome = sock.recv(1)
    except Stranger as stranger:
        raise no_entry(stranger) from None
    except OSError as error:
        raise no_entry(error) from None
    if welcome != WELCOME:
        raise LinkLost("the other side does not let us in: it hung up on our certificate")
    return found


def no_entry(error: OSError | Stranger) -> LinkLost:
    """Who of the two did not want the other, and why."""
    match error:
        case Stranger():
            return LinkLost(f"the other side is not to be trusted: {error}")
        case ssl.SSLCertVerificationError():
            return LinkLost(f"the other side is not to be trusted: {said(error)}")
        case ssl.SSLError() | TimeoutError() | ConnectionError():
            return LinkLost(f"the other side does not let us in: {said(error)}")
    return LinkLost(f"it cannot be reached: {said(error)}")


def hang_up(sock: socket.socket) -> None:
    """End both directions, so that whoever waits on the socket wakes; it still has to be closed.

    Not `sock.shutdown`: that first makes an SSLSocket a plain one, and a thread in the middle of a write
    would go on in clear text.
    """
    with suppress(OSError):  # the other side was faster
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def said(error: OSError) -> str:
    """An error of a handshake in words, without OpenSSL's file and line numbers."""
    if isinstance(error, TimeoutError):
        return "nothing came before the deadline"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return (error.reason or error.strerror or "TLS").lower().replace("_", " ")
    return os.strerror(error.errno) if error.errno else str(error)


def node_shown(certificate: PeerCertificate | None, peer: str | None) -> str:
    """The node id in a certificate that OpenSSL found good. Raises Stranger when it is not `peer`."""
    names = (certificate or {}).get("subjectAltName", ())
    ids = [
        str(value).removeprefix(NODE_URI)
        for kind, value in names
        if kind == "URI" and str(value).startswith(NODE_URI)
    ]
    if len(ids) != 1:
        raise Stranger("its certificate is not a node's")
    if peer is not None and ids[0] != peer:
        raise Stranger(f"it is node {ids[0]!r}, not {peer!r}")
    return ids[0]
