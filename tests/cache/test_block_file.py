"""One block's file: what is read is what was written, or BadBlock."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omlx.cache.block_file import (
    DTYPE_BYTES,
    BadBlock,
    Buffers,
    Line,
    Tensor,
    line_text,
    parse_lines,
    read_block,
    write_block,
)
from omlx.ids import BlockId
from tests.cache.block_samples import any_user, content, layers, new_label


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    made = []
    for layer in range(draw(st.integers(0, 5))):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        made.append(Tensor(f"{layer}.k", dtype, shape, os.urandom(int(np.prod(shape)) * DTYPE_BYTES[dtype])))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


# ------------------------------------------------------------------ as it was


@hypothesis_settings(deadline=None)
@given(tensors=tensors(), start=st.integers(0, 2**40), restorable=st.booleans())
def test_what_is_read_is_what_was_written(
    folder: Path, tensors: list[Tensor], start: int, restorable: bool
) -> None:
    label = new_label(restorable, start)
    path = folder / "block.safetensors"
    line = write_block(path, label, tensors)
    assert content(read_block(path, line)) == content(tensors)
    assert line.bytes == path.stat().st_size
    assert (line.id, line.parent, line.tokens) == (label.id, label.parent, label.tokens)
    assert (line.start, line.restorable) == (start, restorable)
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_the_safetensors_package_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    odd = Tensor("0.s0", "U8", (3,), b"abc")
    keys = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    label = new_label()
    write_block(path, label, [odd, Tensor("0.k", "F32", keys.shape, memoryview(keys))])
    found = safetensors.numpy.load_file(path)
    assert np.array_equal(found["0.k"], keys)
    assert found["0.s0"].tobytes() == b"abc"
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"id": label.id.hex(), "parent": label.parent.hex(), "start": "256"}


def test_tensors_begin_at_multiples_of_eight_bytes(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    line = write_block(path, new_label(), [Tensor(f"{i}.k", "U8", (i,), bytes(i)) for i in range(1, 20)])
    for tensor in read_block(path, line):
        assert np.frombuffer(tensor.data, np.uint8).ctypes.data % 8 == 0


def test_more_tensors_than_one_write_takes(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    many = [Tensor(f"{i}.k", "U8", (8,), os.urandom(8)) for i in range(3000)]
    assert content(read_block(path, write_block(path, new_label(), many))) == content(many)


def test_writes_that_the_system_cuts_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0][:7]))
    path = tmp_path / "block.safetensors"
    some = layers(0, 3)
    assert content(read_block(path, write_block(path, new_label(), some))) == content(some)


@pytest.mark.parametrize(
    "wrong",
    [
        [Tensor("0.k", "F32", (2,), bytes(7))],
        [Tensor("0.k", "U8", (1,), b"a"), Tensor("0.k", "U8", (1,), b"b")],
    ],
    ids=["too few bytes", "a name twice"],
)
def test_tensors_at_odds_with_themselves_are_not_written(tmp_path: Path, wrong: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"0\.k"):
        write_block(tmp_path / "block.safetensors", new_label(), wrong)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, parts: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        write_block(tmp_path / "block.safetensors", new_label(), layers(0, 2))
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ damage


@hypothesis_settings(deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(folder: Path, data: st.DataObject) -> None:
    path = folder / "flipped.safetensors"
    line = write_block(path, new_label(), layers(0, 2))
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    with pytest.raises(BadBlock):
        read_block(path, line)
    path.unlink()


@pytest.mark.parametrize("size", ["0", "1", "half", "size - 1", "size + 1"])
def test_a_file_of_another_size_is_noticed(tmp_path: Path, size: str) -> None:
    path = tmp_path / "block.safetensors"
    line = write_block(path, new_label(), layers(0, 2))
    sizes = {"0": 0, "1": 1, "half": line.bytes // 2, "size - 1": line.bytes - 1, "size + 1": line.bytes + 1}
    os.truncate(path, sizes[size])
    with pytest.raises(BadBlock, match=f"has {sizes[size]} bytes of {line.bytes}"):
        read_block(path, line)


def test_another_blocks_file_is_noticed_even_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    label, some = new_label(), layers(0, 2)
    theirs = write_block(path, new_label(), some)
    ours = Line(
        id=label.id,
        parent=label.parent,
        tokens=label.tokens,
        start=label.start,
        restorable=True,
        bytes=theirs.bytes,
        checksum=theirs.checksum,
    )
    with pytest.raises(BadBlock, match="another block"):
        read_block(path, ours)


def test_what_is_no_file_of_ours_to_read_is_a_bad_block(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    line = write_block(path, new_label(), layers(0, 2))
    with pytest.raises(BadBlock, match="No such file"):
        read_block(tmp_path / "gone.safetensors", line)
    with pytest.raises(BadBlock):
        read_block(tmp_path, line)
    path.chmod(0)
    with any_user(tmp_path), pytest.raises(BadBlock, match="Permission denied"):
        read_block(path, line)


def test_a_disk_that_fails_is_no_bad_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: int, views: list[memoryview]) -> int:
        raise OSError(5, "Input/output error")

    path = tmp_path / "block.safetensors"
    line = write_block(path, new_label(), layers(0, 2))
    monkeypatch.setattr(os, "readv", broken)
    with pytest.raises(OSError, match="Input/output"):
        read_block(path, line)


# ------------------------------------------------------------------ buffers


def test_a_buffer_is_taken_again_only_when_no_view_of_it_is_left(tmp_path: Path) -> None:
    buffers = Buffers()
    path = tmp_path / "block.safetensors"
    line = write_block(path, new_label(), layers(0, 3))
    held = read_block(path, line, buffers)
    before = content(held)
    for _ in range(5):
        read_block(path, line, buffers)
    again = read_block(path, line, buffers)
    last = again[-1]
    del again
    other = write_block(path, new_label(), layers(0, 3))
    kept = bytes(last.data)
    for _ in range(5):
        read_block(path, other, buffers)
    assert content(held) == before
    assert bytes(last.data) == kept


def test_reads_one_after_the_other_use_the_same_memory() -> None:
    buffers = Buffers()

    def address(size: int) -> int:
        return int(np.frombuffer(buffers.take(size), np.uint8).ctypes.data)

    first = address(5_000_000)
    gc.collect()
    assert address(5_000_000) == first
    assert address(4_000_000) == first


@given(sizes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), max_size=40))
def test_views_held_at_the_same_time_never_share_memory(sizes: list[tuple[int, int]]) -> None:
    buffers, held = Buffers(), []
    for number, (size, drop) in enumerate(sizes):
        view = buffers.take(size)
        assert len(view) == size
        view[:] = bytes([number]) * size
        held.append((number, view))
        del view
        if drop < len(held):
            held.pop(drop)
        assert all(bytes(view) == bytes([number]) * len(view) for number, view in held)


# ------------------------------------------------------------------ lines


def a_line(**changes: object) -> Line:
    fields: dict[str, object] = {
        "id": BlockId(os.urandom(16)),
        "parent": BlockId(os.urandom(16)),
        "tokens": os.urandom(32),
        "start": 512,
        "restorable": False,
        "bytes": 1234,
        "checksum": "ab" * 32,
    }
    return Line(**(fields | changes))  # type: ignore[arg-type]


def test_lines_come_back_as_they_were_and_the_last_one_of_a_block_holds() -> None:
    one, two = a_line(), a_line(tokens=b"", restorable=True)
    later = a_line(id=one.id, bytes=99)
    found = parse_lines(line_text(one) + line_text(two) + line_text(later))
    assert list(found.values()) == [two, later]


@given(cut=st.integers(0, 1000))
def test_a_torn_line_is_left_out_and_the_one_after_it_is_whole(cut: int) -> None:
    one, two, three = a_line(), a_line(), a_line()
    torn = line_text(two)
    torn = torn[: cut % len(torn)]
    assert list(parse_lines(line_text(one) + torn).values()) == [one]
    assert list(parse_lines(line_text(one) + torn + line_text(three)).values()) == [one, three]


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_manifest_never_gives_a_line_that_was_not_written(place: int, bit: int) -> None:
    lines = [a_line() for _ in range(3)]
    text = bytearray(b"".join(line_text(line) for line in lines))
    text[place % len(text)] ^= 1 << bit
    found = list(parse_lines(bytes(text)).values())
    assert len(found) >= 1
    assert all(line in lines for line in found)


@given(text=st.binary(max_size=300))
def test_anything_can_be_parsed_as_a_manifest(text: bytes) -> None:
    assert not parse_lines(text)
