"""What a stage keeps of blocks: the hot tier in its RAM, and two threads between that and its SSD.

The compute thread keeps, takes and evicts; it never waits for the SSD. What the head asks to fetch, spill or
purge waits in bounded queues, and every request is answered, also by what could not be done.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue

import structlog

from omlx.cache.block_file import BadBlock, Label
from omlx.cache.shelf import Shelf
from omlx.ids import BlockId
from omlx.node.slab import Slab, from_tensors, to_tensors
from omlx.node.wire import BlockEntry, CacheSpec, Catalogue, Fetch, Held, Holds, Purge, Spill

log = structlog.get_logger()

WAITING = 64
"""Requests of the head that may wait for a thread; it has fewer on their way."""
LISTED = 512
"""Blocks of the SSD that are told in one message."""
ROOM_AGAIN_S = 30.0
"""A full disk is not asked again before."""

Tell = Callable[[Holds | Catalogue], None]


class Store:
    """Owns the stage's blocks. `tell` is called from any of its threads."""

    def __init__(self, spec: CacheSpec, places: Sequence[int], tell: Tell) -> None:
        """`places`: numbers of the stage's caches among those of the whole model. Raises OSError."""
        self.block_tokens = spec.block_tokens
        self._spec = spec
        self._told = tell
        self._places = tuple(places)
        self._hot: dict[BlockId, Slab] = {}
        self._lock = threading.Lock()
        """Held while that changes and is told: what the head hears has the order of what happened."""
        self._restorable: dict[BlockId, bool] = {}
        """What the SSD has."""
        self._takes_again_at = 0.0
        """Until then the SSD is taken for full, on time.monotonic."""
        self._reads: Queue[Fetch | None] = Queue(WAITING)
        self._writes: Queue[Spill | Purge | None] = Queue(WAITING)
        """None wakes a thread that is to end."""
        self._closed = False
        self._telling = threading.Lock()
        self._shelf = None
        self._folder = None if spec.folder is None else Path(spec.folder).expanduser()
        if self._folder is not None:
            span = (min(places), max(places) + 1) if places else (0, 0)
            self._shelf = Shelf.open(self._folder, spec.root, *span)
            for name, work in (("ssd-reader", self._read), ("ssd-writer", self._write)):
                threading.Thread(target=work, name=name, daemon=True).start()

    def close(self) -> None:
        """Nothing is told from now on, and the threads end when their disk lets them."""
        with self._telling:
            self._closed = True
        with self._lock:
            self._hot.clear()
        for queue in (self._reads, self._writes):
            with suppress(Full):  # who is busy looks up before it takes the next one
                queue.put_nowait(None)

    def tell_catalogue(self) -> None:
        """What the SSD has of this stage's layers."""
        lines = self._shelf.catalogue() if self._shelf is not None else []
        self._restorable = {line.id: line.restorable for line in lines}
        for first in range(0, len(lines), LISTED):
            some = lines[first : first + LISTED]
            entries = tuple(BlockEntry(line.id, line.parent, line.tokens, line.start) for line in some)
            held = tuple(Held(line.id, line.bytes, line.restorable) for line in some)
            self._tell(Catalogue(entries, held))

    # ---------------------------------------------------------------- the compute thread

    def keep(self, kept: Iterable[tuple[BlockId, Slab]]) -> None:
        """Evaluated slabs. One that is there already stays, unless this one is good for more."""
        told = []
        with self._lock:
            for id, slab in kept:
                there = self._hot.get(id)
                if there is None or (slab.restorable and not there.restorable):
                    self._hot[id] = there = slab
                told.append(_held(id, there))
            self._tell(Holds("hot", tuple(told)))

    def take(self, id: BlockId) -> Slab | None:
        with self._lock:
            return self._hot.get(id)

    def evict(self, ids: Iterable[BlockId]) -> None:
        """Out of RAM. It is told, for until then the head must not ask for them to be fetched."""
        gone = tuple(Held(id, 0) for id in ids)
        with self._lock:
            for held in gone:
                self._hot.pop(held.id, None)
            self._tell(Holds("hot", gone, evicted=True))

    def _tell(self, message: Holds | Catalogue) -> None:
        with self._telling:
            if not self._closed:
                self._told(message)

    # ---------------------------------------------------------------- the socket thread

    def ask(self, message: Fetch | Spill | Purge) -> None:
        """Queue it; what finds no room, or no SSD, is answered at once."""
        if self._shelf is None:
            self._decline(message)
            return
        try:
            if isinstance(message, Fetch):
                self._reads.put_nowait(message)
            else:
                self._writes.put_nowait(message)
        except Full:
            self._decline(message)

    def _decline(self, message: Fetch | Spill | Purge) -> None:
        match message:
            case Fetch(ids):
                with self._lock:
                    self._tell(Holds("hot", tuple(_held(id, self._hot.get(id)) for id in ids)))
            case Spill(entries):
                self._tell(Holds("cold", tuple(self._stored(entry.id) for entry in entries)))
            case Purge(ids):
                self._tell(Holds("cold", tuple(self._stored(id) for id in ids)))

    def _stored(self, id: BlockId) -> Held:
        """What the SSD has in a file of this stage's own."""
        line = self._shelf.lines.get(id) if self._shelf is not None else None
        return Held(id, 0) if line is None else Held(id, line.bytes, line.restorable)

    # ---------------------------------------------------------------- the reader

    def _read(self) -> None:
        while (asked := self._reads.get()) is not None and not self._closed:
            for id in asked.blocks:
                started = time.monotonic()
                slab = self.take(id)
                read = slab is None
                if read:
                    slab = self._load(id)
                if slab is None:
                    self._tell(Holds("cold", (Held(id, 0),)))
                seconds = time.monotonic() - started if read else 0.0
                with self._lock:
                    if slab is not None:
                        self._hot.setdefault(id, slab)
                    self._tell(Holds("hot", (_held(id, self._hot.get(id)),), seconds))

    def _load(self, id: BlockId) -> Slab | None:
        assert self._shelf is not None
        try:
            tensors = self._shelf.gather(id, self._places)
        except BadBlock:
            return None  # the shelf has said so
        except OSError as error:
            log.warning("a kept block is of no use", block=id.hex(), why=str(error))
            return None
        return Slab(from_tensors(tensors), self._restorable.get(id, False))

    # ---------------------------------------------------------------- the writer

    def _write(self) -> None:
        assert self._shelf is not None
        while (asked := self._writes.get()) is not None and not self._closed:
            match asked:
                case Spill(entries):
                    for entry in entries:
                        self._store(entry)
                        self._tell(Holds("cold", (self._stored(entry.id),)))
                case Purge(ids):
                    for id in ids:
                        self._shelf.remove(id)
                        self._restorable.pop(id, None)
                        self._tell(Holds("cold", (Held(id, 0),)))

    def _store(self, entry: BlockEntry) -> None:
        """Unless it is there already, or there is nothing to write, or no room."""
        assert self._shelf is not None
        slab, there = self.take(entry.id), self._shelf.lines.get(entry.id)
        if (
            slab is None
            or time.monotonic() < self._takes_again_at
            or (there and there.restorable >= slab.restorable)
        ):
            return
        try:
            self._check_room(slab.nbytes)
            label = Label(
                id=entry.id,
                parent=entry.parent,
                tokens=entry.tokens,
                start=entry.start,
                restorable=slab.restorable,
            )
            line = self._shelf.store(label, to_tensors(slab.pieces))
        except OSError as error:
            self._takes_again_at = time.monotonic() + ROOM_AGAIN_S
            log.warning("the SSD takes no blocks for a while", folder=str(self._folder), why=str(error))
            return
        self._restorable[entry.id] = line.restorable

    def _check_room(self, bytes: int) -> None:
        assert self._folder is not None
        free = shutil.disk_usage(self._folder).free
        if free - bytes < self._spec.floor_bytes:
            raise OSError(f"{free} bytes are free, of which {self._spec.floor_bytes} must stay")


def _held(id: BlockId, slab: Slab | None) -> Held:
    # A stage that keeps nothing of a block has all of it: 0 bytes would say the opposite.
    return Held(id, 0) if slab is None else Held(id, max(1, slab.nbytes), slab.restorable)
