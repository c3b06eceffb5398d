"""A host's own OpenSSH server."""

import pytest

from tests.lab.conftest import NewHosts
from tests.lab.fleet import Fleet
from tests.lab.sshd import new_key


@pytest.fixture(scope="module")
def two(hosts: NewHosts) -> Fleet:
    return hosts(2, memory_gib=(64, 16))


def test_a_host_logs_into_another_and_finds_a_mac_and_omlx_there(two: Fleet) -> None:
    a, b = two.hosts
    probe = "hostname; sw_vers -productVersion; sysctl -n hw.memsize; echo $HOME; command -v omlx"
    said = a.run(two.ssh(b, probe), check=True).stdout.splitlines()
    assert said[:4] == ["mac-b", "15.5", str(16 << 30), str(b.home)]
    assert said[4].endswith("/bin/omlx")


def test_a_host_whose_key_is_not_known_is_refused(two: Fleet) -> None:
    a, b = two.hosts
    lines = two.known_hosts.read_text()
    two.known_hosts.write_text("")
    try:
        refused = a.run(two.ssh(b, "true"))
    finally:
        two.known_hosts.write_text(lines)
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


def test_a_key_that_was_not_authorized_is_refused_until_it_is(two: Fleet) -> None:
    a, b = two.hosts
    public = new_key(a.home / "other", "other")
    command = [str(a.home / "other") if word == str(two.key) else word for word in two.ssh(b, "hostname")]
    assert "Permission denied" in a.run(command).stderr
    b.sshd.authorize(public)
    assert a.run(command, check=True).stdout == "mac-b\n"


def test_a_host_keeps_its_key_over_a_reboot_and_says_another_when_it_is_changed(two: Fleet) -> None:
    a, b = two.hosts
    two.lab.crash(b)
    two.lab.boot(b)
    assert b.start_sshd() in two.known_hosts.read_text()
    assert a.run(two.ssh(b, "hostname"), check=True).stdout == "mac-b\n"
    two.lab.crash(b)
    b.sshd.change_key()
    two.lab.boot(b)
    changed = b.start_sshd()
    assert changed not in two.known_hosts.read_text()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in a.run(two.ssh(b, "true")).stderr
