"""The lab's switch: a bridge in a namespace of its own, a port for each host, and its links' faults."""

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field

from tests.lab.machine import (
    BARE_PYTHON,
    HERE,
    LabError,
    Namespaces,
    end,
    first_line,
    ipv6_setting,
    script,
    sh,
)
from tests.lab.relay import Link

BRIDGE = "br0"
PLAIN = Link()


@dataclass(slots=True)
class Port:
    """Where one host is plugged in."""

    number: int
    link: Link = PLAIN
    relay: subprocess.Popen[str] | None = None
    is_cut: bool = False

    @property
    def plug(self) -> str:
        """The end of the host's cable."""
        return f"p{self.number}"

    @property
    def inner(self) -> str:
        return f"a{self.number}"

    @property
    def on_bridge(self) -> str:
        """What is joined to the bridge: the plug, or a pair of which the relay has the inner end."""
        return f"b{self.number}" if self.relay else self.plug


@dataclass(slots=True)
class Switch:
    """Owned by its lab. Numbers are those of hosts; a number that is not plugged in is a `KeyError`."""

    space: Namespaces
    deadline: float
    """When all must be gone, by `time.monotonic`."""
    _ports: dict[int, Port] = field(default_factory=dict)

    def do(self, *commands: list[str]) -> None:
        sh(self.space.enter(script(*commands), "-n"))

    def start(self) -> None:
        self.do(
            ipv6_setting("disable_ipv6", 1),
            ["ip", "link", "add", BRIDGE, "type", "bridge", "mcast_snooping", "0", "forward_delay", "0"],
            ["ip", "link", "set", BRIDGE, "up"],
        )

    def plug_in(self, number: int, address: str, host: Namespaces) -> None:
        """Gives the host an eth0 with that hardware address."""
        port = Port(number)
        peer = ["peer", "name", "eth0", "address", address, "netns", str(host.pid)]
        self.do(
            ["ip", "link", "add", port.plug, "type", "veth", *peer],
            ["ip", "link", "set", port.plug, "master", BRIDGE, "up"],
        )
        self._ports[number] = port

    def unplug(self, number: int) -> None:
        if (port := self._ports.pop(number, None)) is None:
            return
        self._end_relay(port)
        try:
            self.do(["ip", "link", "del", port.plug])
        except LabError:  # it went with the host's own end
            return

    def is_cut(self, number: int) -> bool:
        return number in self._ports and self._ports[number].is_cut

    def link(self, number: int) -> Link:
        return self._ports[number].link if number in self._ports else PLAIN

    def cut(self, number: int, carrier: bool) -> None:
        """Frames vanish; with `carrier` the host also sees that its cable is out."""
        port = self._ports[number]
        self.do(["ip", "link", "set", port.plug, "down"] if carrier else self._leave(port))
        port.is_cut = True

    def heal(self, number: int) -> None:
        port = self._ports[number]
        self.do(["ip", "link", "set", port.plug, "up"], self._join(port))
        port.is_cut = False

    def shape(self, number: int, link: Link) -> None:
        """From now on the link is so, each way. A cut one stays cut."""
        port = self._ports[number]
        if link.plain:
            self._end_relay(port)
            if not port.is_cut:
                self.do(self._join(port))
        else:
            relay = port.relay or self._start_relay(port)
            assert relay.stdin is not None
            relay.stdin.write(json.dumps(asdict(link)) + "\n")
            relay.stdin.flush()
            if not first_line(relay):
                raise LabError(f"the relay of port {number} ended")
        port.link = link

    def _join(self, port: Port) -> list[str]:
        return ["ip", "link", "set", port.on_bridge, "master", BRIDGE]

    def _leave(self, port: Port) -> list[str]:
        return ["ip", "link", "set", port.on_bridge, "nomaster"]

    def _start_relay(self, port: Port) -> subprocess.Popen[str]:
        left_s = str(max(1.0, self.deadline - time.monotonic()))
        self.do(
            ["ip", "link", "add", port.inner, "type", "veth", "peer", "name", f"b{port.number}"],
            self._leave(port),
            ["ip", "link", "set", port.inner, "up"],
            ["ip", "link", "set", f"b{port.number}", "up"],
        )
        relay = subprocess.Popen(
            self.space.enter([*BARE_PYTHON, HERE / "relay.py", port.plug, port.inner, left_s], "-n"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if not first_line(relay):
            end(relay)
            raise LabError(f"no relay at port {port.number}: AF_PACKET is refused here")
        port.relay = relay
        if not port.is_cut:
            self.do(self._join(port))
        return relay

    def _end_relay(self, port: Port) -> None:
        if port.relay:
            end(port.relay)
            port.relay = None
            self.do(["ip", "link", "del", port.inner])

    def close(self) -> None:
        for port in self._ports.values():
            if port.relay:
                end(port.relay)
        self._ports.clear()
        self.space.leave()
