"""A span's blocks on disk: after a kill, damage or another split, what is found is right or is not found."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.cache.block_file import BadBlock, line_text
from omlx.cache.shelf import LEFT_OVER, MANIFEST, Shelf, Span, cover, stored
from omlx.ids import BlockId
from tests.cache.block_samples import any_user, content, layers, made_of, new_chain, new_id, new_label

ROOT = BlockId(bytes(range(16)))


def span_folder(dir: Path, first: int = 0, last: int = 4) -> Path:
    return dir / ROOT.hex() / f"{first}-{last}"


def open_shelf(dir: Path, first: int = 0, last: int = 4) -> Shelf:
    return Shelf.open(dir, ROOT, first, last)


def block_path(dir: Path, id: BlockId, first: int = 0, last: int = 4) -> Path:
    return span_folder(dir, first, last) / id.hex()[:2] / f"{id.hex()}.safetensors"


def files(dir: Path) -> set[Path]:
    return {path for path in dir.rglob("*") if path.is_file() and path.name != MANIFEST}


def no_file_without_a_line(dir: Path, shelf: Shelf, first: int = 0, last: int = 4) -> None:
    assert files(span_folder(dir, first, last)) == {block_path(dir, id, first, last) for id in shelf.lines}


# ------------------------------------------------------------------ as it was


def test_blocks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    chain = new_chain(5)
    written = {label.id: layers(0, 4) for label in chain}
    lines = {label.id: shelf.store(label, written[label.id]) for label in chain}
    again = open_shelf(tmp_path)
    assert again.lines == shelf.lines == lines
    for label in chain:
        line = again.lines[label.id]
        assert (line.parent, line.tokens, line.start) == (label.parent, label.tokens, label.start)
        assert content(again.load(label.id)) == content(shelf.load(label.id)) == content(written[label.id])
    no_file_without_a_line(tmp_path, again)


def test_what_was_removed_does_not_come_back(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    one, two = (shelf.store(new_label(), layers(0, 4)) for _ in range(2))
    shelf.remove(one.id)
    shelf.remove(one.id)
    for opened in (shelf, open_shelf(tmp_path)):
        assert dict(opened.lines) == {two.id: two}
        with pytest.raises(BadBlock):
            opened.load(one.id)


def test_a_block_stored_twice_is_the_later_one(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    label = new_label()
    shelf.store(label, layers(0, 4))
    later = layers(0, 4, size=30)
    shelf.store(label, later)
    for opened in (shelf, open_shelf(tmp_path)):
        assert content(opened.load(label.id)) == content(later)


def test_the_catalogue_names_parents_before_children_in_whatever_order_they_were_stored(
    tmp_path: Path,
) -> None:
    shelf = open_shelf(tmp_path)
    chain = new_chain(6)
    for label in reversed(chain):
        shelf.store(label, layers(0, 4))
    ids = [label.id for label in chain]
    assert [line.id for line in shelf.catalogue()] == ids
    assert [line.id for line in open_shelf(tmp_path).catalogue()] == ids


def test_loading_a_block_tells_that_it_was_used(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    line = shelf.store(new_label(), layers(0, 4))
    os.utime(block_path(tmp_path, line.id), (1000, 1000))
    shelf.load(line.id)
    (file,) = stored(span_folder(tmp_path))
    assert file.used_at > 1000


def test_a_manifest_that_is_mostly_dead_is_written_anew(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    kept = shelf.store(new_label(), layers(0, 4))
    dead = b"".join(line_text(kept) for _ in range(1000))
    manifest = span_folder(tmp_path) / MANIFEST
    manifest.write_bytes(manifest.read_bytes() + dead)
    assert open_shelf(tmp_path).lines == {kept.id: kept}
    assert manifest.read_bytes() == line_text(kept)
    assert open_shelf(tmp_path).lines == {kept.id: kept}


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    open_shelf(tmp_path / "cache").store(new_label(), layers(0, 4))
    made = list((tmp_path / "cache" / ROOT.hex()).rglob("*"))
    assert any(path.suffix == ".safetensors" for path in made)
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_the_folder_may_be_deleted_under_a_running_shelf(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    lost = shelf.store(new_label(), layers(0, 4))
    shutil.rmtree(tmp_path / ROOT.hex())
    with pytest.raises(BadBlock):
        shelf.load(lost.id)
    line = shelf.store(new_label(), layers(0, 4))
    assert open_shelf(tmp_path).lines == {line.id: line}


# ------------------------------------------------------------------ damage (KV-03)


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-9] ^= 4
    path.write_bytes(whole)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "cut to 0": cut(lambda size: 0),
    "cut to 1": cut(lambda size: 1),
    "cut to half": cut(lambda size: size // 2),
    "cut by 1": cut(lambda size: size - 1),
    "a flipped bit": flip,
    "deleted": Path.unlink,
    "a folder in its place": replace_by_folder,
}


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_block_is_gone_and_the_others_are_not(
    tmp_path: Path, damage: Callable[[Path], None], restarted: bool
) -> None:
    shelf = open_shelf(tmp_path)
    written = {}
    chain = new_chain(3)
    for label in chain:
        written[label.id] = layers(0, 4)
        shelf.store(label, written[label.id])
    bad = chain[1].id
    damage(block_path(tmp_path, bad))
    if restarted:
        shelf = open_shelf(tmp_path)
    for _ in range(2):
        with pytest.raises(BadBlock):
            shelf.load(bad)
    assert not block_path(tmp_path, bad).is_file()
    assert set(shelf.lines) == {chain[0].id, chain[2].id}
    for id in shelf.lines:
        assert content(shelf.load(id)) == content(written[id])
    assert set(open_shelf(tmp_path).lines) == set(shelf.lines)


def test_two_block_files_that_were_swapped_are_noticed(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    one, two = (shelf.store(new_label(), layers(0, 4)) for _ in range(2))
    ours, theirs, aside = block_path(tmp_path, one.id), block_path(tmp_path, two.id), tmp_path / "aside"
    ours.rename(aside)
    theirs.rename(ours)
    aside.rename(theirs)
    again = open_shelf(tmp_path)
    for line in (one, two):
        with pytest.raises(BadBlock):
            again.load(line.id)
    assert not again.lines
    assert not files(span_folder(tmp_path))


def test_a_block_that_may_not_be_read_is_forgotten(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    line = shelf.store(new_label(), layers(0, 4))
    block_path(tmp_path, line.id).chmod(0)
    with any_user(tmp_path):
        block_path(tmp_path, line.id).parent.chmod(0o500)  # nor may it be deleted
        with pytest.raises(BadBlock):
            shelf.load(line.id)
        assert line.id not in shelf.lines
        block_path(tmp_path, line.id).parent.chmod(0o700)
        opened = open_shelf(tmp_path)
        with pytest.raises(BadBlock):
            opened.load(line.id)
    assert not files(span_folder(tmp_path))


def test_a_read_error_is_the_callers_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, views: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    shelf = open_shelf(tmp_path)
    line = shelf.store(new_label(), layers(0, 4))
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", broken)
        with pytest.raises(OSError, match="Input/output"):
            shelf.load(line.id)
    assert shelf.load(line.id)


@pytest.mark.parametrize("text", [b"", bytes(500), b"\n\n{}\n[1,2\n", os.urandom(300)])
def test_without_its_manifest_a_span_is_empty_and_takes_no_room(tmp_path: Path, text: bytes) -> None:
    shelf = open_shelf(tmp_path)
    shelf.store(new_label(), layers(0, 4))
    (span_folder(tmp_path) / MANIFEST).write_bytes(text)
    again = open_shelf(tmp_path)
    assert not again.lines
    assert not files(span_folder(tmp_path))
    line = again.store(new_label(), layers(0, 4))
    assert open_shelf(tmp_path).lines == {line.id: line}


def test_a_manifest_that_may_not_be_read_is_begun_anew(tmp_path: Path) -> None:
    open_shelf(tmp_path).store(new_label(), layers(0, 4))
    (span_folder(tmp_path) / MANIFEST).chmod(0)
    with any_user(tmp_path):
        shelf = open_shelf(tmp_path)
        assert not shelf.lines
        line = shelf.store(new_label(), layers(0, 4))
        assert open_shelf(tmp_path).lines == {line.id: line}


@given(place=st.integers(0, 100_000))
@hypothesis_settings(max_examples=20, deadline=None)
def test_a_manifest_torn_anywhere_keeps_the_lines_before_it_and_takes_new_ones(
    tmp_path_factory: pytest.TempPathFactory, place: int
) -> None:
    dir = tmp_path_factory.mktemp("torn")
    shelf = open_shelf(dir)
    lines = [shelf.store(new_label(), layers(0, 1)) for _ in range(3)]
    manifest = span_folder(dir) / MANIFEST
    ends = [sum(len(line_text(line)) for line in lines[: count + 1]) for count in range(3)]
    torn_at = place % (ends[-1] + 1)
    os.truncate(manifest, torn_at)
    again = open_shelf(dir)
    assert set(again.lines) == {line.id for line, end in zip(lines, ends, strict=True) if end <= torn_at}
    new = again.store(new_label(), layers(0, 1))
    last = open_shelf(dir)
    assert last.lines == again.lines and new.id in last.lines
    no_file_without_a_line(dir, last)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    line = shelf.store(new_label(), layers(0, 4))
    fan = block_path(tmp_path, line.id).parent
    theirs = [
        tmp_path / "notes.txt",
        tmp_path / ROOT.hex() / "0-four" / "x.safetensors",
        span_folder(tmp_path) / "model.safetensors",
        span_folder(tmp_path) / ".hidden.part",
        fan / "model.safetensors",
        fan / f"{new_id().hex()}.safetensors.bak",
        fan / f"{'0' if fan.name[0] != '0' else '1'}{line.id.hex()[1:]}.safetensors",
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    linked = fan / f"{fan.name}{'0' * 30}.safetensors"
    linked.symlink_to(tmp_path / "notes.txt")
    again = open_shelf(tmp_path)
    assert again.lines == {line.id: line}
    assert all(path.read_text() == "mine" for path in [*theirs, linked])


# ------------------------------------------------------------------ crashes


class Killed(BaseException):
    """Nothing in the process runs after it."""


def test_a_kill_between_any_two_system_calls_leaves_a_whole_block_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        "open": os.open,
        "writev": os.writev,
        "fsync": os.fsync,
        "replace": os.replace,
        "write": os.write,
    }
    seen = 0
    while True:
        dir = tmp_path / str(seen)
        shelf = open_shelf(dir)
        kept, some = new_label(), layers(0, 4)
        shelf.store(kept, some)
        left = seen

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def go(*args: object, **kwargs: object) -> object:
                nonlocal left
                if not left:
                    raise Killed
                left -= 1
                return call(*args, **kwargs)

            return go

        new = new_label()
        with monkeypatch.context() as patch:
            for name, call in calls.items():
                patch.setattr(os, name, counted(call))
            try:
                shelf.store(new, some)
                killed = False
            except Killed:
                killed = True
        again = open_shelf(dir)
        assert set(again.lines) == ({kept.id} if killed else {kept.id, new.id})
        assert all(content(again.load(id)) == content(some) for id in again.lines)
        no_file_without_a_line(dir, again)
        if not killed:
            break
        seen += 1
    assert seen == 6


@pytest.mark.parametrize("call", ["writev", "fsync", "write"])
def test_a_disk_that_is_full_at_any_moment_costs_that_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    shelf = open_shelf(tmp_path)
    kept = shelf.store(new_label(), layers(0, 4))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            shelf.store(new_label(), layers(0, 4))
    no_file_without_a_line(tmp_path, shelf)
    later = shelf.store(new_label(), layers(0, 4))
    assert open_shelf(tmp_path).lines == shelf.lines == {kept.id: kept, later.id: later}


def test_a_line_of_which_the_full_disk_took_one_half_is_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = open_shelf(tmp_path)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, text: write(file, text[: len(text) // 2]))
        with pytest.raises(OSError, match="not written whole"):
            shelf.store(new_label(), layers(0, 4))
    later = shelf.store(new_label(), layers(0, 4))
    again = open_shelf(tmp_path)
    assert again.lines == shelf.lines == {later.id: later}
    no_file_without_a_line(tmp_path, again)


def test_after_kill_9_in_the_middle_of_storing_every_block_found_is_right_and_all_that_were_told_are_found(
    tmp_path: Path,
) -> None:
    told: set[BlockId] = set()
    command = (
        f"import sys; sys.path[:0] = {sys.path!r}; from tests.cache.block_samples import store_for_ever; "
        f"from pathlib import Path; store_for_ever(Path({str(tmp_path)!r}), {ROOT!r})"
    )
    for round in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", command],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout
        for _ in range(1 + round % 4):
            told.add(BlockId(bytes.fromhex(child.stdout.readline())))
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:
            if line.endswith("\n"):
                told.add(BlockId(bytes.fromhex(line)))
        child.stdout.close()
        child.wait()
        shelf = open_shelf(tmp_path)
        assert told <= set(shelf.lines)
        assert len(shelf.lines) <= len(told) + round + 1
        for id in shelf.lines:
            assert content(shelf.load(id)) == content(made_of(id))
        no_file_without_a_line(tmp_path, shelf)
        assert not [path for path in tmp_path.rglob("*") if LEFT_OVER.fullmatch(path.name)]


# ------------------------------------------------------------------ several spans


def test_two_spans_are_written_side_by_side(tmp_path: Path) -> None:
    shelves = [open_shelf(tmp_path, 0, 2), open_shelf(tmp_path, 2, 4)]
    for label in new_chain(4):
        for first, shelf in zip((0, 2), shelves, strict=True):
            shelf.store(label, layers(first, first + 2))
    for first, shelf in zip((0, 2), shelves, strict=True):
        again = open_shelf(tmp_path, first, first + 2)
        assert again.lines == shelf.lines
        assert len(again.catalogue()) == 4


def test_opening_one_span_leaves_anothers_files_alone(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path, 0, 2)
    label = new_label()
    path = block_path(tmp_path, label.id, 0, 2)
    path.parent.mkdir()
    path.write_text("its line comes in a moment")
    beside = path.with_name(f".{path.name}.1.part")
    beside.write_text("being written")
    open_shelf(tmp_path, 2, 4)
    open_shelf(tmp_path, 0, 4)
    assert path.exists() and beside.exists()
    assert not shelf.lines


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(0, 6)], [(0, 3), (3, 6)]),
        ([(0, 3), (3, 6)], [(0, 2), (2, 4), (4, 6)]),
        ([(0, 2), (2, 4), (4, 6)], [(0, 6)]),
        ([(0, 4), (4, 6)], [(0, 1), (1, 5), (5, 6)]),
    ],
)
def test_another_split_finds_what_the_former_one_stored(
    tmp_path: Path, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    chain = new_chain(3)
    written = {label.id: layers(0, 6) for label in chain}
    for first, last in before:
        shelf = open_shelf(tmp_path, first, last)
        for label in chain:
            shelf.store(label, written[label.id][2 * first : 2 * last])
    for first, last in after:
        shelf = open_shelf(tmp_path, first, last)
        assert [line.id for line in shelf.catalogue()] == [label.id for label in chain]
        assert all(line.restorable for line in shelf.catalogue())
        for label in chain:
            found = shelf.gather(label.id, range(first, last))
            assert content(found) == content(written[label.id][2 * first : 2 * last])
        assert content(shelf.gather(chain[0].id, [last - 1])) == content(
            written[chain[0].id][2 * last - 2 : 2 * last]
        )


def test_a_block_of_which_a_layer_is_nowhere_is_not_in_the_catalogue(tmp_path: Path) -> None:
    whole, half = new_label(), new_label()
    for first, last in ((0, 2), (2, 4)):
        open_shelf(tmp_path, first, last).store(whole, layers(first, last))
    open_shelf(tmp_path, 0, 2).store(half, layers(0, 2))
    shelf = open_shelf(tmp_path, 0, 4)
    assert [line.id for line in shelf.catalogue()] == [whole.id]
    with pytest.raises(BadBlock):
        shelf.gather(half.id, range(4))
    assert len(shelf.gather(half.id, range(2))) == 4


def test_what_is_gathered_is_restorable_only_if_every_file_is(tmp_path: Path) -> None:
    chain = new_chain(1)
    label = chain[0]
    bare = new_label(restorable=False)
    same = replace(label, restorable=False)
    sizes = [
        open_shelf(tmp_path, 0, 2).store(label, layers(0, 2)).bytes,
        open_shelf(tmp_path, 2, 4).store(same, layers(2, 4)).bytes,
    ]
    open_shelf(tmp_path, 0, 4).store(bare, layers(0, 4))
    found = {line.id: line for line in open_shelf(tmp_path, 0, 4).catalogue()}
    assert not found[label.id].restorable and found[label.id].bytes == sum(sizes)
    assert not found[bare.id].restorable
    open_shelf(tmp_path, 2, 4).store(label, layers(2, 4))
    assert {line.id: line for line in open_shelf(tmp_path, 0, 4).catalogue()}[label.id].restorable


def test_restorable_files_of_other_spans_go_before_an_own_one_that_is_not(tmp_path: Path) -> None:
    label = new_label()
    bare = replace(label, restorable=False)
    full = layers(0, 4)
    open_shelf(tmp_path, 0, 4).store(label, full)
    open_shelf(tmp_path, 0, 2).store(bare, full[:1])
    shelf = open_shelf(tmp_path, 0, 2)
    assert [line.restorable for line in shelf.catalogue()] == [True]
    assert content(shelf.gather(label.id, range(2))) == content(full[:4])


def test_a_damaged_file_of_another_span_is_deleted_too(tmp_path: Path) -> None:
    line = open_shelf(tmp_path, 0, 4).store(new_label(), layers(0, 4))
    flip(block_path(tmp_path, line.id))
    shelf = open_shelf(tmp_path, 0, 2)
    assert [line.id for line in shelf.catalogue()] == [line.id]
    with pytest.raises(BadBlock):
        shelf.gather(line.id, range(2))
    assert not shelf.catalogue()
    assert not block_path(tmp_path, line.id).exists()


@given(
    layers=st.sets(st.integers(0, 9)),
    offers=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6),
)
def test_a_cover_holds_all_layers_if_the_offers_do(layers: set[int], offers: list[tuple[int, int]]) -> None:
    spans = [Span(Path(), first, first + length) for first, length in offers]
    taken = cover(layers, spans)
    together = {layer for span in spans for layer in span.layers}
    assert (taken is None) == (not layers <= together)
    if taken is not None:
        assert layers <= {layer for span in taken for layer in span.layers}
        assert all(layers.intersection(span.layers) for span in taken)
