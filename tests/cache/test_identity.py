"""A model's identity: the contents of its files, by whatever name and road they are found."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omlx.cache import identity
from omlx.cache.identity import identity_of, model_root, weights_digest
from omlx.errors import BadModel

CONFIG = {"model_type": "llama", "rope": {"theta": 1e4, "kind": None}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for number in (1, 2):
        (made / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 5000)
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weight files that were read through."""
    names: list[str] = []
    read = identity._file_digest

    def counted(file: Path) -> str:
        names.append(file.name)
        return read(file)

    monkeypatch.setattr(identity, "_file_digest", counted)
    return names


def shard(folder: Path, number: int = 1) -> Path:
    return folder / f"model-0000{number}-of-00002.safetensors"


def swap_shards(folder: Path) -> None:
    one, other = shard(folder, 1), shard(folder, 2)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


CHANGES: dict[str, Callable[[Path], object]] = {
    "one byte of a shard": lambda folder: shard(folder, 2).write_bytes(b"\2" * 4999 + b"\3"),
    "a shard's length": lambda folder: shard(folder).write_bytes(b"\1" * 4999),
    "two shards swapped": swap_shards,
    "a shard more": lambda folder: (folder / "adapters.safetensors").write_bytes(b""),
    "config": lambda folder: (folder / "config.json").write_text(
        json.dumps(CONFIG | {"rope": {"theta": 2e4}})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_or_config_changes_the_digest(folder: Path, memo: Path, change: str) -> None:
    before = weights_digest(folder, memo)
    CHANGES[change](folder)
    assert weights_digest(folder, memo) != before
    assert weights_digest(folder, memo) == weights_digest(folder, None)


def test_neither_the_folder_nor_the_template_nor_the_tokenizer_counts(folder: Path, memo: Path) -> None:
    before = weights_digest(folder, memo)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    elsewhere = folder.parent / "another name"
    shutil.copytree(folder, elsewhere)
    assert weights_digest(folder, memo) == weights_digest(elsewhere, memo) == before


def test_links_to_blobs_are_followed_as_in_the_cache_of_hugging_face(folder: Path, memo: Path) -> None:
    before = weights_digest(folder, memo)
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copy(file, blobs / file.name[::-1])
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name[::-1]))
    assert weights_digest(snapshot, memo) == before
    blob = blobs / shard(folder).name[::-1]
    blob.write_bytes(b"\7" * 5000)
    assert weights_digest(snapshot, memo) != before


def test_a_file_is_read_once_and_again_only_when_it_was_written_to(
    folder: Path, memo: Path, reads: list[str]
) -> None:
    first, second = shard(folder, 1).name, shard(folder, 2).name
    digest = weights_digest(folder, memo)
    assert weights_digest(folder, memo) == digest and reads == [first, second]
    before = shard(folder, 2).stat()
    shard(folder, 2).write_bytes(b"\3" * 5000)
    os.utime(shard(folder, 2), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_digest(folder, memo) != digest
    assert reads == [first, second, second], "the same size and mtime, yet another ctime"


def test_without_a_memo_all_is_read_each_time(folder: Path, reads: list[str]) -> None:
    assert weights_digest(folder, None) == weights_digest(folder, None)
    assert len(reads) == 4


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"%s": 3}', b'{"%s": {"stamp": [1], "blake3": "0"}}'],
    ids=["empty", "cut", "no text", "a list", "deep", "no line", "a short stamp"],
)
def test_a_damaged_memo_is_ignored_and_written_anew(
    folder: Path, memo: Path, reads: list[str], damage: bytes
) -> None:
    digest = weights_digest(folder, memo)
    memo.write_bytes(damage.replace(b"%s", str(shard(folder)).encode()))
    assert weights_digest(folder, memo) == digest and len(reads) == 4
    assert weights_digest(folder, memo) == digest and len(reads) == 4


def test_a_memo_that_cannot_be_written_costs_time_alone(folder: Path, reads: list[str]) -> None:
    in_the_way = folder.parent / "file"
    in_the_way.write_text("")
    below_a_file, a_folder = in_the_way / "digests.json", folder.parent / "digests.json"
    a_folder.mkdir()
    assert weights_digest(folder, below_a_file) == weights_digest(folder, a_folder)
    assert len(reads) == 4
    assert sorted(path.name for path in folder.parent.iterdir()) == ["digests.json", "file", "model"]


def test_many_at_once_with_one_memo_agree(folder: Path, memo: Path) -> None:
    others = [folder.parent / str(number) for number in range(6)]
    for other in others:
        shutil.copytree(folder, other)
    with ThreadPoolExecutor(12) as pool:
        digests = set(pool.map(lambda each: weights_digest(each, memo), [folder, *others] * 4))
    assert digests == {weights_digest(folder, None)}
    assert [path.name for path in memo.parent.iterdir()] == [memo.name]
    assert set(identity._read_memo(memo)) <= {
        str(shard(each, n)) for each in [folder, *others] for n in (1, 2)
    }


def test_the_memo_keeps_what_others_wrote_meanwhile(folder: Path, memo: Path, reads: list[str]) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    weights_digest(folder, memo)
    weights_digest(other, memo)
    weights_digest(folder, memo)
    assert len(reads) == 4


def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    folder: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download_goes_on(file: Path) -> str:
        with file.open("ab") as opened:
            opened.write(b"more")
        return "0" * 64

    monkeypatch.setattr(identity, "_file_digest", download_goes_on)
    with pytest.raises(BadModel, match=r"model-00001-of-00002\.safetensors was written to"):
        weights_digest(folder, memo)
    assert not memo.exists()


def dangle(folder: Path) -> None:
    shard(folder).unlink()
    shard(folder).symlink_to("nowhere")


def circle(folder: Path) -> None:
    shard(folder).unlink()
    shard(folder).symlink_to(shard(folder).name)


def empty(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def a_folder(folder: Path) -> None:
    shard(folder).unlink()
    shard(folder).mkdir()


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (dangle, "model-00001-of"),
        (circle, "model-00001-of"),
        (a_folder, "model-00001-of"),
        (empty, "no .*safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff" * 9), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json"),
    ],
    ids=["dangling link", "circle of links", "folder", "no weights", "no config", "cut", "no text", "deep"],
)
def test_what_cannot_be_read_is_named(folder: Path, harm: Callable[[Path], object], named: str) -> None:
    harm(folder)
    with pytest.raises(BadModel, match=named):
        weights_digest(folder, None)


def test_the_root_depends_on_the_format_of_keys_and_values_and_on_the_code(
    folder: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model_root(folder, memo, "bfloat16", 256)
    assert plain == model_root(folder, None, "bfloat16", 256) != model_root(folder, memo, "int4/64", 256)
    monkeypatch.setattr(identity, "version", lambda package: f"another {package}")
    assert model_root(folder, memo, "bfloat16", 256) != plain
    assert identity_of(folder, memo, "bfloat16", 256)["mlx_lm"] == "another mlx-lm"
    monkeypatch.undo()
    monkeypatch.setattr(identity, "CACHE_VERSION", "next")
    assert model_root(folder, memo, "bfloat16", 256) != plain
