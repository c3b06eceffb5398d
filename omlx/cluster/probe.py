"""What looks at a machine for the cluster: sent over SSH to the others, and run here for our own facts.

One file of the standard library alone, for it arrives as text on a remote interpreter's standard input; and
it bears Python 3.9, which a Mac without omlx has. It answers questions, a line of JSON each, until its input
ends. Its answers begin with a mark and a secret, so that a shell's banner is never taken for one. It starts
no shell, and writes no file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import platform
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

MARK = "omlx-probe"
PACKAGES = {"omlx": "omlx-cluster", "mlx": "mlx", "mlx-lm": "mlx-lm", "ray": "ray"}
COMMAND_S = 2.0
CONNECT_S = 1.0
SILENCE_S = 2.0
"""A connection that says nothing for so long is closed."""
ECHOES = 20
ECHOES_END_S = 1.0
"""Over a slow link fewer of them must do."""
ECHO_BYTES = 64
BULK_ENDS_S = 4.0
SECRET_BYTES = 32
BULK_BYTES = 1 << 18
MOST_GUESTS = 16
LOOK_AGAIN_S = 0.5
"""So long at most a listener that was closed holds its thread."""
MOST_FILES = 512
SYSCTLS = ("machdep.cpu.brand_string", "hw.memsize", "iogpu.wired_limit_mb")
TEXT_CHARACTERS = 16384
"""Of what a program prints; more says nothing new here."""
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


# ------------------------------------------------------------------ the network


class Listener:
    """A port that answers those who know the secret: echoes, and bulk that it counts.

    All else (a port scanner's bytes, silence) is closed without a word. At most MOST_GUESTS at a time.
    """

    def __init__(self, secret: str, address: str = "") -> None:
        self._secret = secret.encode("ascii")
        self._places = threading.BoundedSemaphore(MOST_GUESTS)
        self._socket = socket.create_server((address, 0), backlog=MOST_GUESTS)
        self._socket.settimeout(LOOK_AGAIN_S)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="probe-accept", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # macOS has no such thing for a listening socket
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                guest, _ = self._socket.accept()
            except socket.timeout:  # noqa: UP041 - another class than TimeoutError before Python 3.10
                continue
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                guest.close()
                continue
            threading.Thread(target=self._serve, args=(guest,), name="probe-guest", daemon=True).start()

    def _serve(self, guest: socket.socket) -> None:
        try:
            with guest:
                guest.settimeout(SILENCE_S)
                guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(receive(guest, SECRET_BYTES), self._secret):
                    return
                guest.sendall(b"y")
                if receive(guest, 1) == b"e":
                    for _ in range(ECHOES):
                        guest.sendall(receive(guest, ECHO_BYTES))
                else:
                    guest.sendall(struct.pack("!Q", drain(guest)))
        except OSError:
            pass  # whoever asked is told by the end of the connection
        finally:
            self._places.release()


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, within SILENCE_S. Raises OSError where they do not come."""
    got, end = b"", time.monotonic() + SILENCE_S
    while len(got) < size:
        peer.settimeout(max(0.001, end - time.monotonic()))
        part = peer.recv(size - len(got))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        got += part
    return got


def drain(peer: socket.socket) -> int:
    """Bytes until the other side has sent its last, or for BULK_ENDS_S."""
    buffer, total, end = bytearray(BULK_BYTES), 0, time.monotonic() + BULK_ENDS_S
    peer.settimeout(SILENCE_S)
    while time.monotonic() < end:
        got = peer.recv_into(buffer)
        if not got:
            break
        total += got
    return total


def _greet(address: str, port: int, secret: str) -> socket.socket:
    ipaddress.ip_address(address)  # never a name: nothing is looked up for a peer
    peer = socket.create_connection((address, port), CONNECT_S)
    try:
        peer.settimeout(SILENCE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(secret.encode("ascii"))
        receive(peer, 1)
    except OSError:
        peer.close()
        raise
    return peer


def reach(address: str, port: int, secret: str) -> dict[str, Any]:
    """Whether the Listener there answers. `local`: our end's address; `error`: a name such as ETIMEDOUT."""
    try:
        with _greet(address, port, secret) as peer:
            local = str(peer.getsockname()[0])
    except socket.timeout:  # noqa: UP041 - another class than TimeoutError before Python 3.10
        return {"address": address, "local": None, "error": "ETIMEDOUT"}
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return {"address": address, "local": None, "error": name}
    return {"address": address, "local": local, "error": None}


def reach_all(addresses: list[str], port: int, secret: str) -> list[dict[str, Any]]:
    """All at once, within CONNECT_S + SILENCE_S."""
    found: dict[str, dict[str, Any]] = {}
    threads = [
        threading.Thread(target=lambda to=to: found.update({to: reach(to, port, secret)}), daemon=True)
        for to in addresses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_S + 2 * SILENCE_S)
    late = {"local": None, "error": "ETIMEDOUT"}
    return [found.get(to, {"address": to, **late}) for to in addresses]


def measure(address: str, port: int, secret: str, bulk_s: float) -> dict[str, Any]:
    """Round trip (median of ECHOES, in seconds) and bandwidth (bytes/s that arrived). None: it broke off."""
    result: dict[str, Any] = {"address": address, "round_trip_s": None, "bytes_per_s": None}
    try:
        result["round_trip_s"] = round_trip(address, port, secret)
        result["bytes_per_s"] = bandwidth(address, port, secret, bulk_s)
    except OSError:
        pass  # what there is of it is told
    return result


def round_trip(address: str, port: int, secret: str) -> float:
    times: list[float] = []
    with _greet(address, port, secret) as peer:
        peer.sendall(b"e")
        end = time.monotonic() + ECHOES_END_S
        while len(times) < ECHOES and time.monotonic() < end:
            start = time.perf_counter()
            peer.sendall(bytes(ECHO_BYTES))
            receive(peer, ECHO_BYTES)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(address: str, port: int, secret: str, bulk_s: float) -> float:
    block = memoryview(bytes(BULK_BYTES))
    with _greet(address, port, secret) as peer:
        start = time.perf_counter()
        peer.sendall(b"b")
        peer.settimeout(SILENCE_S)
        while time.perf_counter() - start < bulk_s:
            peer.send(block)
        peer.shutdown(socket.SHUT_WR)
        (arrived,) = struct.unpack("!Q", receive(peer, 8))
        return float(arrived) / (time.perf_counter() - start)


def linux_addresses() -> list[tuple[str, str]]:
    """(interface, its first IPv4 address), asked of the kernel: /sys shows other namespaces' too."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


# ------------------------------------------------------------------ the machine


def look(cache: str, model: str | None) -> dict[str, Any]:
    """What this machine says of itself, in its own words where the other side can read them as well.

    `cache` and `model` are folders here; ~ is our home.
    """
    mac = sys.platform == "darwin"
    return {
        "host": socket.gethostname(),
        "node_id": node_id(),
        "system": platform.system(),
        "release": platform.mac_ver()[0] or platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions(),
        "sysctl": {name: said("sysctl", "-n", name).strip() for name in SYSCTLS},
        "vm_stat": said("vm_stat") if mac else "",
        "pmset": said("pmset", "-g", "custom") if mac else "",
        "hardware_ports": said("networksetup", "-listallhardwareports") if mac else "",
        "ifconfig": said("ifconfig", "-a") if mac else "",
        "linux_addresses": [] if mac else linux_addresses(),
        "cpuinfo": begin_of("/proc/cpuinfo"),
        "meminfo": begin_of("/proc/meminfo"),
        "disk_free_bytes": disk_free_bytes(Path(cache).expanduser()),
        "model": model_files(Path(model).expanduser(), Path(cache).expanduser()) if model else None,
    }


def said(*command: str) -> str:
    """The first of what a program of the system prints; nothing where it is missing, fails or is too slow."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")[:TEXT_CHARACTERS] if done.returncode == 0 else ""


def begin_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")[:TEXT_CHARACTERS]
    except OSError:
        return ""


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = None
    return found


def node_id() -> str | None:
    """As omlx/cluster/node_identity.py made it here; None: it has not been asked for yet."""
    kept = read_json(Path("~/.omlx/node.json").expanduser())
    return str(kept.get("id")) if isinstance(kept, dict) else None


def disk_free_bytes(folder: Path) -> int | None:
    """On the disk where `folder` is, or would be made."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def model_files(folder: Path, cache: Path) -> dict[str, Any]:
    """Sizes of the weight files, and their digests as far as a server has noted them in the cache folder.

    A digest counts while the file's stamp is the noted one (omlx/cache/identity.py writes both). Nothing is
    read but the notes and config.json: the check of a machine has no time for more.
    """
    noted = read_json(cache / "digests.json")
    files = {}
    try:
        for file in sorted(folder.glob("*.safetensors"))[:MOST_FILES]:
            path, found = str(file.resolve()), file.stat()
            stamp = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
            note = noted.get(path) if isinstance(noted, dict) else None
            digest = note.get("blake3") if isinstance(note, dict) and note.get("stamp") == stamp else None
            files[file.name] = {"bytes": found.st_size, "digest": digest}
    except (OSError, RuntimeError):
        pass  # what there is of it is told
    config = read_json(folder / "config.json")
    plain = json.dumps(config, sort_keys=True).encode("ascii")
    digest = None if config is None else hashlib.sha256(plain).hexdigest()
    return {"folder": str(folder), "files": files, "config": digest}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


# ------------------------------------------------------------------ the conversation


def converse(questions: BinaryIO, answers: BinaryIO) -> None:
    """The first line has the secret and how long this may live, each further one a question."""
    hello = json.loads(questions.readline())
    secret = str(hello["secret"])
    # Whatever hangs, and whoever has forgotten us.
    life = threading.Timer(float(hello["life_s"]), os._exit, (3,))
    life.daemon = True
    life.start()
    listener = Listener(secret)
    try:
        for line in iter(questions.readline, b""):
            answer = json.dumps(reply(json.loads(line), listener, secret))
            answers.write(f"\n{MARK} {secret} {answer}\n".encode("ascii"))
            answers.flush()
    finally:
        listener.close()
        life.cancel()


def reply(question: dict[str, Any], listener: Listener, secret: str) -> dict[str, Any]:
    ask = question["ask"]
    if ask == "clock":
        return {"time": time.time()}
    if ask == "look":
        return {"port": listener.port, "look": look(question["cache"], question["model"])}
    if ask == "reach":
        return {"reached": reach_all(question["addresses"], question["port"], secret)}
    return measure(question["address"], question["port"], secret, question["bulk_s"])


if __name__ == "__main__":
    converse(sys.stdin.buffer, sys.stdout.buffer)
