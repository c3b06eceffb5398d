"""The probe: what it tells of this machine, its ports against strangers, and its conversation."""

import ast
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.identity import weights_digest
from omlx.cluster import probe
from omlx.cluster.facts import Look, facts_of, read_answer
from omlx.cluster.node_identity import own_addresses

SECRET = "5" * probe.SECRET_BYTES


@pytest.fixture
def listener() -> Iterator[probe.Listener]:
    opened = probe.Listener(SECRET, "127.0.0.1")
    yield opened
    opened.close()


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"b": 1,   "a": 2}')
    return folder


def test_a_look_at_this_machine_is_understood_on_the_other_side(tmp_path: Path) -> None:
    look = probe.look(str(tmp_path / "not" / "yet"), None)
    seen = facts_of(read_answer(json.dumps(look).encode(), Look))
    assert seen.memory_bytes and seen.available_bytes and seen.disk_free_bytes and seen.chip
    assert seen.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert seen.versions["omlx"] and seen.versions["mlx-lm"]
    found, ours = {one.address for one in seen.interfaces}, set(own_addresses())
    assert found & ours or not ours
    assert not any(address.startswith("127.") for address in found)


def test_a_digest_that_a_server_has_noted_is_told_until_the_file_changes(tmp_path: Path) -> None:
    folder, cache = model_folder(tmp_path / "model"), tmp_path / "cache"
    assert probe.model_files(folder, cache)["files"]["a.safetensors"] == {"bytes": 7, "digest": None}
    weights_digest(folder, cache / "digests.json")
    noted = probe.model_files(folder, cache)["files"]["a.safetensors"]["digest"]
    assert isinstance(noted, str) and len(noted) == 64
    (folder / "a.safetensors").write_bytes(b"others!")
    assert probe.model_files(folder, cache)["files"]["a.safetensors"]["digest"] is None


def test_the_layout_of_config_json_is_no_difference_and_its_contents_are(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    (two / "config.json").write_text('{"a":2,"b":1}')
    configs = [probe.model_files(folder, tmp_path)["config"] for folder in (one, two)]
    assert configs[0] == configs[1]
    (two / "config.json").write_text('{"a":2,"b":3}')
    assert probe.model_files(two, tmp_path)["config"] != configs[0]


@pytest.mark.parametrize("notes", [b"", b"[]", b"{", b'{"x": 1}', b"\xff"])
def test_damaged_notes_and_a_missing_model_are_no_error(tmp_path: Path, notes: bytes) -> None:
    (tmp_path / "digests.json").write_bytes(notes)
    folder = model_folder(tmp_path / "model")
    assert probe.model_files(folder, tmp_path)["files"]["a.safetensors"]["digest"] is None
    missing = probe.model_files(tmp_path / "none", tmp_path)
    assert (missing["files"], missing["config"]) == ({}, None)


def test_a_command_that_is_missing_fails_or_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "COMMAND_S", 0.2)
    start = time.monotonic()
    assert probe.said("no-such-command-here") == ""
    assert probe.said("false") == ""
    assert probe.said("sleep", "30") == ""
    assert time.monotonic() - start < 5


# ------------------------------------------------------------------ ports


def test_echoes_and_bulk_are_measured_over_a_real_port(listener: probe.Listener) -> None:
    reached = probe.reach("127.0.0.1", listener.port, SECRET)
    assert reached == {"address": "127.0.0.1", "local": "127.0.0.1", "error": None}
    measured = probe.measure("127.0.0.1", listener.port, SECRET, 0.05)
    assert 0 < measured["round_trip_s"] < 1 and measured["bytes_per_s"] > 1e6


def test_who_does_not_know_the_secret_is_told_nothing(listener: probe.Listener) -> None:
    for said in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 40, b"6" * probe.SECRET_BYTES, b"\x00" * 4096):
        with socket.create_connection(("127.0.0.1", listener.port), 2) as stranger:
            stranger.sendall(said)
            stranger.settimeout(2)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert probe.reach("127.0.0.1", listener.port, "7" * probe.SECRET_BYTES)["error"] is not None
    assert probe.reach("127.0.0.1", listener.port, SECRET)["error"] is None


def test_silent_guests_hold_their_places_for_a_moment_only(
    listener: probe.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SILENCE_S", 0.2)
    silent = [socket.create_connection(("127.0.0.1", listener.port), 2) for _ in range(probe.MOST_GUESTS + 4)]
    end = time.monotonic() + 10
    while probe.reach("127.0.0.1", listener.port, SECRET)["error"] is not None:
        assert time.monotonic() < end
    for guest in silent:
        guest.close()


def test_a_port_where_nobody_listens_is_named_by_the_systems_word(listener: probe.Listener) -> None:
    listener.close()
    assert probe.reach("127.0.0.1", listener.port, SECRET)["error"] == "ECONNREFUSED"


def test_one_that_takes_the_connection_and_says_nothing_is_a_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert probe.reach("127.0.0.1", port, SECRET)["error"] == "ETIMEDOUT"
        assert probe.measure("127.0.0.1", port, SECRET, 0.05)["round_trip_s"] is None


def test_several_addresses_are_tried_at_once_and_told_in_order(listener: probe.Listener) -> None:
    tried = probe.reach_all(["127.0.0.2", "127.0.0.1"], listener.port, SECRET)
    assert [(one["address"], one["error"]) for one in tried] == [
        ("127.0.0.2", "ECONNREFUSED"),
        ("127.0.0.1", None),
    ]


def test_a_name_is_no_address_and_is_not_looked_up(listener: probe.Listener) -> None:
    with pytest.raises(ValueError, match="localhost"):
        probe.reach("localhost", listener.port, SECRET)


# ------------------------------------------------------------------ conversation


def answers_to(*questions: dict[str, Any]) -> list[Any]:
    lines = [{"secret": SECRET, "life_s": 60}, *questions]
    asked = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    answers = io.BytesIO()
    probe.converse(asked, answers)
    mark = f"{probe.MARK} {SECRET} "
    said = [line for line in answers.getvalue().decode().splitlines() if line]
    assert all(line.startswith(mark) for line in said)
    return [json.loads(line.removeprefix(mark)) for line in said]


def test_questions_are_answered_in_turn_until_the_input_ends(
    listener: probe.Listener, tmp_path: Path
) -> None:
    clock, looked, reached, measured = answers_to(
        {"ask": "clock"},
        {"ask": "look", "cache": str(tmp_path), "model": None},
        {"ask": "reach", "addresses": ["127.0.0.1"], "port": listener.port},
        {"ask": "measure", "address": "127.0.0.1", "port": listener.port, "bulk_s": 0.01},
    )
    assert abs(clock["time"] - time.time()) < 5
    assert looked["port"] != listener.port and looked["look"]["host"] == socket.gethostname()
    assert reached["reached"][0]["error"] is None and measured["bytes_per_s"] > 0


def test_a_probe_that_was_forgotten_ends_by_itself() -> None:
    read, write = os.pipe()  # never closed by whoever asks
    with os.fdopen(read, "rb") as questions, os.fdopen(write, "wb") as asking:
        child = subprocess.Popen([sys.executable, probe.__file__], stdin=questions, stdout=subprocess.DEVNULL)
        asking.write(json.dumps({"secret": SECRET, "life_s": 0.2}).encode() + b"\n")
        asking.flush()
        assert child.wait(10) == 3


def test_the_script_needs_the_standard_library_alone_and_bears_an_old_python() -> None:
    source = Path(probe.__file__).read_text()
    ast.parse(source, feature_version=(3, 9))
    code = "import sys; exec(compile(sys.stdin.read(), 'probe', 'exec'), {'__name__': 'probe'})"
    command = [sys.executable, "-I", "-S", "-c", code]
    ran = subprocess.run(command, input=source, text=True, capture_output=True, timeout=20, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
