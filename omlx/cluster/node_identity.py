"""This machine as a node: the id that it keeps, and what it can say of itself without loading MLX or Ray."""

import base64
import binascii
import hashlib
import json
import os
import platform
import re
import secrets
import socket
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv4Address
from pathlib import Path

import psutil

from omlx import __version__
from omlx.cluster.nodes import Node, NodeId, Versions, reach_of
from omlx.errors import Refused

NODE_FILE = Path("~/.omlx/node.json")
HOST_KEY = Path("/etc/ssh/ssh_host_ed25519_key.pub")
MOST_FILE_BYTES = 4096
QUERY_TIMEOUT_S = 5.0

# Tunnels, and what containers and virtual machines put up (bridge100 and up on macOS), reach no other node.
_NOT_A_NETWORK = re.compile(
    r"(lo|utun|tun|tap|gif|stf|awdl|llw|anpi|docker|virbr|vmnet|tailscale)\d*|bridge\d{3}|br-[0-9a-f]{12}|veth.*"
)


def node_id(file: Path = NODE_FILE) -> NodeId:
    """The id in `file` (0600), made on first use. Two that make it at once get the same.

    A file that came here with a copy of another Mac's home folder is replaced: it names that Mac's hardware.
    Raises Refused where it cannot be read or written, or says something else.
    """
    file = file.expanduser()
    hardware = hardware_mark()
    try:
        kept = _read(file)
        if kept is None:
            kept = _make(file, hardware, replace=False)
        elif hardware is not None and kept.get("hardware") not in (None, hardware):
            kept = _make(file, hardware, replace=True)
    except OSError as error:
        raise Refused(f"node file {file}: {error.strerror}; let this user read and write it") from error
    return NodeId(kept["id"])


def _read(file: Path) -> dict[str, str] | None:
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_FILE_BYTES)
            os.fchmod(opened.fileno(), 0o600)
    except FileNotFoundError:
        return None
    try:
        kept = json.loads(text)
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or not re.fullmatch(r"[0-9a-f]{32}", str(kept.get("id"))):
        raise Refused(f"node file {file} holds no id; delete it, and this machine joins as a new node")
    return {key: value for key, value in kept.items() if isinstance(value, str)}


def _make(file: Path, hardware: str | None, *, replace: bool) -> dict[str, str]:
    """Whole or not at all: written beside, then linked (the first one wins) or renamed over it."""
    made = {"id": secrets.token_hex(16)} | ({"hardware": hardware} if hardware is not None else {})
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as opened:
            json.dump(made, opened)
            opened.flush()
            os.fsync(opened.fileno())
        if replace:
            beside.replace(file)
            return made
        try:
            file.hardlink_to(beside)
        except FileExistsError:
            return _read(file) or made
        return made
    finally:
        beside.unlink(missing_ok=True)


def hardware_mark() -> str | None:
    """16 digits that tell this machine's hardware (on Linux: its installation) from another's."""
    if platform.system() == "Darwin":
        found = re.search(
            r'"IOPlatformUUID" = "([0-9A-F-]+)"',
            _answer("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"),
        )
        uuid = found[1] if found else ""
    else:
        try:
            uuid = Path("/etc/machine-id").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            uuid = ""
    return hashlib.sha256(b"omlx node\0" + uuid.encode()).hexdigest()[:16] if uuid else None


def host_key_fingerprint(public_key: Path = HOST_KEY) -> str | None:
    """Of the SSH server's key, as ssh-keygen writes it; None where there is no such key (macOS makes it when
    Remote Login is first switched on)."""
    try:
        fields = public_key.read_bytes()[:MOST_FILE_BYTES].split()
        key = base64.b64decode(fields[1], validate=True)
    except (OSError, IndexError, binascii.Error):
        return None
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode("ascii").rstrip("=")


def versions() -> Versions:
    return Versions(
        omlx=_short(__version__),
        python=_short(platform.python_version()),
        mlx=_installed("mlx"),
        mlx_lm=_installed("mlx-lm"),
        ray=_installed("ray"),
    )


def chip() -> str | None:
    """`Apple M3 Ultra`; on Linux the processor's model name, else its architecture."""
    named = platform.machine()
    if platform.system() == "Darwin":
        named = _answer("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip() or named
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        except OSError:
            lines = ""
        found = re.search(r"^model name\s*:\s*(.+)$", lines, re.MULTILINE)
        named = found[1] if found else named
    return _clean(named, r"[^A-Za-z0-9 ().@+_/,-]+", 40)


def own_address(towards: tuple[str, int]) -> str:
    """The address of this machine that the way to that place begins at. Nothing is sent. Raises OSError where
    there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)
        address: str = probe.getsockname()[0]
        return address


def own_addresses() -> tuple[str, ...]:
    """IPv4 addresses of the interfaces that are up and may reach other machines, link-local ones last."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        IPv4Address(one.address)
        for name, all_of_it in psutil.net_if_addrs().items()
        if name in up and not _NOT_A_NETWORK.fullmatch(name)
        for one in all_of_it
        if one.family == socket.AF_INET
    ]
    usable = {one for one in found if not (one.is_loopback or one.is_unspecified or one.is_multicast)}
    return tuple(str(one) for one in sorted(usable, key=lambda one: (one.is_link_local, one)))


def this_node(  # noqa: PLR0913 (one parameter a fact that somebody else knows)
    id: NodeId,
    addresses: Iterable[str],
    *,
    at: float,
    ssh_port: int = 22,
    agent_port: int | None = None,
    cluster: str | None = None,
    host_key: Path = HOST_KEY,
) -> Node:
    """What this machine announces. `cluster` is a `cluster_mark`. Runs a program on macOS: some 10 ms."""
    name = socket.gethostname().removesuffix(".local")
    return Node(
        id=id,
        name=_clean(name, r"[^A-Za-z0-9._-]+", 48) or "unnamed",
        reach=reach_of(addresses, at),
        seen_at=at,
        ssh_port=ssh_port,
        agent_port=agent_port,
        versions=versions(),
        chip=chip(),
        memory_bytes=int(psutil.virtual_memory().total),
        host_key_fingerprint=host_key_fingerprint(host_key),
        cluster=cluster,
    )


def _installed(distribution: str) -> str | None:
    try:
        return _short(version(distribution))
    except PackageNotFoundError:
        return None


def _short(text: str) -> str | None:
    """As long as a version may be: a commit's digest at its end is cut, on every machine alike."""
    return _clean(text, r"[^0-9A-Za-z.+_!-]+", 24)


def _clean(text: str, unsafe: str, most: int) -> str | None:
    """`text` with dashes for what may not be announced; None where nothing is left."""
    return re.sub(unsafe, "-", text).lstrip(" ().@+_/,-!")[:most].strip() or None


def _answer(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, timeout=QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.decode("utf-8", "replace") if answer.returncode == 0 else ""
