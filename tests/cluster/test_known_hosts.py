"""Our list of host keys: known, unknown and changed are told apart, and no line of it is guessed at."""

import base64
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster.known_hosts import HostKey, KnownHosts, check_fingerprint, entry_name, judge_key
from omlx.errors import BadSetting

A, B = HostKey("ssh-ed25519", b"one key"), HostKey("ssh-ed25519", b"another key")


def test_a_pinned_key_is_found_again_by_host_and_port_alone(tmp_path: Path) -> None:
    known = KnownHosts(tmp_path / "made" / "known_hosts")
    assert known.keys("studio.local", 22) == ()
    known.pin("studio.local", 22, A)
    known.pin("studio.local", 2222, B)
    known.pin("10.0.0.2", 22, B)
    assert known.keys("Studio.Local.", 22) == (A,)
    assert known.keys("studio.local", 2222) == (B,)
    assert known.keys("studio", 22) == ()


def test_the_file_is_the_users_alone_and_a_key_is_pinned_once(tmp_path: Path) -> None:
    known = KnownHosts(tmp_path / "made" / "known_hosts")
    for _ in range(3):
        known.pin("a", 22, A)
    assert stat.S_IMODE(known.file.stat().st_mode) == 0o600
    assert stat.S_IMODE(known.file.parent.stat().st_mode) == 0o700
    assert len(known.file.read_text().splitlines()) == 1


def test_a_last_line_that_was_left_open_is_not_written_into(tmp_path: Path) -> None:
    known = KnownHosts(tmp_path / "known_hosts")
    known.pin("a", 22, A)
    known.file.write_text(known.file.read_text().rstrip("\n"))
    known.pin("b", 22, B)
    assert known.keys("a", 22) == (A,) and known.keys("b", 22) == (B,)


def test_a_file_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    known = KnownHosts(tmp_path / "known_hosts")
    known.pin("a", 22, A)
    known.file.chmod(0o666)
    with pytest.raises(BadSetting, match="can be written by others; chmod 600"):
        known.keys("a", 22)


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a ssh-ed25519",
        "a ssh-ed25519 ???",
        "|1|c2FsdA==|aGFzaA== ssh-ed25519 YQ==",
        "* ssh-ed25519 YQ==",
        "@revoked a ssh-ed25519 YQ==",
        "@cert-authority * ssh-ed25519 YQ==",
        "!a,b ssh-ed25519 YQ==",
    ],
)
def test_a_line_of_another_kind_is_named_and_nothing_is_guessed(tmp_path: Path, line: str) -> None:
    known = KnownHosts(tmp_path / "known_hosts")
    known.file.write_text(f"# ours\n\n{line}\n")
    known.file.chmod(0o600)
    with pytest.raises(BadSetting, match=r"known_hosts, line 3: .*delete"):
        known.keys("a", 22)


def test_a_file_that_is_no_list_of_hosts_is_not_read_to_its_end(tmp_path: Path) -> None:
    known = KnownHosts(tmp_path / "known_hosts")
    known.file.write_bytes(b"#" * (2 << 20))
    known.file.chmod(0o600)
    with pytest.raises(BadSetting, match="not ours"):
        known.keys("a", 22)
    with pytest.raises(BadSetting, match="let this user read"):
        KnownHosts(tmp_path).keys("a", 22)


def test_unknown_and_changed_are_two_things() -> None:
    assert judge_key(A, ()) == "unknown"
    assert judge_key(A, (B,)) == "changed"
    assert judge_key(A, (B, A)) == "known"
    assert judge_key(HostKey("ssh-rsa", A.data), (A,)) == "changed"


@pytest.mark.parametrize(
    "text", ["", "SHA256:", "MD5:00", "SHA256:" + "a" * 42, f"SHA256:{'a' * 43}\n", "a" * 500]
)
def test_a_fingerprint_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="ssh-keygen -lf"):
        check_fingerprint(text)


@given(st.binary(min_size=1, max_size=200))
def test_every_keys_fingerprint_is_one_that_may_be_given(data: bytes) -> None:
    key = HostKey("ssh-ed25519", data)
    assert check_fingerprint(key.fingerprint) == key.fingerprint


def test_an_entry_is_named_as_openssh_names_it() -> None:
    assert entry_name("Studio.local", 22) == "studio.local"
    assert entry_name("10.0.0.2", 2222) == "[10.0.0.2]:2222"


def test_openssh_itself_reads_our_list_and_the_command_that_we_name_forgets_the_host(tmp_path: Path) -> None:
    made = tmp_path / "host_key"
    try:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made], check=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("needs ssh-keygen (Debian: openssh-client)")
    kind, data = made.with_suffix(".pub").read_text().split()[:2]
    key = HostKey(kind, base64.b64decode(data))
    known = KnownHosts(tmp_path / "known_hosts")
    known.pin("studio.local", 2222, key)
    listed = subprocess.run(
        ["ssh-keygen", "-lf", known.file], capture_output=True, text=True, check=True, timeout=10
    )
    assert key.fingerprint in listed.stdout
    subprocess.run(
        known.removal("studio.local", 2222), shell=True, check=True, timeout=10, capture_output=True
    )
    assert known.keys("studio.local", 2222) == ()
