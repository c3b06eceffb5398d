"""A Node as the TXT record of `_omlx._tcp`, and back; what is read was written by anybody."""

from collections.abc import Iterable

from omlx.cluster.nodes import MOST_MEMORY_BYTES, Node, NodeId, Source, Versions, reach_of
from omlx.errors import Refused

PROTOCOL = "1"
MOST_READ_BYTES = 1024
"""A later version may say more than we do."""
_VERSION_KEYS = {"omlx": "vo", "python": "vp", "mlx": "vm", "mlx_lm": "vl", "ray": "vr"}


def to_text(node: Node) -> bytes:
    """The TXT record: strings of `key=value`, each after its length (RFC 6763, section 6). Below 400 bytes.

    Addresses and the agent's port travel in records of their own.
    """
    said = {
        "v": PROTOCOL,
        "id": node.id,
        "n": node.name,
        "fp": node.host_key_fingerprint,
        "ssh": str(node.ssh_port),
        "cl": node.cluster,
        "chip": node.chip,
        "mem": None if node.memory_bytes is None else str(node.memory_bytes),
        **{key: getattr(node.versions, name) for name, key in _VERSION_KEYS.items()},
    }
    parts = [f"{key}={value}".encode("ascii") for key, value in said.items() if value is not None]
    return b"".join(bytes([len(part)]) + part for part in parts)


def from_text(
    text: bytes, addresses: Iterable[str], agent_port: int | None, *, at: float, source: Source
) -> Node:
    """What a TXT record and its address records say, heard at `at`.

    Raises Refused with what is wrong; the sentence quotes the sender and may be logged, cut and escaped.
    """
    said = _read(text)
    if said.get("v") != PROTOCOL:
        raise Refused(f"it speaks protocol {said.get('v', '')[:16]!r} and not {PROTOCOL!r}")
    if "id" not in said or "n" not in said:
        raise Refused("it has no id or no name")
    node = Node(
        id=NodeId(said["id"]),
        name=said["n"],
        reach=reach_of(addresses, at),
        seen_at=at,
        ssh_port=_number(said, "ssh", 65535) or 22,
        agent_port=agent_port or None,
        versions=Versions(**{name: said.get(key) for name, key in _VERSION_KEYS.items()}),
        chip=said.get("chip"),
        memory_bytes=_number(said, "mem", MOST_MEMORY_BYTES),
        host_key_fingerprint=said.get("fp"),
        cluster=said.get("cl"),
        source=source,
    )
    if not node.identified:
        raise Refused(f"its id {said['id'][:80]!r} is not 32 hexadecimal digits")
    if not node.reach:
        raise Refused("it has no usable address")
    return node


def _read(text: bytes) -> dict[str, str]:
    if len(text) > MOST_READ_BYTES:
        raise Refused(f"its TXT record has {len(text)} bytes; at most {MOST_READ_BYTES} are read")
    said: dict[str, str] = {}
    at = 0
    while at < len(text):
        part = text[at + 1 : at + 1 + text[at]]
        if len(part) < text[at]:
            raise Refused("its TXT record ends in the middle of a string")
        at += 1 + len(part)
        key, equals, value = part.partition(b"=")
        if not part.isascii():
            raise Refused(f"its TXT record has bytes beyond ASCII in {part[:40]!r}")
        if equals:
            # Of a key given twice the first counts, says RFC 6763, section 6.4.
            said.setdefault(key.decode("ascii").lower(), value.decode("ascii"))
    return said


def _number(said: dict[str, str], key: str, most: int) -> int | None:
    digits = said.get(key)
    if digits is None:
        return None
    # Length first: a number of a thousand digits takes its time to read.
    if not digits.isdecimal() or len(digits) > 16 or not 1 <= int(digits) <= most:
        raise Refused(f"{key} {digits[:40]!r} is not a number from 1 to {most}")
    return int(digits)
