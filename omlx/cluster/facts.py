"""What a probe's answers mean: a machine's own words, checked and turned into numbers. Pure.

The words come from another machine: each has a length, and none a character that a terminal obeys.
"""

import re
from typing import Annotated, Literal, TypeVar

import msgspec

from omlx.errors import OmlxError

A = TypeVar("A")
Kind = Literal["thunderbolt", "ethernet", "wifi", "other"]
UNPRINTABLE = "\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069"
Word = Annotated[str, msgspec.Meta(max_length=300, pattern=f"^[^{UNPRINTABLE}]*\\Z")]
Text = Annotated[str, msgspec.Meta(max_length=16384)]
"""Is looked through for numbers, and never shown."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Address = Annotated[str, msgspec.Meta(max_length=45, pattern=r"^[0-9a-fA-F.:]+\Z")]
ErrorName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]{1,40}\Z")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
MOST_ADDRESSES = 8
NOT_THE_NETWORK = (
    *("lo", "docker", "veth", "br-", "virbr", "vmnet"),
    *("awdl", "llw", "utun", "gif", "stf", "anpi", "ap"),  # macOS's own
)


class Unreadable(OmlxError):
    """A machine's answer is none that our probe gives."""


class Answer(msgspec.Struct, frozen=True):
    """The base of what a probe says; fields that we do not know are left out."""


class ModelFile(Answer, frozen=True):
    bytes: Count
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")] | None


class ModelFiles(Answer, frozen=True):
    """A model's weight files by name. `config`: SHA-256 of what config.json says; None: there is none."""

    folder: Word
    files: Annotated[dict[Word, ModelFile], msgspec.Meta(max_length=512)]
    config: Word | None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class Look(Answer, frozen=True):
    """As omlx/cluster/probe.py's `look` fills it in."""

    host: Word
    node_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")] | None
    system: Word
    release: Word
    machine: Word
    python: Word
    executable: Word
    versions: Annotated[dict[Word, Word | None], msgspec.Meta(max_length=16)]
    sysctl: Annotated[dict[Word, Text], msgspec.Meta(max_length=16)]
    vm_stat: Text
    pmset: Text
    hardware_ports: Text
    ifconfig: Text
    linux_addresses: Annotated[list[tuple[Word, Address]], msgspec.Meta(max_length=256)]
    cpuinfo: Text
    meminfo: Text
    disk_free_bytes: Count | None
    model: ModelFiles | None


class LookAnswer(Answer, frozen=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    look: Look


class ClockAnswer(Answer, frozen=True):
    time: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    """Seconds since 1970."""


class Reached(Answer, frozen=True):
    """One address tried from the other side. `local`: the address that the system went out from."""

    address: Address
    local: Address | None
    error: ErrorName | None


class ReachAnswer(Answer, frozen=True):
    reached: Annotated[tuple[Reached, ...], msgspec.Meta(max_length=MOST_ADDRESSES + 1)]
    """In the order asked."""


class Measured(Answer, frozen=True):
    address: Address
    round_trip_s: Seconds | None
    bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] | None


class Interface(msgspec.Struct, frozen=True):
    """An IPv4 address that others may know the machine by."""

    name: str
    address: str
    kind: Kind


class Facts(msgspec.Struct, frozen=True):
    """What a machine is. None: it could not be told."""

    host: str
    node_id: str | None
    """None: the machine has no id yet."""
    system: str
    """"Darwin" or "Linux"."""
    release: str
    executable: str
    versions: dict[str, str | None]
    """Of omlx, python, mlx, mlx-lm and ray; None: not installed."""
    chip: str
    memory_bytes: int | None
    available_bytes: int | None
    """Could be taken now without swapping."""
    wired_limit_mb: int | None
    """What iogpu.wired_limit_mb is set to; 0: the system decides. None: no Mac."""
    disk_free_bytes: int | None
    sleep_minutes: int | None
    """With power, a Mac sleeps after so long; 0: never."""
    interfaces: tuple[Interface, ...]
    model: ModelFiles | None


def read_answer(text: bytes, kind: type[A]) -> A:
    """One answer of a probe. Raises Unreadable, which says what is wrong with it."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable(f"the answer is none of our probe's: {printable(str(error))}") from error


def printable(text: str, most: int = 200) -> str:
    """On one line, of a length, and without what a terminal would obey."""
    plain = re.sub(f"[{UNPRINTABLE}]+", " ", text).strip()
    return plain if len(plain) <= most else f"{plain[:most]}..."


def facts_of(look: Look) -> Facts:
    mac = look.system == "Darwin"
    memory = _number(look.sysctl.get("hw.memsize", "")) or _kibibytes(look.meminfo, "MemTotal")
    limit = look.sysctl.get("iogpu.wired_limit_mb", "")
    return Facts(
        host=look.host,
        node_id=look.node_id,
        system=look.system,
        release=look.release,
        executable=look.executable,
        versions={**look.versions, "python": look.python},
        chip=printable(look.sysctl.get("machdep.cpu.brand_string", ""))
        or printable(_line(look.cpuinfo, "model name"))
        or look.machine,
        memory_bytes=memory,
        available_bytes=available_by_vm_stat(look.vm_stat)
        if mac
        else _kibibytes(look.meminfo, "MemAvailable"),
        wired_limit_mb=_number(limit),
        disk_free_bytes=look.disk_free_bytes,
        sleep_minutes=sleep_minutes(look.pmset) if mac else None,
        interfaces=interfaces(look),
        model=look.model,
    )


def available_by_vm_stat(text: str) -> int | None:
    """Free, inactive, speculative and purgeable pages of macOS's `vm_stat`, in bytes."""
    size = re.search(r"page size of (\d{1,9}) bytes", text)
    pages = re.findall(r"Pages (?:free|inactive|speculative|purgeable):\s+(\d{1,15})\.", text)
    return int(size[1]) * sum(map(int, pages)) if size and pages else None


def sleep_minutes(pmset: str) -> int | None:
    """Of `pmset -g custom`, the part that holds with power; a Mac without a battery has no other."""
    found = re.search(r"^\s*sleep\s+(\d{1,9})", pmset.split("AC Power:")[-1], re.MULTILINE)
    return int(found[1]) if found else None


def interfaces(look: Look) -> tuple[Interface, ...]:
    """MOST_ADDRESSES at most, the fastest kinds first; loopback, tunnels and containers' are none."""
    kinds = hardware_ports(look.hardware_ports)
    found = addresses_by_ifconfig(look.ifconfig) if look.system == "Darwin" else look.linux_addresses
    every = (
        Interface(name, address, kinds.get(name) or _kind_by_name(name))
        for name, address in found
        if not name.startswith(NOT_THE_NETWORK)
    )
    order: tuple[Kind, ...] = ("thunderbolt", "ethernet", "wifi", "other")
    return tuple(sorted(every, key=lambda one: order.index(one.kind))[:MOST_ADDRESSES])


def addresses_by_ifconfig(text: str) -> list[tuple[str, str]]:
    """(interface, IPv4 address) as macOS's `ifconfig -a` lists them."""
    found, name = [], ""
    for line in text.splitlines():
        if starts := re.match(r"([a-z0-9]{1,20}):", line):
            name = starts[1]
        elif address := re.match(r"\s+inet (\d{1,3}(?:\.\d{1,3}){3})\b", line):
            found.append((name, address[1]))
    return found


def hardware_ports(listing: str) -> dict[str, Kind]:
    """Device -> kind, out of macOS's `networksetup -listallhardwareports`."""
    pairs = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", listing, re.MULTILINE)
    return {device: _kind_of_port(port) for port, device in pairs}


def _kind_of_port(port: str) -> Kind:
    if "Thunderbolt" in port and "Ethernet" not in port:
        return "thunderbolt"
    if "Wi-Fi" in port or "AirPort" in port:
        return "wifi"
    return "ethernet" if "Ethernet" in port or "LAN" in port else "other"


def _kind_by_name(name: str) -> Kind:
    if name.startswith(("thunderbolt", "tb")):
        return "thunderbolt"
    if name.startswith("wl"):
        return "wifi"
    return "ethernet" if name.startswith(("en", "eth")) else "other"


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _line(text: str, key: str) -> str:
    """A line's value in a text such as /proc/meminfo's."""
    found = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _kibibytes(text: str, key: str) -> int | None:
    number = _number(_line(text, key).removesuffix(" kB"))
    return None if number is None else number * 1024
