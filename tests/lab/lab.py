"""Several pretend hosts on one Linux machine, for tests that need a network, and the faults of real ones.

Each host is a set of namespaces around one small init, with an eth0 on a bridge that lies in a namespace of
its own: the machine itself gets no address, route, firewall rule or named namespace. When the process that
made the lab ends, for any reason, or the lab's time is up, every process, link and file of it is gone.

    with Lab(macs(3, memory_gib=(64, 16, 128)), ttl_s=300) as lab:
        a, b, c = lab.hosts
        a.run(["hostname"], check=True)
        lab.shape(b, delay_ms=2, rate_mbit=1000)   # each way
        lab.cut(b)                                 # silent: packets vanish, the link stays up
        lab.cut(b, carrier=True)                   # cable pulled: b sees it
        lab.heal(b)
        lab.block(a, c)                            # one pair only; multicast still passes
        lab.multicast(c, False)                    # as a switch does that filters mDNS, both ways
        lab.suspend(b); lab.resume(b)              # lid shut: frozen and off the network
        lab.cpu(b, 0.5)                            # at most half a core
        lab.crash(b)                               # processes die, the kernel says so to their peers
        lab.power_off(b)                           # silence, then death
        lab.boot(b)                                # the same name, addresses, home and host key again

A host is named by itself, its name or its address.
"""

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.lab.holder import clear
from tests.lab.host import Host, HostSpec, Site, address_of
from tests.lab.machine import Groups, LabError, Namespaces, missing, send_signal
from tests.lab.relay import Link
from tests.lab.shims import mac_shims
from tests.lab.switch import Switch

MOST_HOSTS = 16
MOST_TTL_S = 3600.0
NO_SUCH_CARD = "02:77:ff:ff:ff:ff"


def macs(
    count: int,
    memory_gib: int | Sequence[int] = 64,
    shims: Mapping[str, str] | None = None,
    chip: str = "Apple M4 Max",
) -> list[HostSpec]:
    """mac-a, mac-b and so on, which say that they are Macs; `shims` stand instead of a Mac's commands."""
    sizes = [memory_gib] * count if isinstance(memory_gib, int) else list(memory_gib)
    if len(sizes) != count or not 1 <= count <= MOST_HOSTS:
        raise LabError(
            f"{count} hosts with {len(sizes)} memory sizes: give 1 to {MOST_HOSTS} and one size for each"
        )
    return [
        HostSpec(f"mac-{chr(97 + i)}", size, mac_shims(chip, size) if shims is None else shims)
        for i, size in enumerate(sizes)
    ]


class Lab:
    """A context manager: it stands inside, and nothing of it stays outside.

    Raises `LabError` where the machine cannot have one. `folder`, new or empty, is removed with it.
    """

    def __init__(
        self,
        specs: Sequence[HostSpec],
        ttl_s: float = 600,
        *,
        folder: Path | None = None,
        private: Sequence[str] = ("/tmp/ray",),
        shm_mib: int = 512,
    ) -> None:
        names = [spec.name for spec in specs]
        if not 1 <= len(names) <= MOST_HOSTS or len(set(names)) < len(names):
            raise LabError(f"a lab has 1 to {MOST_HOSTS} hosts of different names, not {names}")
        if reason := missing(sshd=False):
            raise LabError(reason)
        self.deadline = time.monotonic() + min(ttl_s, MOST_TTL_S)
        tag = f"omlx-lab-{os.getpid()}-{os.urandom(3).hex()}"
        self.folder = Path(tempfile.gettempdir(), tag) if folder is None else folder.absolute()
        self.groups = Groups(tag)
        addresses = {name: address_of(i + 1) for i, name in enumerate(names)}
        etc_hosts = ["127.0.0.1 localhost", "::1 localhost"]
        etc_hosts += [f"{address} {name} {name}.local" for name, address in addresses.items()]
        site = Site(self.folder, self.groups, "\n".join(etc_hosts) + "\n", tuple(private), shm_mib)
        self.hosts = tuple(Host(spec, i + 1, site) for i, spec in enumerate(specs))
        self._private = list(private)
        self._is_ours = False
        """The folder: only then is it removed."""
        self._switch: Switch | None = None

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        _make_empty(self.folder)
        self._is_ours = True
        leftovers = {"tag": self.groups.tag, "folder": str(self.folder), "mount_points": self._private}
        self._switch = Switch(Namespaces.make(["--net"], self.left_s, leftovers), self.deadline)
        self._switch.start()
        for host in self.hosts:
            self.boot(host)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        if self._is_ours:
            clear(self.groups.tag, self.folder)
            self._is_ours = False

    def __getitem__(self, name: "Host | str") -> Host:
        for host in self.hosts:
            if name in (host, host.name, host.ip):
                return host
        raise LabError(f"no host {name!r} here; there are {', '.join(host.name for host in self.hosts)}")

    @property
    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    @property
    def switch(self) -> Switch:
        if self._switch is None:
            raise LabError("the lab is not open: use it in a with statement")
        return self._switch

    def is_cut(self, host: Host | str) -> bool:
        return self.switch.is_cut(self[host].number)

    # -- the hosts' lives

    def boot(self, host: Host | str) -> None:
        host = self[host]
        if host.space is not None:
            raise LabError(f"{host.name} is on already")
        space = host.start(self.left_s)
        self.switch.plug_in(host.number, host.hardware_address, space)
        host.join_network()

    def crash(self, host: Host | str) -> None:
        """Every process dies at once; the kernel still closes its connections."""
        host = self[host]
        host.stop()
        self.switch.unplug(host.number)

    def power_off(self, host: Host | str) -> None:
        """Silent first, then dead: its peers hear nothing."""
        self.cut(host)
        self.crash(host)

    def suspend(self, host: Host | str) -> None:
        """Frozen and off the network, until `resume`."""
        host = self[host]
        self.cut(host)
        for _ in range(2):  # the second round stops what was started during the first
            send_signal(
                set(host.pids()) - {host.pid}, signal.SIGSTOP
            )  # init stays awake, to end with the lab
        host.is_frozen = True

    def resume(self, host: Host | str) -> None:
        host = self[host]
        # An nsenter stops itself when its command is stopped.
        send_signal({*host.pids(), *self.groups.pids(host.name)}, signal.SIGCONT)
        host.is_frozen = False
        self.heal(host)

    def cpu(self, host: Host | str, cores: float) -> None:
        """At most so many cores' worth of time; 0 is no limit."""
        self.groups.limit_cpu(self[host].name, cores)

    # -- the network

    def cut(self, host: Host | str, *, carrier: bool = False) -> None:
        self.switch.cut(self._on(host).number, carrier)

    def heal(self, host: Host | str) -> None:
        self.switch.heal(self._on(host).number)

    def block(self, one: Host | str, other: Host | str) -> None:
        """Unicast between the two is lost both ways: each aims at a card that nobody has."""
        for here, there in self._both_ways(one, other):
            here.run(
                [*_NEIGHBOUR, "replace", there.ip, "lladdr", NO_SUCH_CARD, *_ON_ETH0, "nud", "permanent"],
                check=True,
            )

    def unblock(self, one: Host | str, other: Host | str) -> None:
        for here, there in self._both_ways(one, other):
            here.run([*_NEIGHBOUR, "del", there.ip, *_ON_ETH0], check=True)

    def shape(
        self,
        host: Host | str,
        *,
        delay_ms: float = 0,
        jitter_ms: float = 0,
        loss: float = 0,
        rate_mbit: float = 0,
    ) -> None:
        """The link is so from now on, each way; without arguments as it was made. Loss is a share, 0 to 1."""
        if min(delay_ms, jitter_ms, rate_mbit) < 0 or not 0 <= loss <= 1:
            raise LabError("delay_ms, jitter_ms and rate_mbit are 0 or more, loss is 0 to 1")
        number = self._on(host).number
        link = Link(
            delay_ms / 1e3, jitter_ms / 1e3, loss, rate_mbit * 1e6 / 8, self.switch.link(number).multicast
        )
        self.switch.shape(number, link)

    def multicast(self, host: Host | str, on: bool) -> None:
        """Whether multicast passes the host's port, in and out."""
        number = self._on(host).number
        self.switch.shape(number, replace(self.switch.link(number), multicast=on))

    def _on(self, host: Host | str) -> Host:
        host = self[host]
        if host.space is None:
            raise LabError(f"{host.name} is off: boot it first")
        return host

    def _both_ways(self, one: Host | str, other: Host | str) -> list[tuple[Host, Host]]:
        return [(self[one], self[other]), (self[other], self[one])]

    def status(self) -> dict[str, object]:
        """For people and for `python -m tests.lab exec`: strings, numbers and truths only."""
        return {
            "folder": str(self.folder),
            "left_s": round(self.left_s),
            "hosts": {host.name: self._status_of(host) for host in self.hosts},
        }

    def _status_of(self, host: Host) -> dict[str, object]:
        return {
            "ip": host.ip,
            "pid": None if host.space is None else host.pid,
            "home": str(host.home),
            "cut": self.is_cut(host),
            "frozen": host.is_frozen,
            "plain_link": self.switch.link(host.number).plain,
            "environment": host.environment() | {"LAB_GROUPS": host.group_names()},
        }


_NEIGHBOUR = ("ip", "neighbour")
_ON_ETH0 = ("dev", "eth0")


def _make_empty(folder: Path) -> None:
    """It will be removed with all that is in it, so it must be nobody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
        raise LabError(f"{folder} is a link, another user's or not empty: name a folder for the lab alone")
