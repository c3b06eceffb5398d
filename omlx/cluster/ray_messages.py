"""What the coordinator asks Ray's driver process, and what that answers: a line of JSON each."""

import msgspec

from omlx.cluster.recorded_process import RecordedProcess

LONGEST_LINE = 2**20


class Place(msgspec.Struct, frozen=True, tag="place"):
    """Start a stage on a node."""

    number: int
    node_id: str
    head: str
    """The node id that it is to let in."""
    within_s: float


class End(msgspec.Struct, frozen=True, tag="end"):
    """Wait for a stage's end, then kill it."""

    number: int
    node_id: str
    process: RecordedProcess
    within_s: float


class Ask(msgspec.Struct, frozen=True, tag="nodes"):
    """Which nodes Ray sees."""

    number: int


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    number: int
    address: str
    port: int
    process: RecordedProcess


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    number: int


class RayNode(msgspec.Struct, frozen=True):
    """A node that runs a Ray of this cluster."""

    node_id: str
    address: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    number: int
    nodes: tuple[RayNode, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    number: int
    message: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The first line: the driver is in."""

    number: int = 0


ToDriver = Place | End | Ask
FromDriver = Ready | Placed | Ended | Alive | Failed

_to_driver: msgspec.json.Decoder[ToDriver] = msgspec.json.Decoder(ToDriver)
_from_driver: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)


def line(message: ToDriver | FromDriver) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def for_driver(data: bytes) -> ToDriver:
    """Raises msgspec.MsgspecError."""
    return _to_driver.decode(data)


def from_driver(data: bytes) -> FromDriver:
    """Raises msgspec.MsgspecError."""
    return _from_driver.decode(data)
