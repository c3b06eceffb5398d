"""Where Ray's head is, on a node's disk: kept as it was said, and nobody else's to say."""

import stat
from pathlib import Path

import pytest

from omlx.cluster.head_address import HEAD_FILE, HeadAddress, read_head, write_head
from omlx.cluster.membership import remove_bundle
from omlx.errors import BadSetting
from tests.cluster.certified import members

HEAD = HeadAddress("10.0.0.1", 6399, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    members(tmp_path, "b")
    return tmp_path / "b"


def test_what_the_coordinator_said_last_is_read_again_and_is_the_owners_alone(folder: Path) -> None:
    assert read_head(folder) is None
    write_head(folder, HeadAddress("10.0.0.9", 7000))
    write_head(folder, HEAD)
    assert read_head(folder) == HEAD
    assert stat.S_IMODE((folder / HEAD_FILE).stat().st_mode) == 0o600
    assert not list(folder.glob(f"{HEAD_FILE}.*"))


def test_a_machine_in_no_cluster_takes_no_head_and_one_that_leaves_forgets_it(
    folder: Path, tmp_path: Path
) -> None:
    write_head(folder, HEAD)
    remove_bundle(folder)
    assert read_head(folder) is None
    with pytest.raises(BadSetting, match="in no cluster"):
        write_head(folder, HEAD)
    with pytest.raises(BadSetting):
        write_head(tmp_path / "nothing", HEAD)


def test_a_file_that_others_could_have_written_is_not_believed(folder: Path) -> None:
    write_head(folder, HEAD)
    (folder / HEAD_FILE).chmod(0o666)
    with pytest.raises(BadSetting, match="open to others"):
        read_head(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"address": "mac.local", "port": 6399, "number": 1}',
        '{"address": "fe80::1", "port": 6399, "number": 1}',
        '{"address": "--head", "port": 6399, "number": 1}',
        '{"address": "10.0.0.1", "port": 0, "number": 1}',
        '{"address": "10.0.0.1", "port": 65536, "number": 1}',
        '{"address": "10.0.0.1", "port": 6399, "number": -1}',
    ],
)
def test_what_is_no_address_is_told_in_one_line(text: str) -> None:
    with pytest.raises(BadSetting) as told:
        HeadAddress.unpack(text.encode())
    assert len(str(told.value).splitlines()) == 1


def test_it_travels_on_one_line() -> None:
    assert b"\n" not in HEAD.pack()
    assert HeadAddress.unpack(HEAD.pack()) == HEAD
