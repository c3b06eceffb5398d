"""A stage's blocks in RAM and on its SSD: every request is answered, whatever happens to the disk."""

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

import mlx.core as mx
import pytest

from omlx.cache.block import name, pack, root_of
from omlx.cache.shelf import Shelf
from omlx.ids import BlockId
from omlx.node import store as store_module
from omlx.node.slab import Part, Piece, Slab
from omlx.node.store import LISTED, ROOM_AGAIN_S, WAITING, Store
from omlx.node.wire import BlockEntry, CacheSpec, Catalogue, Fetch, Held, Holds, Purge, Spill

ROOT = root_of({"weights": "of this test"})
PLACES = (2, 3)


@dataclass
class Head:
    """What a store has told."""

    heard: Queue[Holds | Catalogue] = field(default_factory=Queue)

    def next(self, tier: str, seconds: float = 10.0) -> list[Held]:
        message = self.heard.get(timeout=seconds)
        assert isinstance(message, Holds) and message.tier == tier
        return list(message.blocks)

    def catalogue(self) -> Catalogue:
        message = self.heard.get(timeout=10)
        assert isinstance(message, Catalogue)
        return message

    def hears_nothing(self) -> bool:
        try:
            self.heard.get(timeout=0.05)
        except Empty:
            return True
        return False


def spec(folder: Path | None, floor_bytes: int = 0) -> CacheSpec:
    return CacheSpec(ROOT, 32, str(folder) if folder else None, floor_bytes)


def opened(folder: Path | None, floor_bytes: int = 0, places: Sequence[int] = PLACES) -> tuple[Store, Head]:
    head = Head()
    return Store(spec(folder, floor_bytes), places, head.heard.put), head


def block(number: int, parent: BlockId = ROOT) -> BlockEntry:
    tokens = pack([number] * 32)
    return BlockEntry(name(parent, tokens), parent, tokens, 0)


def slab(number: int, restorable: bool = True, places: Sequence[int] = PLACES) -> Slab:
    array = mx.full((1, 2, 32, 4), number, mx.float32)
    mx.eval(array)
    parts = tuple(Part(name, "F32", array) for name in "kv")
    return Slab(tuple(Piece(place, parts) for place in places), restorable)


def keep(store: Store, *numbers: int) -> list[BlockEntry]:
    store.keep((block(number).id, slab(number)) for number in numbers)
    return [block(number) for number in numbers]


def value(found: Slab | None) -> float:
    assert found is not None and [piece.place for piece in found.pieces] == list(PLACES)
    (number,) = {float(part.value[0, 1, 31, 3].item()) for piece in found.pieces for part in piece.parts}
    return number


def spilled(store: Store, head: Head, *numbers: int) -> list[BlockEntry]:
    """Kept, and written."""
    entries = keep(store, *numbers)
    head.next("hot")
    store.ask(Spill(tuple(entries)))
    for entry in entries:
        (held,) = head.next("cold")
        assert held.id == entry.id and held.bytes > 0
    return entries


def evict(store: Store, head: Head, *entries: BlockEntry) -> None:
    """The head is told, for a fetch may overtake the plan that says so."""
    ids = tuple(entry.id for entry in entries)
    store.evict(ids)
    assert head.heard.get(timeout=10) == Holds("hot", tuple(Held(id, 0) for id in ids), evicted=True)


def path_of(folder: Path, entry: BlockEntry) -> Path:
    (path,) = folder.rglob(f"{entry.id.hex()}.safetensors")
    return path


def test_what_is_kept_is_told_can_be_taken_and_goes_when_it_is_evicted() -> None:
    store, head = opened(None)
    one, two = keep(store, 1, 2)
    assert head.next("hot") == [Held(entry.id, slab(0).nbytes, True) for entry in (one, two)]
    assert value(store.take(one.id)) == 1
    evict(store, head, one, block(9))
    assert store.take(one.id) is None and value(store.take(two.id)) == 2
    assert head.hears_nothing()


def test_a_block_that_is_there_stays_unless_the_new_one_is_good_for_more() -> None:
    """A prompt ended where another one only passed: its snapshot was thrown away."""
    store, head = opened(None)
    id = block(1).id
    for number, restorable in ((1, False), (2, False), (3, True), (4, True), (5, False)):
        store.keep([(id, slab(number, restorable))])
    assert [head.next("hot")[0].restorable for _ in range(5)] == [False, False, True, True, True]
    assert value(store.take(id)) == 3


def test_a_stage_without_any_caches_holds_a_byte_of_every_block(tmp_path: Path) -> None:
    """0 bytes would say that it lacks the block."""
    store, head = opened(tmp_path, places=())
    entry = block(1)
    store.keep([(entry.id, slab(1, places=()))])
    assert head.next("hot") == [Held(entry.id, 1, True)]
    store.ask(Spill((entry,)))
    assert head.next("cold")[0].bytes > 0
    evict(store, head, entry)
    store.ask(Fetch((entry.id,)))
    assert head.next("hot") == [Held(entry.id, 1, True)]


def test_a_block_comes_back_from_the_ssd_as_it_was(tmp_path: Path) -> None:
    store, head = opened(tmp_path)
    one, two = spilled(store, head, 1, 2)
    evict(store, head, one)
    store.ask(Fetch((one.id, two.id)))
    assert head.next("hot") == head_says(one) and head.next("hot") == head_says(two)
    assert value(store.take(one.id)) == 1


def head_says(entry: BlockEntry) -> list[Held]:
    return [Held(entry.id, slab(0).nbytes, True)]


def test_only_reading_is_measured(tmp_path: Path) -> None:
    store, head = opened(tmp_path)
    one, two = spilled(store, head, 1, 2)
    evict(store, head, one)
    store.ask(Fetch((one.id, two.id)))
    times = [head.heard.get(timeout=10) for _ in range(2)]
    assert [isinstance(message, Holds) and message.seconds > 0 for message in times] == [True, False]


def test_a_restart_tells_what_is_on_the_ssd_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, head = opened(tmp_path)
    parent = spilled(store, head, 1)[0]
    child = BlockEntry(name(parent.id, parent.tokens), parent.id, parent.tokens, 32)
    store.keep([(child.id, slab(7, restorable=False))])
    head.next("hot")
    store.ask(Spill((child,)))
    (written,) = head.next("cold")
    assert not written.restorable
    monkeypatch.setattr(store_module, "LISTED", 1)
    again, head = opened(tmp_path)
    again.tell_catalogue()
    first, second = head.catalogue(), head.catalogue()
    assert first.entries == (parent,) and second.entries == (child,) and LISTED > 1
    assert second.held == (written,) and head.hears_nothing()
    again.ask(Fetch((child.id, parent.id)))
    assert [head.next("hot")[0].restorable for _ in range(2)] == [False, True]
    assert value(again.take(child.id)) == 7


def test_an_empty_ssd_is_told_by_nothing(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        store, head = opened(folder)
        store.tell_catalogue()
        assert head.hears_nothing()


def test_a_purged_block_leaves_the_ssd_and_stays_in_memory(tmp_path: Path) -> None:
    store, head = opened(tmp_path)
    one, two = spilled(store, head, 1, 2)
    store.ask(Purge((one.id, block(9).id)))
    assert head.next("cold") == [Held(one.id, 0)] and head.next("cold") == [Held(block(9).id, 0)]
    assert [path.stem for path in tmp_path.rglob("*.safetensors")] == [two.id.hex()]
    assert value(store.take(one.id)) == 1


def test_without_an_ssd_every_request_is_answered_at_once() -> None:
    store, head = opened(None)
    (entry,) = keep(store, 1)
    head.next("hot")
    store.ask(Fetch((entry.id, block(2).id)))
    assert head.next("hot") == [*head_says(entry), Held(block(2).id, 0)]
    store.ask(Spill((entry,)))
    assert head.next("cold") == [Held(entry.id, 0)]
    store.ask(Purge((entry.id,)))
    assert head.next("cold") == [Held(entry.id, 0)]


def test_what_was_written_before_is_not_written_again(tmp_path: Path) -> None:
    """Another stage had failed to: all were asked again, and one that had evicted it said it was gone."""
    store, head = opened(tmp_path)
    (entry,) = spilled(store, head, 1)
    before = path_of(tmp_path, entry).stat().st_ino
    store.ask(Spill((entry,)))
    (held,) = head.next("cold")
    evict(store, head, entry)
    store.ask(Spill((entry,)))
    assert head.next("cold") == [held] and held.bytes > 0
    assert path_of(tmp_path, entry).stat().st_ino == before


def test_a_better_block_replaces_the_one_on_the_ssd(tmp_path: Path) -> None:
    store, head = opened(tmp_path)
    entry = block(1)
    for restorable in (False, True):
        store.keep([(entry.id, slab(1, restorable))])
        head.next("hot")
        store.ask(Spill((entry,)))
        assert head.next("cold")[0].restorable is restorable


def test_a_block_that_is_gone_is_not_written(tmp_path: Path) -> None:
    store, head = opened(tmp_path)
    store.ask(Spill((block(1),)))
    assert head.next("cold") == [Held(block(1).id, 0)]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 3000)])
def test_a_damaged_or_missing_file_is_answered_and_forgotten(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, head = opened(tmp_path)
    one, two = spilled(store, head, 1, 2)
    evict(store, head, one, two)
    damage(path_of(tmp_path, one))
    store.ask(Fetch((one.id, two.id)))
    assert head.next("cold") == [Held(one.id, 0)] and head.next("hot") == [Held(one.id, 0)]
    assert head.next("hot") == head_says(two)


def test_a_full_disk_takes_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, head = opened(tmp_path, floor_bytes=10**6)
    now, free = [1000.0], [10**6 + 10]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage._replace(free=free[0]))
    one, two = keep(store, 1, 2)
    head.next("hot")
    store.ask(Spill((one, two)))
    assert head.next("cold") == [Held(one.id, 0)] and head.next("cold") == [Held(two.id, 0)]
    free[0] = 10**9
    store.ask(Spill((one,)))
    assert head.next("cold") == [Held(one.id, 0)], "it is not asked again so soon"
    now[0] += ROOM_AGAIN_S + 1
    store.ask(Spill((one,)))
    assert head.next("cold")[0].bytes > 0


def test_a_folder_that_vanishes_is_answered(tmp_path: Path) -> None:
    store, head = opened(tmp_path / "cache")
    (one,) = spilled(store, head, 1)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("in the way")
    evict(store, head, one)
    store.ask(Fetch((one.id,)))
    assert head.next("cold") == [Held(one.id, 0)] and head.next("hot") == [Held(one.id, 0)]
    (three,) = keep(store, 3)
    head.next("hot")
    store.ask(Spill((three,)))
    assert head.next("cold") == [Held(three.id, 0)]


def test_what_finds_no_room_in_a_queue_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, head = opened(tmp_path)
    one, two = spilled(store, head, 1, 2)
    there = Held(two.id, path_of(tmp_path, two).stat().st_size, True)
    evict(store, head, one)
    busy, go_on = threading.Semaphore(0), threading.Event()

    def wait(*_: object) -> None:
        busy.release()
        assert go_on.wait(10)
        raise OSError("a very slow disk")

    monkeypatch.setattr(Shelf, "gather", wait)
    monkeypatch.setattr(Shelf, "store", wait)
    three = keep(store, 3)[0]
    head.next("hot")
    for message in (Fetch((one.id,)), Spill((three,))):
        store.ask(message)
        assert busy.acquire(timeout=10)
        for _ in range(WAITING):
            store.ask(message)
    assert head.hears_nothing()
    store.ask(Fetch((one.id, two.id)))
    assert head.next("hot") == [Held(one.id, 0), *head_says(two)]
    store.ask(Spill((block(4),)))
    store.ask(Purge((there.id,)))
    assert head.next("cold") == [Held(block(4).id, 0)] and head.next("cold") == [there]
    go_on.set()
    told = [head.heard.get(timeout=10) for _ in range(3 * (WAITING + 1))]
    assert sum(isinstance(message, Holds) and message.tier == "cold" for message in told) == 2 * (WAITING + 1)
    assert head.hears_nothing()
