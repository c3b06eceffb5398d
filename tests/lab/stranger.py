"""Who has no business here calls at every port: `python -m tests.lab.stranger FOLDER ADDRESS:PORT...`.

FOLDER holds the certificate of another cluster. Prints one line of JSON: for each port what was heard after
bytes that mean nothing, and whether a word came to somebody with that certificate.
"""

import json
import secrets
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path

from omlx.node.tls import CERTIFICATE, KEY

WITHIN_S = 2.0
WORDS = (
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\x00" * 64,
    b"\xff\xff\xff\x7f" + secrets.token_bytes(60),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # how a TLS handshake begins
)


def heard(address: tuple[str, int], word: bytes) -> str:
    """The first bytes that come back, in hexadecimal."""
    with suppress(OSError), socket.create_connection(address, timeout=WITHIN_S) as sock:
        sock.sendall(word)
        return sock.recv(64).hex()
    return ""


def is_welcome(address: tuple[str, int], folder: Path, alpn: str | None) -> bool:
    """Whether anything is said to another cluster's node behind a whole handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    with (
        suppress(OSError),
        socket.create_connection(address, timeout=WITHIN_S) as plain,
        context.wrap_socket(plain) as sock,
    ):
        return sock.recv(1) != b""
    return False


def main(folder: Path, places: list[str]) -> None:
    told = []
    for place in places:
        host, _, port = place.rpartition(":")
        address = host, int(port)
        told.append(
            {
                "place": place,
                "heard": [heard(address, word) for word in WORDS],
                "welcome": any(is_welcome(address, folder, alpn) for alpn in (None, "h2")),
            }
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
