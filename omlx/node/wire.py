"""Frames on a socket: a fixed header, then bytes. And the messages that the control frames carry.

One framing serves the control socket (head <-> stage, msgpack messages) and the links between
neighbours (hidden states as raw bytes). Blocking reads for the stage's threads, a coroutine for the
head. Nothing here is pickled, and every length is checked before a byte of it is read.
"""

import asyncio
from dataclasses import dataclass
from struct import Struct
from typing import Literal, Protocol

import msgspec

from omlx.errors import LinkLost, OutOfStep, TooLate
from omlx.ids import BlockId, Epoch, PlanId, SeqId
from omlx.node.step import StepPlan, StepResult

MAGIC = b"oMLX"
VERSION = 1
CONTROL, HELLO, HIDDEN = 0, 1, 2
HEADER = Struct("!4sBBBxIQIIIIQ")
"""magic, version, kind, dtype, pad, epoch, plan, part, three sizes, payload length in bytes."""
LARGEST_CONTROL = 256 * 2**20
LARGEST_HIDDEN = 8 * 2**30

DTYPES = ("float32", "bfloat16", "float16", "int32")
ITEM_BYTES = (4, 2, 2, 4)


@dataclass(frozen=True, slots=True)
class Tag:
    """Which hidden state a frame holds: the `part`-th batch of plan `plan`."""

    epoch: Epoch
    plan: PlanId
    part: int


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header; `dtype` and `shape` mean something for HIDDEN alone."""

    kind: int
    dtype: int
    tag: Tag
    shape: tuple[int, int, int]
    length: int


# ------------------------------------------------------------------ messages, head -> stage


class CacheSpec(msgspec.Struct, frozen=True):
    """Where a stage keeps blocks of keys and values."""

    root: BlockId
    """Stands for the weights and everything else that changes keys and values."""
    block_tokens: int
    folder: str | None
    """Of the cold tier; None: there is none."""
    floor_bytes: int
    """Free space that must stay on its volume."""


class BlockEntry(msgspec.Struct, frozen=True, array_like=True):
    """A block's name, and what it is the name of."""

    id: BlockId
    parent: BlockId
    tokens: bytes
    """uint32, little endian."""
    start: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first message: what to hold. `end` None means all layers from `start` on."""

    folder: str
    start: int
    end: int | None
    listen_host: str
    memory_share: float
    """This stage's part of the machine's GPU limits, 0 to 1; all stages of a machine share one."""
    ring: tuple[str, ...] = ()
    """For mx.distributed instead of our sockets: every stage's "host:port", in order."""
    rank: int = 0
    backend: str = "ring"
    cache: CacheSpec | None = None
    """None: nothing is kept."""
    kv_bits: int | None = None
    """Of each number in plain keys and values; None: as the model computes them."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A new epoch: drop running state, keep weights, join the neighbours."""

    epoch: Epoch
    downstream: tuple[str, int] | None
    """Connect to the neighbour behind, which listens there, and wait for the one before to connect. The
    last stage's neighbour is the first: drawn tokens go that way. None: this stage is alone."""
    secret: bytes
    """What a connecting neighbour must show."""
    join_within_s: float
    """A neighbour may be deep in a step of the epoch before, so this is longer than a step."""
    step_within_s: float
    """How long a hidden state may be on its way."""
    before: str | None = None
    """The node whose stage connects, as its certificate says it; None where links are plain sockets."""
    behind: str | None = None
    """The node that is connected to."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    plan: StepPlan


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    number: int
    ballast: bytes = b""
    """Comes back with the pong: how long that takes tells what the link carries."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """From the cold tier into the hot one, in this order; outside the order of plans."""

    blocks: tuple[BlockId, ...]


class Spill(msgspec.Struct, frozen=True, tag="spill"):
    """From the hot tier into the cold one; they stay hot."""

    blocks: tuple[BlockEntry, ...]


class Purge(msgspec.Struct, frozen=True, tag="purge"):
    """Out of the cold tier."""

    blocks: tuple[BlockId, ...]


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """End the process in good order."""


# ------------------------------------------------------------------ messages, stage -> head


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    done_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    port: int
    """Where this stage's neighbour before it may connect."""
    weight_bytes: int
    peak_rss_bytes: int
    batches: bool = True
    """Whether several sequences can be computed in one plan; a few families run one after the other."""
    mixes: bool = False
    """Whether chunks and single tokens are computed in one forward."""
    storable: bool = False
    """Whether blocks can be cut out of its caches, and laid back."""
    trimmable: bool = True
    """Whether it can go on from any token of a block."""
    recurrent: bool = False
    """Whether some layers have a state, which is right only where a forward ended."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The model cannot be served like this; trying again would not help."""

    error: str
    """BadModel or CannotSplit."""
    message: str


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    epoch: Epoch


class Done(msgspec.Struct, frozen=True, tag="done"):
    result: StepResult


class PlanTimes(msgspec.Struct, frozen=True, array_like=True):
    """What a plan took a stage: seconds of its device, and moments on its machine's monotonic clock."""

    plan: PlanId
    busy_s: float
    taken: float
    """It was its turn."""
    began: float
    """What the neighbour gives was there."""
    launched: float
    """Its graph was built, the device was asked."""
    computed: float
    given: float
    """The neighbour's link, or the head's socket, has it."""


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """What plans took this stage, told now and then."""

    epoch: Epoch
    plans: tuple[PlanTimes, ...]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a stage has of a block in one tier now. 0 bytes: nothing."""

    id: BlockId
    bytes: int
    restorable: bool = False
    """Whether this stage can go on from the block's end."""


class Holds(msgspec.Struct, frozen=True, tag="holds"):
    """The answer to keeps, fetches, spills and purges."""

    tier: Literal["hot", "cold"]
    blocks: tuple[Held, ...]
    seconds: float = 0.0
    """That reading or writing them took."""
    evicted: bool = False
    """The answer to a plan's evicts: what was told of these blocks' RAM before is over."""


class Catalogue(msgspec.Struct, frozen=True, tag="catalogue"):
    """Blocks that were found in the cold tier, parents before children; in several messages."""

    entries: tuple[BlockEntry, ...]
    held: tuple[Held, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """These sequences cannot be computed; this stage is well and waits for the next Begin."""

    epoch: Epoch
    seqs: tuple[SeqId, ...]
    message: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """A neighbour is gone or out of step; this stage is well and waits for the next Begin."""

    epoch: Epoch
    message: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """From the socket thread, so it comes while the compute thread is busy."""

    number: int
    peak_rss_bytes: int
    held_bytes: int
    """By MLX's arrays, those that it keeps for later included."""
    free_bytes: int
    """Of its machine: what could be taken without swapping."""
    ballast: bytes = b""


ToStage = Load | Begin | Step | Ping | Fetch | Spill | Purge | Leave
ToHead = Loading | Loaded | Refusal | Begun | Done | Busy | Holds | Catalogue | Failed | Broken | Pong

_encoder = msgspec.msgpack.Encoder()
_to_stage: msgspec.msgpack.Decoder[ToStage] = msgspec.msgpack.Decoder(ToStage)
_to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead)

# ------------------------------------------------------------------ headers


def pack_header(
    kind: int, tag: Tag, length: int, dtype: int = 0, shape: tuple[int, int, int] = (0, 0, 0)
) -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, dtype, tag.epoch, tag.plan, tag.part, *shape, length)


def parse_header(data: bytes | bytearray) -> Header:
    """Raises OutOfStep for anything that is not a frame of ours."""
    magic, version, kind, dtype, epoch, plan, part, b, n, h, length = HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise OutOfStep("not a frame of this version of oMLX")
    if kind == HIDDEN:
        whole = (
            dtype < len(DTYPES) and length == b * n * h * ITEM_BYTES[dtype] and 0 < length <= LARGEST_HIDDEN
        )
    else:
        whole = kind in (CONTROL, HELLO) and length <= LARGEST_CONTROL
    if not whole:
        raise OutOfStep(f"a frame of kind {kind} with {length} bytes for shape {(b, n, h)}")
    return Header(kind, dtype, Tag(Epoch(epoch), PlanId(plan), part), (b, n, h), length)


NO_TAG = Tag(Epoch(0), PlanId(0), 0)


def control_frame(message: ToStage | ToHead) -> bytes:
    body = _encoder.encode(message)
    return pack_header(CONTROL, NO_TAG, len(body)) + body


# ------------------------------------------------------------------ blocking side (stages)


class Readable(Protocol):
    """A socket, or a Channel of two."""

    def recv_into(self, view: memoryview, /) -> int: ...


class Conversation(Readable, Protocol):
    """Read by one thread, written to by others in turns."""

    def sendall(self, data: bytes, /) -> None: ...


def read_exactly(sock: Readable, view: memoryview) -> None:
    """Fill `view`. Raises LinkLost at the end of the stream, TooLate at the socket's timeout."""
    while len(view):
        try:
            count = sock.recv_into(view)
        except TimeoutError as error:
            raise TooLate("nothing came before the deadline") from error
        except OSError as error:
            raise LinkLost(f"the connection broke: {error}") from error
        if count == 0:
            raise LinkLost("the other side closed the connection")
        view = view[count:]


def read_frame(sock: Readable) -> tuple[Header, bytearray]:
    head = bytearray(HEADER.size)
    read_exactly(sock, memoryview(head))
    header = parse_header(head)
    body = bytearray(header.length)
    read_exactly(sock, memoryview(body))
    return header, body


def read_for_stage(sock: Readable) -> ToStage:
    """The next control message from the head. Raises LinkLost, OutOfStep."""
    _, body = read_frame(sock)
    try:
        return _to_stage.decode(body)
    except msgspec.MsgspecError as error:
        raise OutOfStep(f"a control message that is none: {error}") from error


# ------------------------------------------------------------------ asyncio side (head)


async def read_for_head(reader: asyncio.StreamReader) -> ToHead:
    """The next control message from a stage. Raises LinkLost, OutOfStep."""
    try:
        header = parse_header(await reader.readexactly(HEADER.size))
        body = await reader.readexactly(header.length)
        return _to_head.decode(body)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkLost("the stage's process is gone") from error
    except msgspec.MsgspecError as error:
        raise OutOfStep(f"a control message that is none: {error}") from error
