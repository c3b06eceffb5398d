"""The cache folder: one server's, never above its budget, and nobody's things but ours are touched."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.cache.block_file import Label, Line
from omlx.cache.folder import VERSION, Folder, clear, trim, usage, verify
from omlx.cache.shelf import MANIFEST, Shelf
from omlx.errors import BadSetting
from omlx.ids import BlockId
from tests.cache.block_samples import any_user, layers, new_chain, new_id, new_label

BLOCK_BYTES = 20_000
MUCH = 10**12


def fill(dir: Path, root: BlockId, labels: list[Label], used_at: int, spans: int = 1) -> list[Line]:
    """Blocks of some 20 kB in each of so many spans; the first was used at `used_at`, each next 1 s later."""
    lines = []
    for first in range(spans):
        shelf = Shelf.open(dir, root, first, first + 1)
        for number, label in enumerate(labels):
            lines.append(shelf.store(label, layers(first, first + 1, BLOCK_BYTES // 4)))
            os.utime(block_path(dir, root, label.id, first), (used_at + number, used_at + number))
    return lines


def block_path(dir: Path, root: BlockId, id: BlockId, first: int = 0) -> Path:
    folder = dir / root.hex() / f"{first}-{first + 1}"
    return folder / id.hex()[:2] / f"{id.hex()}.safetensors"


def blocks(count: int) -> list[Label]:
    """Not of one chain."""
    return [new_label() for _ in range(count)]


def ids(labels: list[Label]) -> list[BlockId]:
    return [label.id for label in labels]


def left(dir: Path, root: BlockId) -> set[BlockId]:
    return {BlockId(bytes.fromhex(path.stem)) for path in (dir / root.hex()).rglob("*.safetensors")}


def disk_bytes(dir: Path) -> int:
    return sum(path.stat().st_size for path in dir.rglob("*") if path.is_file())


# ------------------------------------------------------------------ lock and version


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with closing(Folder.open(path)):
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "VERSION").read_text() == f"{VERSION}\n"


def test_a_folder_of_another_process_is_refused_by_its_pid_until_that_one_ends(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from omlx.cache.folder import Folder; "
        f"from pathlib import Path; folder = Folder.open(Path({str(tmp_path)!r})); "
        "print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdin
    assert holder.stdout.readline() == b"open\n"
    with pytest.raises(BadSetting, match=f"in use by process {holder.pid}; .*--paged-ssd-cache-dir"):
        Folder.open(tmp_path)
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    Folder.open(tmp_path).close()


def test_a_folder_can_be_opened_again_after_it_was_closed(tmp_path: Path) -> None:
    for _ in range(2):
        folder = Folder.open(tmp_path)
        with pytest.raises(BadSetting, match=f"process {os.getpid()}"):
            Folder.open(tmp_path)
        folder.close()


def test_a_folder_that_cannot_be_made_or_written_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(BadSetting, match=r"cannot be written \(.*\); give another .*--no-cache"):
            Folder.open(path)
    locked = tmp_path / "locked"
    locked.mkdir()
    with any_user(tmp_path):
        locked.chmod(0o500)
        with pytest.raises(BadSetting, match="Permission denied"):
            Folder.open(locked)
        locked.chmod(0o700)


def test_a_folder_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    root = new_id()
    fill(tmp_path, root, blocks(1), 1000)
    (tmp_path / "VERSION").write_text(f"{VERSION + 1}\n")
    with pytest.raises(BadSetting) as refused:
        Folder.open(tmp_path)
    assert str(refused.value) == (
        f"cache folder {tmp_path} was made by a newer oMLX (version {VERSION + 1}); "
        "give another --paged-ssd-cache-dir, or --no-cache"
    )
    assert len(left(tmp_path, root)) == 1
    (tmp_path / "VERSION").write_text(f"{VERSION}\n")
    Folder.open(tmp_path).close()
    assert len(left(tmp_path, root)) == 1


@pytest.mark.parametrize("version", [None, "0\n", "", "\0\0\0", "one"])
def test_a_folder_of_an_older_or_unknown_version_is_cleared_of_what_is_ours(
    tmp_path: Path, version: str | None
) -> None:
    root = new_id()
    fill(tmp_path, root, blocks(2), 1000)
    (tmp_path / "notes.txt").write_text("mine")
    if version is not None:
        (tmp_path / "VERSION").write_text(version)
    with closing(Folder.open(tmp_path)):
        assert not (tmp_path / root.hex()).exists()
        assert {path.name for path in tmp_path.iterdir()} == {"VERSION", "lock", "notes.txt"}
        assert (tmp_path / "VERSION").read_text() == f"{VERSION}\n"


# ------------------------------------------------------------------ usage


def test_usage_counts_files_and_manifests_by_model_and_names_those_that_were_described(
    tmp_path: Path,
) -> None:
    with closing(Folder.open(tmp_path)) as folder:
        older, newer = new_id(), new_id()
        fill(tmp_path, older, blocks(3), 1000)
        fill(tmp_path, newer, blocks(2), 5000, spans=2)
        folder.describe(newer, "Qwen/Qwen3-8B", {"kv": "bf16"})
        found = usage(tmp_path)
    assert [(model.root, model.name, model.blocks, model.used_at) for model in found] == [
        (newer, "Qwen/Qwen3-8B", 2, 5001.0),
        (older, None, 3, 1002.0),
    ]
    for model in found:
        (tmp_path / model.root.hex() / "model.json").unlink(missing_ok=True)
        assert model.bytes == disk_bytes(tmp_path / model.root.hex())


def test_foreign_files_are_not_counted(tmp_path: Path) -> None:
    root = new_id()
    lines = fill(tmp_path, root, blocks(2), 1000)
    before = usage(tmp_path)
    fan = block_path(tmp_path, root, lines[0].id).parent
    for path in (
        tmp_path / "big",
        tmp_path / root.hex() / "big",
        fan.parent / "big",
        fan / "big.safetensors",
    ):
        path.write_bytes(bytes(1_000_000))
    (tmp_path / "models").mkdir()
    assert usage(tmp_path) == before
    trim(tmp_path, 0, 0, ())
    assert disk_bytes(tmp_path) == 4_000_000
    assert usage(tmp_path / "no such folder") == []


# ------------------------------------------------------------------ budget (KV-08)


def test_within_the_budget_nothing_goes(tmp_path: Path) -> None:
    root = new_id()
    lines = fill(tmp_path, root, blocks(3), 1000)
    trimmed = trim(tmp_path, disk_bytes(tmp_path), 0, ())
    assert (trimmed.bytes, trimmed.gone) == (0, {})
    assert len(left(tmp_path, root)) == len(lines)


def test_a_model_that_is_not_loaded_gives_its_oldest_blocks_first(tmp_path: Path) -> None:
    loaded, other = new_id(), new_id()
    ours, theirs = blocks(3), blocks(3)
    fill(tmp_path, loaded, ours, 1000)
    fill(tmp_path, other, theirs, 5000)
    trimmed = trim(tmp_path, disk_bytes(tmp_path) - BLOCK_BYTES * 3 // 2, 0, {loaded})
    assert trimmed.gone == {other: tuple(ids(theirs)[:2])}
    assert trimmed.bytes > 2 * BLOCK_BYTES
    assert left(tmp_path, loaded) == set(ids(ours)) and left(tmp_path, other) == {theirs[2].id}


def test_a_loaded_model_gives_blocks_when_nothing_else_is_left(tmp_path: Path) -> None:
    loaded, other = new_id(), new_id()
    ours, theirs = blocks(3), blocks(2)
    fill(tmp_path, loaded, ours, 1000)
    fill(tmp_path, other, theirs, 5000)
    trimmed = trim(tmp_path, BLOCK_BYTES * 5 // 2, 0, {loaded})
    assert {root: set(gone) for root, gone in trimmed.gone.items()} == {
        other: set(ids(theirs)),
        loaded: {ours[0].id},
    }
    assert not (tmp_path / other.hex()).exists()
    assert disk_bytes(tmp_path) <= BLOCK_BYTES * 5 // 2
    assert set(Shelf.open(tmp_path, loaded, 0, 1).lines) == set(ids(ours)[1:])


def test_a_chain_is_given_up_from_its_end(tmp_path: Path) -> None:
    root = new_id()
    chain, later = new_chain(4), blocks(1)
    fill(tmp_path, root, chain, 1000)
    fill(tmp_path, root, later, 2000)
    trimmed = trim(tmp_path, disk_bytes(tmp_path) - BLOCK_BYTES * 3 // 2, 0, {root})
    assert trimmed.gone == {root: (chain[3].id, chain[2].id)}


def test_the_head_of_a_chain_in_use_outlives_a_chain_that_is_not(tmp_path: Path) -> None:
    root = new_id()
    used, unused = new_chain(3), new_chain(3)
    fill(tmp_path, root, used, 1000)
    fill(tmp_path, root, unused, 2000)
    Shelf.open(tmp_path, root, 0, 1).load(used[2].id)
    trimmed = trim(tmp_path, disk_bytes(tmp_path) - BLOCK_BYTES * 5 // 2, 0, {root})
    assert set(trimmed.gone[root]) == set(ids(unused))


def test_a_block_goes_in_all_spans_at_once(tmp_path: Path) -> None:
    root = new_id()
    labels = blocks(3)
    fill(tmp_path, root, labels, 1000, spans=3)
    trimmed = trim(tmp_path, disk_bytes(tmp_path) - 1, 0, {root})
    assert trimmed.gone == {root: (labels[0].id,)}
    assert trimmed.bytes >= 3 * BLOCK_BYTES
    for first in range(3):
        assert set(Shelf.open(tmp_path, root, first, first + 1).lines) == set(ids(labels)[1:])


def test_what_a_kill_left_of_a_model_that_is_not_loaded_goes_first(tmp_path: Path) -> None:
    root, loaded = new_id(), new_id()
    labels = blocks(2)
    fill(tmp_path, root, labels, 1000)
    without_line = block_path(tmp_path, root, new_id())
    without_line.parent.mkdir(exist_ok=True)
    without_line.write_bytes(bytes(BLOCK_BYTES))
    beside = without_line.with_name(f".{without_line.name}.77.part")
    beside.write_bytes(bytes(BLOCK_BYTES))
    fill(tmp_path, loaded, blocks(1), 500)
    writing = block_path(tmp_path, loaded, new_id())
    writing.parent.mkdir(exist_ok=True)
    writing.with_name(f".{writing.name}.78.part").write_bytes(bytes(100))
    trimmed = trim(tmp_path, disk_bytes(tmp_path) - BLOCK_BYTES * 3 // 2, 0, {loaded})
    assert trimmed.gone == {root: (BlockId(bytes.fromhex(without_line.stem)),)}
    assert not beside.exists()
    assert left(tmp_path, root) == set(ids(labels))
    assert writing.with_name(f".{writing.name}.78.part").exists()


def test_free_space_on_the_volume_is_kept_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = new_id()
    labels = blocks(4)
    fill(tmp_path, root, labels, 1000)
    disk = namedtuple("disk", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk(MUCH, 0, 1_000_000))
    assert not trim(tmp_path, MUCH, 1_000_000, {root}).gone
    assert trim(tmp_path, MUCH, 1_000_000 + BLOCK_BYTES, {root}).gone == {root: (labels[0].id,)}
    assert len(trim(tmp_path, MUCH, 2_000_000, {root}).gone[root]) == 3


def test_a_shelf_whose_files_were_trimmed_says_so_and_stores_them_anew(tmp_path: Path) -> None:
    root = new_id()
    shelf = Shelf.open(tmp_path, root, 0, 1)
    label = new_label()
    shelf.store(label, layers(0, 1))
    trim(tmp_path, 0, 0, {root})
    line = shelf.store(label, layers(0, 1))
    assert shelf.load(label.id)
    assert Shelf.open(tmp_path, root, 0, 1).lines == {label.id: line}


def test_the_blocks_of_a_deleted_model_make_room_for_another_ones(tmp_path: Path) -> None:
    gone_model, model = new_id(), new_id()
    budget = 10 * BLOCK_BYTES
    fill(tmp_path, gone_model, blocks(9), 9000)
    shelf = Shelf.open(tmp_path, model, 0, 1)
    for label in blocks(20):
        shelf.store(label, layers(0, 1, BLOCK_BYTES // 4))
        assert disk_bytes(tmp_path) <= budget + 2 * BLOCK_BYTES
        for id in trim(tmp_path, budget, 0, {model}).gone.get(model, ()):
            shelf.remove(id)
        assert disk_bytes(tmp_path) <= budget
    assert not (tmp_path / gone_model.hex()).exists()
    assert len(shelf.lines) == len(left(tmp_path, model)) >= 8


@hypothesis_settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_trim_frees_enough_and_no_block_more_and_never_a_parent_before_its_child(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    dir = tmp_path_factory.mktemp("trim")
    roots = [new_id() for _ in range(data.draw(st.integers(1, 3)))]
    parents: dict[BlockId, BlockId] = {}
    for root in roots:
        for _ in range(data.draw(st.integers(0, 3))):
            chain = new_chain(data.draw(st.integers(1, 4)))
            fill(dir, root, chain, data.draw(st.integers(1000, 1010)), data.draw(st.integers(1, 2)))
            parents |= {label.id: label.parent for label in chain}
    keep = set(data.draw(st.lists(st.sampled_from(roots))))
    used = disk_bytes(dir)
    budget = data.draw(st.integers(0, used))
    trimmed = trim(dir, budget, 0, keep)
    remaining = {id for root in roots for id in left(dir, root)}
    assert disk_bytes(dir) <= budget or not remaining
    assert used - disk_bytes(dir) == trimmed.bytes
    removed = {id for some in trimmed.gone.values() for id in some}
    assert removed == set(parents) - remaining
    assert not any(parents[id] in removed for id in remaining)
    if any(root in keep for root in trimmed.gone):
        assert not any(left(dir, root) for root in roots if root not in keep)


# ------------------------------------------------------------------ verify and clear


def test_verify_reads_every_block_and_names_the_damaged_ones(tmp_path: Path) -> None:
    roots = [new_id(), new_id()]
    labels = {root: blocks(3) for root in roots}
    for root in roots:
        fill(tmp_path, root, labels[root], 1000, spans=2)
    bad, cut, gone = ids(labels[roots[0]])
    path = block_path(tmp_path, roots[0], bad)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.truncate(block_path(tmp_path, roots[0], cut, 1), 5)
    block_path(tmp_path, roots[0], gone).unlink()
    verdicts = list(verify(tmp_path))
    assert len(verdicts) == 11
    problems = {(verdict.root, verdict.first, verdict.id): verdict.problem for verdict in verdicts}
    found = {where: problem for where, problem in problems.items() if problem}
    assert set(found) == {(roots[0], 0, bad), (roots[0], 1, cut)}
    assert "checksum" in found[(roots[0], 0, bad)]
    assert "has 5 bytes" in found[(roots[0], 1, cut)]
    assert path.exists()
    assert [verdict.problem for verdict in verify(tmp_path, roots[1])] == [None] * 6


def test_clear_takes_one_model_or_all_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    one, two = new_id(), new_id()
    with closing(Folder.open(tmp_path)) as folder:
        for root in (one, two):
            fill(tmp_path, root, blocks(2), 1000)
            folder.describe(root, "a model", {})
        wanted = next(model.bytes for model in usage(tmp_path) if model.root == one)
        assert clear(tmp_path, one) == wanted
        assert not (tmp_path / one.hex()).exists() and len(left(tmp_path, two)) == 2
        note = tmp_path / two.hex() / "0-1" / "note"
        note.write_text("mine")
        clear(tmp_path)
        assert [path for path in (tmp_path / two.hex()).rglob("*") if path.is_file()] == [note]
        assert not usage(tmp_path)[0].blocks
    assert clear(tmp_path, new_id()) == 0


def test_a_manifest_alone_counts_and_is_cleared(tmp_path: Path) -> None:
    root = new_id()
    (line,) = fill(tmp_path, root, blocks(1), 1000)
    block_path(tmp_path, root, line.id).unlink()
    manifest = tmp_path / root.hex() / "0-1" / MANIFEST
    assert usage(tmp_path)[0].bytes == manifest.stat().st_size == clear(tmp_path)
