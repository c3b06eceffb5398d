"""This machine's id and what it says of itself."""

import base64
import hashlib
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from omlx import __version__
from omlx.cluster import node_identity
from omlx.cluster.node_identity import (
    chip,
    hardware_mark,
    host_key_fingerprint,
    node_id,
    own_address,
    own_addresses,
    this_node,
    versions,
)
from omlx.errors import Refused
from tests.cluster import certified

KEY = b"\x00\x00\x00\x0bssh-ed25519 and more"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "omlx" / "node.json"


def test_the_id_is_made_once_and_nobody_else_can_read_the_file(file: Path) -> None:
    made = node_id(file)
    assert node_id(file) == made
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["node.json"]


def test_a_file_that_others_can_read_is_closed_to_them(file: Path) -> None:
    made = node_id(file)
    file.chmod(0o644)
    assert node_id(file) == made
    assert file.stat().st_mode & 0o777 == 0o600


def test_all_that_make_the_id_at_once_get_the_same(file: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: node_id(file), range(64)))
    assert len(made) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": 7}', '{"id": "-oProxyCommand"}', "\ufffd"])
def test_a_file_without_an_id_is_refused_with_what_to_do(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(Refused, match="delete it"):
        node_id(file)


def test_a_folder_in_its_place_is_refused(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.raises(Refused, match="Is a directory"):
        node_id(file)


def test_a_copy_of_another_macs_home_folder_gets_an_id_of_its_own(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = node_id(file)
    monkeypatch.setattr(node_identity, "hardware_mark", lambda: "0" * 16)
    copied = node_id(file)
    assert copied != made
    assert node_id(file) == copied
    assert file.stat().st_mode & 0o777 == 0o600


def test_where_the_hardware_has_no_name_the_id_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = node_id(file)
    monkeypatch.setattr(node_identity, "hardware_mark", lambda: None)
    assert node_id(file) == made


def test_the_file_gives_away_no_serial_number(file: Path) -> None:
    node_id(file)
    kept = json.loads(file.read_text())
    assert set(kept) <= {"id", "hardware"}
    assert kept.get("hardware") == hardware_mark()


def test_the_fingerprint_is_what_ssh_keygen_would_say(tmp_path: Path) -> None:
    public = tmp_path / "key.pub"
    public.write_bytes(b"ssh-ed25519 " + base64.b64encode(KEY) + b" root@mac\n")
    digest = base64.b64encode(hashlib.sha256(KEY).digest()).decode().rstrip("=")
    assert host_key_fingerprint(public) == f"SHA256:{digest}"


@pytest.mark.parametrize("text", [b"", b"ssh-ed25519", b"ssh-ed25519 !!!!", b"\xff\xfe \xff"])
def test_a_broken_host_key_is_none(tmp_path: Path, text: bytes) -> None:
    public = tmp_path / "key.pub"
    public.write_bytes(text)
    assert host_key_fingerprint(public) is None
    assert host_key_fingerprint(tmp_path / "none.pub") is None


def test_what_is_installed_is_known_without_loading_it() -> None:
    code = (
        "import sys; from omlx.cluster.node_identity import versions; versions();"
        "print(sorted({'mlx', 'mlx_lm', 'ray', 'zeroconf', 'asyncssh'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
    found = versions()
    assert found.omlx == __version__
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.mlx is not None and found.mlx_lm is not None


def test_this_machine_is_a_node_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, shown in {
        "Alices-Mac.local": "Alices-Mac",
        "-oProxyCommand=x": "oProxyCommand-x",
        "\u00e9toile mac\n": "toile-mac-",
        "": "unnamed",
        "m" * 90: "m" * 48,
    }.items():
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        made = this_node(node_id(tmp_path / "node.json"), ["10.0.0.1"], at=5.0, agent_port=7)
        assert made.name == shown
    assert made.memory_bytes == psutil.virtual_memory().total
    assert made.chip == chip()


def addresses_of(**interfaces: str) -> dict[str, list[SimpleNamespace]]:
    return {
        name: [
            SimpleNamespace(family=socket.AF_INET, address=address),
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1%x"),
        ]
        for name, address in interfaces.items()
    }


def test_own_addresses_are_those_that_others_may_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    found = addresses_of(
        lo="127.0.0.1",
        lo0="127.0.0.1",
        bridge0="169.254.7.7",
        bridge100="192.168.64.1",
        en0="192.168.1.20",
        en1="10.0.0.20",
        en5="10.5.5.5",
        utun3="100.64.0.1",
        docker0="172.17.0.1",
        veth12ab="172.17.0.2",
    )
    up = {name: SimpleNamespace(isup=name != "en5") for name in found}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    assert own_addresses() == ("10.0.0.20", "192.168.1.20", "169.254.7.7")


def test_the_address_is_that_which_the_way_to_a_place_begins_at() -> None:
    assert own_address(("127.0.0.1", 9)) == "127.0.0.1"
    other = certified.own_address()
    assert own_address((other, 9)) == other
