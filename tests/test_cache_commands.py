"""`omlx cache` as its user meets it, on a folder that is filled as a server fills it."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omlx import cache_commands
from omlx.cache.block import name, pack, root_of
from omlx.cache.block_file import Buffers, Label, Line, Tensor, read_block
from omlx.cache.folder import Folder
from omlx.cache.shelf import Shelf
from omlx.ids import BlockId
from tests.test_cli import OMLX, omlx, refused

LLAMA, QWEN, OLD_QWEN = (root_of({"weights": digest}) for digest in ("llama", "qwen", "another qwen"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, one of them with the blocks of its former weights too, in two spans each."""
    folder = tmp_path / "kept"
    with locked(folder) as held:
        for root, model in ((LLAMA, "tiny-llama"), (QWEN, "tiny-qwen"), (OLD_QWEN, "tiny-qwen")):
            fill(folder, root)
            held.describe(root, model, {"weights": model})
    return folder


def fill(folder: Path, root: BlockId) -> None:
    for first, last in ((0, 2), (2, 4)):
        shelf = Shelf.open(folder, root, first, last)
        parent = root
        for start in (0, 16, 32):
            tokens = pack(range(start, start + 16))
            id = name(parent, tokens)
            tensor = Tensor(f"{first}.k", "F32", (256,), bytes(1024))
            shelf.store(Label(id=id, parent=parent, tokens=tokens, start=start, restorable=True), [tensor])
            parent = id


@contextmanager
def locked(folder: Path) -> Iterator[Folder]:
    held = Folder.open(folder)
    try:
        yield held
    finally:
        held.close()


def cache(command: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return omlx("cache", command, "--paged-ssd-cache-dir", folder, *words, **environment)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_stats_show_each_model_and_what_all_of_them_take_of_the_budget(folder: Path) -> None:
    done = cache("stats", folder, OMLX_PAGED_SSD_CACHE_MAX_SIZE="2GB")
    assert done.returncode == 0, done
    llama, qwen = (
        next(line for line in done.stdout.splitlines() if f"tiny-{word}" in line)
        for word in ("llama", "qwen")
    )
    assert " 3 " in llama and " 6 " in qwen
    assert "of 2.00 GB used" in done.stdout and str(folder) in done.stdout
    assert "free on its disk" in done.stdout


def test_stats_of_one_model_still_count_all_against_the_budget(folder: Path) -> None:
    one, every = cache("stats", folder, "--model", "tiny-llama"), cache("stats", folder)
    assert "tiny-qwen" not in one.stdout
    assert "used in" in one.stdout and one.stdout.splitlines()[-2] == every.stdout.splitlines()[-2]


def test_a_share_of_the_disk_is_shown_in_bytes_and_a_cache_that_is_off_can_be_looked_at(folder: Path) -> None:
    done = cache("stats", folder, OMLX_PAGED_SSD_CACHE_MAX_SIZE="50%", OMLX_CACHE="0")
    assert done.returncode == 0 and "%" not in done.stdout and "tiny-llama" in done.stdout


@pytest.mark.parametrize("command", ["stats", "verify", "clear"])
def test_a_folder_that_is_not_there_keeps_nothing(command: str, tmp_path: Path) -> None:
    done = cache(command, tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (0, f"nothing is kept in {tmp_path / 'nowhere'}\n")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["stats", "verify", "clear"])
def test_a_model_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    command: str, folder: Path
) -> None:
    line = refused("cache", command, "--paged-ssd-cache-dir", folder, "--model", "llama")
    assert "'llama'" in line and "tiny-llama" in line and "tiny-qwen" in line
    assert len(files(folder)) == 18


def test_a_file_instead_of_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in ("stats", "verify", "clear"):
        assert "file" in refused("cache", command, "--paged-ssd-cache-dir", tmp_path / "file")


def test_stats_and_verify_work_while_a_server_uses_the_folder(folder: Path) -> None:
    with locked(folder):
        assert cache("stats", folder).returncode == 0
        done = cache("verify", folder)
    assert (done.returncode, done.stdout) == (0, f"18 blocks are good, 0 bad, in {folder}\n")


def test_verify_names_every_bad_block_says_why_and_deletes_none(folder: Path) -> None:
    flipped, short = [path for path in files(folder) if LLAMA.hex() in str(path)][1:3]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    short.write_bytes(short.read_bytes()[:-8])
    done = cache("verify", folder)
    assert done.returncode == 1
    assert done.stdout == f"16 blocks are good, 2 bad, in {folder}\n"
    bad = [line for line in done.stderr.splitlines() if line.startswith("bad: ")]
    assert len(bad) == 2
    assert any(str(flipped) in line and "checksum" in line for line in bad)
    assert any(str(short) in line and "bytes" in line for line in bad)
    assert len(files(folder)) == 18
    assert cache("verify", folder, "--model", "tiny-qwen").returncode == 0


def test_a_block_that_a_server_gives_up_while_verify_reads_is_not_bad(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = files(folder)[0]

    def read_late(path: Path, line: Line, buffers: Buffers) -> list[Tensor]:
        victim.unlink(missing_ok=True)
        return read_block(path, line, buffers)

    monkeypatch.setattr("omlx.cache.folder.read_block", read_late)
    cache_commands.verify(paged_ssd_cache_dir=folder)
    assert capsys.readouterr().out == f"17 blocks are good, 0 bad, in {folder}\n"


def test_verify_shows_a_bar_on_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*OMLX, "cache", "verify", "--paged-ssd-cache-dir", str(folder)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, stdin=theirs, timeout=60, check=True
    )
    os.close(theirs)
    assert b"18 blocks are good" in done.stdout
    assert b"reading" in os.read(ours, 65536)
    os.close(ours)


def test_clear_asks_first_and_a_no_deletes_nothing(folder: Path) -> None:
    command = [*OMLX, "cache", "clear", "--paged-ssd-cache-dir", str(folder)]
    said_no = subprocess.run(command, input="n\n", capture_output=True, text=True, timeout=60, check=False)
    assert said_no.returncode == 1
    assert "Delete 9 blocks (" in said_no.stdout and "tiny-llama" in said_no.stdout
    assert len(files(folder)) == 18
    said_yes = subprocess.run(command, input="y\n", capture_output=True, text=True, timeout=60, check=False)
    assert said_yes.returncode == 0
    assert " freed in " in said_yes.stdout
    assert files(folder) == []
    assert cache("stats", folder).stdout == f"nothing is kept in {folder}\n"


def test_clear_of_one_model_takes_all_that_bears_its_name_and_leaves_the_others(folder: Path) -> None:
    done = cache("clear", folder, "--yes", "--model", "tiny-qwen")
    assert done.returncode == 0, done
    assert "freed" in done.stdout
    assert len(files(folder)) == 6
    assert cache("verify", folder).stdout == f"6 blocks are good, 0 bad, in {folder}\n"


def test_clear_leaves_what_is_not_ours(folder: Path) -> None:
    (folder / "thesis.txt").write_text("mine")
    assert cache("clear", folder, "--yes").returncode == 0
    assert (folder / "thesis.txt").read_text() == "mine"


def test_clear_is_refused_while_a_server_uses_the_folder_and_names_it(folder: Path) -> None:
    with locked(folder):
        line = refused("cache", "clear", "--paged-ssd-cache-dir", folder, "--yes")
    assert f"process {os.getpid()}" in line
    assert len(files(folder)) == 18


def test_a_model_whose_name_nobody_knows_goes_by_its_first_digits(folder: Path) -> None:
    (folder / LLAMA.hex() / "model.json").unlink()
    label = LLAMA.hex()[:12]
    assert label in cache("stats", folder).stdout
    assert cache("clear", folder, "--yes", "--model", label).returncode == 0
    assert len(files(folder)) == 12


def test_the_folder_comes_from_the_settings_where_no_flag_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMLX_PAGED_SSD_CACHE_DIR")
    (tmp_path / ".omlx").mkdir()
    (tmp_path / ".omlx" / "settings.json").write_text(json.dumps({"paged_ssd_cache_dir": "~/kept"}))
    assert str(folder) in omlx("cache", "stats", HOME=str(tmp_path)).stdout
