"""What is damaged, of no use or full costs time, never an answer; what is wrong is said in a line."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from omlx.cache.block_file import Line
from tests.walk.chats import BLOCK_TOKENS, BLOCKS, Turn, block_bytes, chain, check, record
from tests.walk.servers import Running, free_port, omlx, serve, wait_until

Tiny = Callable[[str], Path]
Blocks = list[tuple[Path, Line]]
BAD = 5
"""The place of the damaged block in the chat."""
REMOVED = "a cached block is of no use and was removed"


@pytest.fixture(scope="module")
def chat(tiny: Tiny) -> list[Turn]:
    model = tiny("tiny-llama")
    with serve(model, "--no-cache") as running:
        return record(running.url, model.name, 1, 4)


@pytest.fixture(scope="module")
def kept(tiny: Tiny, chat: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with that chat, to be copied."""
    cold = tmp_path_factory.mktemp("kept") / "blocks"
    with serve(tiny("tiny-llama"), "--paged-ssd-cache-dir", str(cold), settings=BLOCKS) as running:
        for turn in chat:
            check(running.url, turn)
        running.interrupt()
    return cold


# ------------------------------------------------------------------ damaged while nobody looked (KV-03)


def cut_to(path: Path, size: int) -> None:
    os.truncate(path, size)


def flip(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def swap(one: Path, other: Path) -> None:
    texts = one.read_bytes(), other.read_bytes()
    other.write_bytes(texts[0])
    one.write_bytes(texts[1])


def hide(path: Path) -> None:
    """What is in its place cannot be read."""
    path.unlink()
    path.symlink_to("/nowhere")


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "cut to nothing": lambda path, next: cut_to(path, 0),
    "cut to a byte": lambda path, next: cut_to(path, 1),
    "cut to half": lambda path, next: cut_to(path, path.stat().st_size // 2),
    "cut by a byte": lambda path, next: cut_to(path, path.stat().st_size - 1),
    "a bit flipped": lambda path, next: flip(path),
    "swapped with the next": swap,
    "deleted": lambda path, next: path.unlink(),
    "unreadable": lambda path, next: hide(path),
    "a folder in its place": lambda path, next: turn_into_a_folder(path),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_computed_again_and_those_before_it_are_used(
    damage: str, tiny: Tiny, chat: list[Turn], kept: Path, tmp_path: Path
) -> None:
    cold = Path(shutil.copytree(kept, tmp_path / "blocks", symlinks=True))
    blocks = chain(cold)
    (path, line), (next, _) = blocks[BAD : BAD + 2]
    assert line.start == BAD * BLOCK_TOKENS
    DAMAGE[damage](path, next)
    with serve(tiny("tiny-llama"), "--paged-ssd-cache-dir", str(cold), settings=BLOCKS) as running:
        found = check(running.url, chat[-1])
        assert found.cached_tokens == line.start
        again = check(running.url, chat[-1])
        assert again.cached_tokens > again.prompt_tokens - BLOCK_TOKENS
        assert running.log().count(path.stem) <= 1, running.log()
        assert "Traceback" not in running.log()
        running.interrupt()
    told = omlx("cache", "verify", "--paged-ssd-cache-dir", str(cold))
    assert told.returncode == 0, told.stdout


@pytest.mark.slow
def test_what_a_killed_writer_left_is_cleared_up_and_an_empty_manifest_is_an_empty_cache(
    tiny: Tiny, chat: list[Turn], kept: Path, tmp_path: Path
) -> None:
    cold = Path(shutil.copytree(kept, tmp_path / "blocks"))
    blocks = chain(cold)
    left = blocks[0][0].with_name(f".{blocks[0][0].name}.4711.part")
    left.write_bytes(blocks[1][0].read_bytes()[:1000])
    span = blocks[0][0].parents[1]
    flags = ("--paged-ssd-cache-dir", str(cold))
    with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
        assert not left.exists()
        assert check(running.url, chat[-1]).cached_tokens > len(blocks) // 2 * BLOCK_TOKENS
    (span / "manifest.jsonl").write_bytes(b"")
    with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
        assert check(running.url, chat[-1]).cached_tokens == 0
        running.interrupt()
    with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
        assert check(running.url, chat[-1]).cached_tokens > 0
    told = omlx("cache", "verify", "--paged-ssd-cache-dir", str(cold))
    assert told.returncode == 0, told.stdout


# ------------------------------------------------------------------ what cannot be used


def refused(model: Path, *flags: str) -> str:
    """The line in which a server says why it does not start."""
    ended = omlx("serve", str(model), "--port", str(free_port()), *flags)
    assert ended.returncode == 2, ended.stdout
    lines = ended.stdout.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("omlx: "), ended.stdout
    return lines[0]


@pytest.mark.slow
def test_a_folder_or_size_of_no_use_is_one_clear_line_and_without_a_cache_all_is_well(
    tiny: Tiny, chat: list[Turn], tmp_path: Path
) -> None:
    model = tiny("tiny-llama")
    file, newer = tmp_path / "file", tmp_path / "newer"
    file.write_text("mine")
    newer.mkdir()
    (newer / "VERSION").write_text("99\n")
    cases = {
        ("--paged-ssd-cache-dir", str(file)): str(file),
        ("--paged-ssd-cache-dir", str(file / "below")): str(file / "below"),
        ("--paged-ssd-cache-dir", "/proc/omlx"): "/proc/omlx",
        ("--paged-ssd-cache-dir", str(newer)): "newer",
        ("--paged-ssd-cache-max-size", "many"): "paged_ssd_cache_max_size",
        ("--hot-cache-max-size", "-1"): "hot_cache_max_size",
    }
    for flags, said in cases.items():
        assert said in refused(model, *flags)
    unused = ("--paged-ssd-cache-dir", "/proc/omlx", "--paged-ssd-cache-max-size", "many")
    with serve(model, "--no-cache", *unused, "--hot-cache-max-size", "-1") as running:
        check(running.url, chat[0])
    assert file.read_text() == "mine"
    assert (newer / "VERSION").read_text() == "99\n"


def test_a_second_server_on_one_folder_is_told_who_has_it(
    tiny: Tiny, chat: list[Turn], tmp_path: Path
) -> None:
    model, flags = tiny("tiny-llama"), ("--paged-ssd-cache-dir", str(tmp_path / "blocks"))
    with serve(model, *flags, settings=BLOCKS) as running:
        assert f"process {running.process.pid}" in refused(model, *flags)
        with serve(model, "--no-cache", *flags) as other:
            check(other.url, chat[0])
        check(running.url, chat[0])
        running.kill()
        with serve(model, *flags, settings=BLOCKS) as heir:  # a dead one holds nothing
            check(heir.url, chat[0])


# ------------------------------------------------------------------ a full disk


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A volume of its own; only root may have one, and on Linux."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


NEEDS_VOLUME = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root may mount a volume"
)


def dropped(running: Running) -> float:
    return running.metrics()['kv_dropped_writes_total{model="tiny-llama"}']


@pytest.mark.slow
@NEEDS_VOLUME
@pytest.mark.parametrize("options", ["size=400k", "size=400m,nr_inodes=16"], ids=["bytes", "names"])
def test_on_a_full_disk_answers_go_on_and_what_is_not_written_is_counted_and_said(
    options: str, tiny: Tiny, chat: list[Turn], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        flags = ("--paged-ssd-cache-dir", str(disk / "blocks"), "--paged-ssd-cache-max-size", "100%")
        with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
            for turn in chat:
                check(running.url, turn)
            wait_until(lambda: dropped(running) > 0)
            for turn in chat:
                assert check(running.url, turn).cached_tokens > 0
            assert re.search("the SSD takes no blocks for a while", running.log())
            assert "Traceback" not in running.log()
            assert running.interrupt() < 10
        told = omlx("cache", "verify", "--paged-ssd-cache-dir", str(disk / "blocks"))
        assert told.returncode == 0, told.stdout


@pytest.mark.slow
@NEEDS_VOLUME
def test_a_server_starts_on_a_disk_that_others_have_filled(
    tiny: Tiny, chat: list[Turn], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        flags = ("--paged-ssd-cache-dir", str(disk / "blocks"), "--paged-ssd-cache-max-size", "100%")
        with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
            check(running.url, chat[0])
            running.interrupt()
        assert block_bytes(disk) > 0
        with suppress(OSError), (disk / "others").open("wb", buffering=0) as others:
            while True:
                others.write(bytes(4096))
        with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
            for turn in chat:
                check(running.url, turn)
            # It has given up its own blocks, so that others have room.
            wait_until(lambda: dropped(running) > 0)
            assert running.interrupt() < 10
        assert block_bytes(disk) == 0
