"""Who is let in by whom over SSH, what is said when nobody is there, and names that go nowhere."""

import asyncio
import socket
import stat
import threading
import time
from pathlib import Path

import asyncssh
import pytest

from omlx.cluster import ssh
from omlx.cluster.findings import Finding, Report
from omlx.cluster.known_hosts import HostKey
from omlx.cluster.ssh import Access, Target, target
from omlx.cluster.validation import Asked, check_hosts
from omlx.errors import Refused
from tests.cluster.ssh_server import (
    QUICK,
    Machine,
    Process,
    check,
    only_blocking,
    sshd,
)

OTHER_FINGERPRINT = "SHA256:" + "A" * 43


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


# ------------------------------------------------------------------ who is there


def test_an_unknown_machine_is_never_accepted_silently_and_its_fingerprint_is_told(machine: Machine) -> None:
    async def run() -> Report:
        async with sshd(machine):
            (report,) = await check_hosts([Asked(machine.target)], machine.access, QUICK)
            return report

    report = asyncio.run(run())
    found = only_blocking(report)
    assert found.what == "host key unknown"
    assert machine.fingerprint in found.seen and machine.fingerprint in found.fix
    assert report.fingerprint == machine.fingerprint
    assert machine.commands == [] and not machine.known_hosts.file.exists()


def test_a_fingerprint_that_somebody_has_compared_pins_the_machine(machine: Machine) -> None:
    assert check(machine, vouched=machine.fingerprint).fit
    assert machine.known_hosts.keys("127.0.0.1", machine.port) == (machine.pinned,)
    assert stat.S_IMODE(machine.known_hosts.file.stat().st_mode) == 0o600


def test_another_fingerprint_than_the_one_compared_is_refused_and_not_pinned(machine: Machine) -> None:
    found = only_blocking(check(machine, vouched=OTHER_FINGERPRINT))
    assert (found.what, found.wanted) == ("host key", OTHER_FINGERPRINT)
    assert machine.fingerprint in found.seen and machine.commands == []
    assert not machine.known_hosts.file.exists()


def test_a_known_machine_that_is_not_the_one_compared_is_refused(machine: Machine) -> None:
    async def run() -> Report:
        async with sshd(machine):
            machine.pin()
            asked = Asked(machine.target, OTHER_FINGERPRINT)
            (report,) = await check_hosts([asked], machine.access, QUICK)
            return report

    assert only_blocking(asyncio.run(run())).wanted == OTHER_FINGERPRINT
    assert machine.commands == []


@pytest.mark.parametrize("vouch", [False, True])
def test_a_changed_host_key_is_refused_even_when_vouched_for_and_the_way_to_forget_it_is_told(
    machine: Machine, vouch: bool
) -> None:
    async def run() -> Report:
        async with sshd(machine):
            old = HostKey("ssh-ed25519", asyncssh.generate_private_key("ssh-ed25519").public_data)
            machine.known_hosts.pin("127.0.0.1", machine.port, old)
            asked = Asked(machine.target, machine.fingerprint if vouch else None)
            (report,) = await check_hosts([asked], machine.access, QUICK)
            return report

    found = only_blocking(asyncio.run(run()))
    assert found.what == "host key changed"
    assert f"ssh-keygen -R '[127.0.0.1]:{machine.port}'" in found.fix
    assert machine.commands == []


def test_a_machine_is_asked_for_the_kind_of_key_that_it_is_known_by(machine: Machine) -> None:
    machine.host_key = asyncssh.generate_private_key("ecdsa-sha2-nistp256")

    async def run() -> Report:
        async with sshd(machine):
            key = HostKey("ecdsa-sha2-nistp256", machine.host_key.public_data)
            machine.known_hosts.pin("127.0.0.1", machine.port, key)
            (report,) = await check_hosts([Asked(machine.target)], machine.access, QUICK)
            return report

    assert asyncio.run(run()).fit


def test_a_key_that_is_not_authorized_names_the_line_to_add(machine: Machine) -> None:
    machine.client_key = asyncssh.generate_private_key("ssh-ed25519")
    found = only_blocking(check(machine))
    assert found.what == "login"
    assert f"{machine.access.key_file}.pub" in found.fix and "authorized_keys" in found.fix


def test_a_machine_vouched_for_that_does_not_let_us_in_is_pinned_all_the_same(machine: Machine) -> None:
    machine.client_key = asyncssh.generate_private_key("ssh-ed25519")
    assert only_blocking(check(machine, vouched=machine.fingerprint)).what == "login"
    assert machine.known_hosts.keys("127.0.0.1", machine.port) == (machine.pinned,)


def test_a_missing_key_or_a_broken_list_of_ours_is_said_to_be_ours(machine: Machine) -> None:
    machine.access.key_file.unlink()
    found = only_blocking(check(machine))
    assert found.what == "set-up here" and "omlx cluster init" in found.seen


# ------------------------------------------------------------------ it cannot be reached, or breaks off


def unreachable(where: Target, access: Access) -> Finding:
    (report,) = asyncio.run(check_hosts([Asked(where)], access, QUICK))
    return only_blocking(report)


def test_a_port_without_an_sshd_is_refused_at_once(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = unreachable(Target("127.0.0.1", "admin", port), machine.access)
    assert found.seen == "it takes no SSH connections" and "Remote Login" in found.fix


def test_a_name_that_nobody_has_is_told_as_such(machine: Machine) -> None:
    assert "no such name" in unreachable(Target("no-such-host.invalid", "admin", 22), machine.access).seen


def test_a_machine_that_is_cut_off_costs_the_connect_timeout_and_no_more(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "CONNECT_S", 0.3)
    # Takes connections, as the kernel does for a suspended machine, and never says a word.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        monkeypatch.setattr(ssh, "LOGIN_S", 0.3)
        found = unreachable(Target("127.0.0.1", "admin", mute.getsockname()[1]), machine.access)
    assert time.monotonic() - start < 3
    assert found.what == "connection" and found.fix


def test_a_connection_that_falls_silent_is_given_up_by_its_keepalive(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "KEEPALIVE_S", 0.1)

    async def suspended(process: Process) -> None:
        process.channel.get_connection()._transport.pause_reading()  # type: ignore[union-attr]
        await asyncio.sleep(3)

    start = time.monotonic()
    found = only_blocking(check(machine, suspended))
    assert time.monotonic() - start < 5
    assert found.what == "connection" and "broke off" in found.seen


def test_something_else_than_ssh_on_the_port_is_told(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            guest, _ = other.accept()
            with guest:
                guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        found = unreachable(Target("127.0.0.1", "admin", other.getsockname()[1]), machine.access)
        thread.join(5)
    assert found.what == "connection" and "broke off" in found.seen


def test_a_machine_that_is_lost_in_the_middle_is_told_as_lost(machine: Machine) -> None:
    async def die(process: Process) -> None:
        await process.stdin.read(100)
        process.channel.get_connection().abort()

    found = only_blocking(check(machine, die))
    assert found.what in ("connection", "probe") and found.fix


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=reboot", "a b", "a;b", "$(reboot)", "a\nb", "a/b", "x" * 300]
)
def test_a_host_that_a_program_could_take_for_something_else_goes_nowhere(host: str) -> None:
    with pytest.raises(Refused, match="host"):
        target(host, "admin", 22)


@pytest.mark.parametrize("user", ["", "-l", "a b", "a;b", "root\n", "~", "x" * 100])
def test_a_user_that_is_no_name_goes_nowhere(user: str) -> None:
    with pytest.raises(Refused, match="user"):
        target("studio.local", user, 22)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none_goes_nowhere(port: int) -> None:
    with pytest.raises(Refused, match="port"):
        target("studio.local", "admin", port)
