"""Weights on their way to a node, over OpenSSH's own server on a port of 127.0.0.1."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from omlx.cluster import weights, weights_receiver
from omlx.cluster.planner import Span
from omlx.cluster.validation import START
from omlx.cluster.weights import Part, batches, missing
from omlx.errors import BadModel, BadSetting, SshFailed
from omlx.node.loader import load_span
from omlx.node.manifest import read_manifest
from omlx.node.present import PRESENT, read_present, refuse_absent
from tests.cluster.ssh_server import Machine, sshd
from tests.cluster.test_validation_openssh import SSHD
from tests.cluster.weights_node import ROOT, SPAN, Node, joined_at, openssh_node

needs_sshd = pytest.mark.skipif(SSHD is None, reason="needs sshd (Debian: openssh-server)")
ODD = 'mo del\'s "$(touch pwned)"; touch pwned `touch pwned` & é\n -oProxyCommand=x'


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """It does not see our folder under the same path, as if it were another machine."""
    monkeypatch.setattr(weights, "PART_BYTES", 8192)
    monkeypatch.setattr(weights, "BATCH_BYTES", 65536)
    every = weights._places
    monkeypatch.setattr(weights, "_places", lambda folder: every(folder)[1:])
    with openssh_node(tmp_path) as made:
        yield made


@pytest.fixture
def model(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """tiny-llama in two files and an index, its tensors in no order; the folder has an odd name."""
    whole = tiny("tiny-llama")
    folder = tmp_path / "models" / ODD
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = mx.load(str(whole / "model.safetensors"))
    assert isinstance(tensors, dict)
    index: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        some = {name: array for name, array in tensors.items() if len(name) % 2 == number - 1}
        mx.save_safetensors(str(folder / file), some, metadata={"format": "mlx"})
        index |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def parameters(folder: Path, span: Span) -> dict[str, mx.array]:
    cut = load_span(folder, span.start, span.end, lambda done, total: None)
    flat: Any = tree_flatten(cut.model.parameters())
    return dict(flat)


def assert_equal(folder: Path, copy: Path, span: Span) -> None:
    ours, theirs = parameters(folder, span), parameters(copy, span)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(array, theirs[name]).item() for name, array in ours.items())


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


# ------------------------------------------------------------------ a copy


@needs_sshd
def test_a_node_gets_the_bytes_that_its_span_reads_and_loads_them(node: Node, model: Path) -> None:
    copy = node.provide(model)
    assert copy.parent == node.copies
    assert_equal(model, copy, SPAN)
    assert node.told[0][0] == 0 and node.told[-1][0] == node.told[-1][1] == node.sent
    assert node.told == sorted(node.told)
    ours = {file.name: file.stat().st_size for file in model.iterdir()}
    theirs = {file.name: file.stat().st_size for file in copy.iterdir() if file.name in ours}
    assert theirs == ours, "each has its full length"
    used = sum(file.stat().st_blocks * 512 for file in copy.glob("*.safetensors"))
    full = sum(size for name, size in ours.items() if name.endswith(".safetensors"))
    assert node.sent < 0.7 * full and used < 0.8 * full, "and holes where the others' layers are"
    with pytest.raises(BadModel, match="was not copied to this machine"):
        load_span(copy, 0, 3, lambda done, total: None)
    assert list(node.home.rglob("pwned")) == [] and not (ROOT / "pwned").exists()


@needs_sshd
def test_a_span_that_grows_gets_only_what_is_new_and_the_same_again_gets_nothing(
    node: Node, model: Path
) -> None:
    copy = node.provide(model)
    before = node.sent
    assert node.provide(model, Span(0, 4)) == copy
    assert_equal(model, copy, Span(0, 4))
    total = node.told[-1][1]
    assert node.told[0] == (before, total) and node.sent == total - before
    for span in (Span(0, 4), SPAN, Span(2, 4)):
        node.provide(model, span)
        assert node.sent == 0 and len(node.told) == 1


@needs_sshd
def test_a_copy_that_was_cut_off_goes_on_where_it_was(node: Node, model: Path) -> None:
    def cut(done: int, total: int) -> None:
        if done > total // 2:
            node.end_sessions()

    with pytest.raises(SshFailed) as lost:
        node.provide(model, SPAN, cut)
    assert "broke off" in str(lost.value)
    reached, total = node.told[-1]
    (copy,) = node.copies.iterdir()
    with pytest.raises(BadModel, match="was not copied"):
        refuse_absent(copy, SPAN.start, SPAN.end)
    assert node.provide(model) == copy
    assert node.sent <= total - reached + 2 * weights.BATCH_BYTES
    assert node.sent < 0.8 * total
    assert_equal(model, copy, SPAN)


@needs_sshd
def test_two_copies_of_one_model_at_a_time_lose_nothing_of_each_other(node: Node, model: Path) -> None:
    manifest = read_manifest(model)

    async def run() -> list[str]:
        spans = (Span(0, 3), Span(1, 4))
        return await asyncio.gather(
            *(
                weights.provide(node.access, node.joined, manifest, span, node.memo, lambda *_: None)
                for span in spans
            )
        )

    one, other = asyncio.run(run())
    assert one == other
    one = one.folder
    assert_equal(model, one, Span(0, 4))


@needs_sshd
def test_a_byte_that_changed_on_the_node_since_is_found_and_sent_again(node: Node, model: Path) -> None:
    copy = node.provide(model)
    present = read_present(copy)
    assert present is not None
    name = "model-00002-of-00002.safetensors"
    stretch = present.files[name].stretches[-1]
    flip(copy / name, stretch.end - 1)
    assert node.provide(model) == copy
    assert node.sent == stretch.end - stretch.start
    assert_equal(model, copy, SPAN)


@needs_sshd
def test_a_byte_that_changes_on_its_way_to_the_disk_is_sent_again(node: Node, model: Path) -> None:
    flipped: list[Path] = []

    def change(done: int, total: int) -> None:
        if done and not flipped:
            flipped.extend(node.copies.glob("*/config.json"))
            flip(flipped[0], 1)

    copy = node.provide(model, SPAN, change)
    assert len(flipped) == 1 and node.told != sorted(node.told), "what was wrong does not count as there"
    assert node.told[-1][0] == node.told[-1][1]
    assert (copy / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert_equal(model, copy, SPAN)


@needs_sshd
def test_a_disk_that_does_not_keep_what_is_written_is_told_after_the_second_time(
    node: Node, model: Path
) -> None:
    def change(done: int, total: int) -> None:
        for file in node.copies.glob("*/config.json"):
            file.write_bytes(bytes(file.stat().st_size))

    with pytest.raises(SshFailed, match=r"mini reads back other bytes of config\.json than were sent"):
        node.provide(model, SPAN, change)
    (copy,) = node.copies.iterdir()
    with pytest.raises(BadModel, match="was not copied"):
        refuse_absent(copy, SPAN.start, SPAN.end)


@needs_sshd
@pytest.mark.parametrize("text", [b"", b'{"files": []}'])
def test_a_damaged_list_of_what_is_there_costs_a_whole_copy_and_nothing_else(
    text: bytes, node: Node, model: Path
) -> None:
    copy = node.provide(model)
    (copy / PRESENT).write_bytes(text)
    node.provide(model)
    assert node.sent == node.told[-1][1]
    assert_equal(model, copy, SPAN)


@needs_sshd
def test_a_file_that_was_removed_or_cut_there_is_copied_again(node: Node, model: Path) -> None:
    copy = node.provide(model)
    first, second = sorted(copy.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    node.provide(model)
    assert_equal(model, copy, SPAN)


# ------------------------------------------------------------------ no copy


@needs_sshd
def test_a_node_that_has_the_model_reads_its_own_and_nothing_is_copied(
    node: Node, tiny: Callable[[str], Path]
) -> None:
    model = tiny("tiny-llama")
    own = node.home / ".omlx" / "models" / model.name
    own.mkdir(parents=True)
    for file in model.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    assert node.provide(model) == own
    assert node.sent == 0 and not node.copies.exists()
    flip(own / "model.safetensors", (own / "model.safetensors").stat().st_size - 1)
    assert node.provide(model).parent == node.copies, "as large, and another one"
    assert node.sent > 0


def test_the_same_folder_is_used_and_its_odd_name_never_reaches_a_shell(model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")

    async def run() -> str:
        async with sshd(machine):
            machine.pin()
            manifest, memo = read_manifest(model), tmp_path / "digests.json"
            node = joined_at(machine.port, "admin")
            return await weights.provide(machine.access, node, manifest, SPAN, memo, lambda *_: None)

    assert asyncio.run(run()) == weights.Provided(model, whole=True)
    assert machine.commands == [START]
    assert list(tmp_path.rglob("pwned")) == []
    assert (machine.home / ".omlx" / "cluster" / "digests.json").exists(), "the next time it is not read"


def test_a_node_without_sftp_is_told_as_such(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path / "machine")
    monkeypatch.setattr(weights, "_places", lambda folder: [])

    async def run() -> None:
        async with sshd(machine):
            machine.pin()
            manifest, memo = read_manifest(model), tmp_path / "digests.json"
            node = joined_at(machine.port, "admin")
            await weights.provide(machine.access, node, manifest, SPAN, memo, lambda *_: None)

    with pytest.raises(SshFailed, match="file transfer"):
        asyncio.run(run())


@needs_sshd
def test_a_disk_without_room_is_refused_with_the_bytes_before_anything_is_written(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "free_floor_bytes", lambda volume: volume)
    with pytest.raises(
        BadSetting, match=r"mini has .* free on the disk .* need .* more: free .* there"
    ) as full:
        node.provide(model)
    assert len(str(full.value).splitlines()) == 1
    assert not node.copies.exists()


@needs_sshd
def test_a_file_of_ours_that_is_written_to_meanwhile_is_not_noted_as_the_model(
    node: Node, model: Path
) -> None:
    file = model / "model-00002-of-00002.safetensors"

    def change(done: int, total: int) -> None:
        if 0 < total - done < total // 2:
            flip(file, file.stat().st_size - 1)

    with pytest.raises(BadModel, match="was written to while it was copied"):
        node.provide(model, SPAN, change)
    (copy,) = node.copies.iterdir()
    with pytest.raises(BadModel, match="was not copied"):
        refuse_absent(copy, SPAN.start, SPAN.end)


@needs_sshd
def test_a_node_that_cannot_write_says_why(node: Node, model: Path) -> None:
    node.copies.parent.mkdir(parents=True)
    node.copies.write_text("not a folder")
    with pytest.raises(BadSetting, match=r"127\.0\.0\.1 refuses: "):
        node.provide(model)


@needs_sshd
def test_a_login_that_talks_is_passed_over_and_an_omlx_that_breaks_is_told(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking = b"print('Welcome!')\nsys.stdout.flush()\n" + weights.RECEIVE
    monkeypatch.setattr(weights, "RECEIVE", talking)
    node.provide(model)
    monkeypatch.setattr(weights, "RECEIVE", b"import no_such_module\n")
    with pytest.raises(SshFailed, match=r"no answer of ours .*no_such_module"):
        node.provide(model)


# ------------------------------------------------------------------ pure


def test_what_is_missing_is_cut_into_parts_file_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PART_BYTES", 10)
    wanted = {"a": [(0, 8), (20, 45)], "b": [(0, 5)], "c": [(3, 4)]}
    there = {"a": [(0, 8), (25, 30)], "c": [(0, 9)], "d": [(0, 1)]}
    assert missing(wanted, there) == [
        Part("a", 20, 25),
        Part("a", 30, 40),
        Part("a", 40, 45),
        Part("b", 0, 5),
    ]
    assert missing(wanted, wanted) == []


def test_batches_keep_the_order_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BATCH_BYTES", 20)
    parts = [Part("a", at, at + 8) for at in range(0, 80, 8)]
    made = list(batches(parts))
    assert [part for batch in made for part in batch] == parts
    assert [len(batch) for batch in made] == [3, 3, 3, 1]
    assert list(batches([])) == []


def test_a_receiver_that_is_forgotten_ends_by_itself() -> None:
    code = "from omlx.cluster import weights_receiver as w; import sys; w.IDLE_S = 1; "
    code += "w.serve(sys.stdin.buffer, sys.stdout.buffer)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT) as process:
        assert process.wait(20) != 0
    assert weights_receiver.IDLE_S >= 600


def test_a_node_that_is_not_there_is_told(model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    node = replace(joined_at(port, "admin"), name="gone")
    with pytest.raises(SshFailed, match="connection"):
        asyncio.run(
            weights.provide(
                machine.access, node, read_manifest(model), SPAN, tmp_path / "memo", lambda *_: None
            )
        )
