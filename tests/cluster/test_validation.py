"""A whole check of a machine, over real SSH to a real probe; and each way in which it fails."""

import asyncio
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster import validation
from omlx.cluster.findings import Report
from omlx.cluster.ssh import Target
from omlx.cluster.validation import START, Asked, Wanted, bulk_share_s, check_hosts
from tests.cluster.ssh_server import (
    QUICK,
    Answer,
    Machine,
    Process,
    check,
    only_blocking,
    run_shell,
    sshd,
    without_python,
)

OTHER_FINGERPRINT = "SHA256:" + "A" * 43


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


# ------------------------------------------------------------------ all is well


def test_a_known_machine_is_looked_at_over_one_connection_by_one_command(machine: Machine) -> None:
    report = check(machine)
    assert report.fit, report.findings
    assert machine.commands == [START]
    assert report.fingerprint == machine.fingerprint
    assert report.facts is not None and report.facts.versions["omlx"]
    found = {finding.what: finding for finding in report.findings}
    assert "127.0.0.1" in found["ports from here to there"].seen
    assert "127.0.0.1" in found["ports from there to here"].seen
    assert found["clock"].level == "fact"
    link = next(link for link in report.links if link.theirs == "127.0.0.1")
    assert link.round_trip_s and link.bytes_per_s_there and link.bytes_per_s_back


def test_nothing_is_left_on_the_machine(machine: Machine) -> None:
    check(machine)
    assert list(machine.home.iterdir()) == []


def test_a_model_is_compared_by_what_both_have_of_it(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")

    async def run() -> Report:
        async with sshd(machine):
            machine.pin()
            wanted = Wanted(model=str(folder), bulk_s=0.02)
            (report,) = await check_hosts([Asked(machine.target)], machine.access, wanted)
            return report

    seen = next(finding for finding in asyncio.run(run()).findings if finding.what == "model").seen
    assert "1 weight files" in seen and "sizes are the same" in seen


# ------------------------------------------------------------------ what answers there


def test_a_shells_banner_before_the_answers_is_passed_over(machine: Machine) -> None:
    async def banner(process: Process) -> None:
        process.stdout.write(b"Welcome!\n\xff\xfe\nomlx-probe 123 {}\nno newline")
        await machine.shell(process)

    assert check(machine, banner).fit


def says(data: bytes, code: int = 0, complaint: bytes = b"") -> Answer:
    async def answer(process: Process) -> None:
        process.stdout.write(data)
        process.stderr.write(complaint)
        process.exit(code)

    return answer


def test_a_login_that_is_not_allowed_to_run_commands_is_quoted_without_its_escapes(machine: Machine) -> None:
    found = only_blocking(check(machine, says(b"\x1b[31mThis account is not available\x1b[0m\n", 1)))
    assert found.what == "probe"
    assert "exit code 1" in found.seen and "This account is not available" in found.seen
    assert "\x1b" not in found.seen


def test_an_error_of_the_machines_shell_is_quoted(machine: Machine) -> None:
    found = only_blocking(check(machine, says(b"", 2, b"sh: 1: Syntax error\n")))
    assert "sh: 1: Syntax error" in found.seen


def marked(answer: str) -> Answer:
    """Knows the secret, and says something else."""

    async def lie(process: Process) -> None:
        size = int(await process.stdin.readline())
        await process.stdin.readexactly(size)
        secret = (await process.stdin.readline()).split(b'"')[3].decode()
        process.stdout.write(f"omlx-probe {secret} {answer}\n".encode())
        await process.stdin.read()

    return lie


@pytest.mark.parametrize("answer", ["not json", "{}", "[1, 2]", '{"port": 0, "look": {}}', "[" * 50_000])
def test_an_answer_that_is_not_our_probes_is_refused(machine: Machine, answer: str) -> None:
    found = only_blocking(check(machine, marked(answer)))
    assert found.what == "probe" and "none of our probe's" in found.seen


@pytest.mark.parametrize("piece", [b"x" * 65536, b"yes\n" * 16384])
def test_output_without_an_end_is_not_read_without_an_end(machine: Machine, piece: bytes) -> None:
    async def endless(process: Process) -> None:
        while True:
            process.stdout.write(piece)
            await process.stdout.drain()

    found = only_blocking(check(machine, endless))
    assert "sends more than" in found.seen and "shell prints" in found.fix


def test_a_machine_without_python_is_told_what_to_install(machine: Machine, tmp_path: Path) -> None:
    bare = without_python(tmp_path / "bare")

    async def shell(process: Process) -> None:
        await run_shell(process, process.command or "", bare)

    found = only_blocking(check(machine, shell))
    assert found.what == "omlx" and "pip install" in found.fix


def test_a_machine_that_takes_too_long_is_given_up_and_the_step_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "LOOK_S", 3.0)

    async def sleepy(process: Process) -> None:
        await process.stdin.read()

    start = time.monotonic()
    found = only_blocking(check(machine, sleepy))
    assert time.monotonic() - start < 8
    assert found.what == "time" and "to look at the machine" in found.seen


# ------------------------------------------------------------------ several, and names


def test_one_host_that_fails_hides_no_other_and_reports_come_in_the_order_asked(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def run() -> list[Report]:
        async with sshd(machine):
            machine.pin()
            dead = Asked(Target("127.0.0.1", "admin", port))
            return await check_hosts([dead, Asked(machine.target), dead], machine.access, QUICK)

    assert [report.fit for report in asyncio.run(run())] == [False, True, False]


def test_no_more_than_eight_are_looked_at_at_a_time(machine: Machine) -> None:
    inside, most = 0, 0

    async def count(process: Process) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.05)
        inside -= 1
        process.exit(1)

    async def run() -> list[Report]:
        async with sshd(machine, count):
            machine.pin()
            return await check_hosts([Asked(machine.target)] * 20, machine.access, QUICK)

    assert len(asyncio.run(run())) == 20
    assert 1 < most <= validation.MOST_AT_ONCE


@given(st.floats(0.01, 5), st.integers(0, 1000))
def test_all_that_are_measured_in_turn_are_through_within_their_time(wanted_s: float, hosts: int) -> None:
    share = bulk_share_s(wanted_s, hosts)
    assert 0 < share <= wanted_s
    side_by_side = min(hosts, validation.MOST_AT_ONCE)
    assert share * side_by_side * 2 * validation.MOST_MEASURED <= validation.ALL_BULK_S * 1.001


def test_what_the_remote_shell_is_told_is_one_line_for_any_shell() -> None:
    assert "\n" not in START and START.count("'") == 2
