"""`omlx cluster check`: what a person sees, what a script reads, and the exit code."""

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import asyncssh
import pytest
import typer
from typer.testing import CliRunner, Result

from omlx import check_command
from omlx.cluster import validation
from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.trust import init_trust
from omlx.errors import BadSetting, Refused
from tests.cluster.ssh_server import Machine, sshd

app = typer.Typer()
app.command()(check_command.check)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init_trust(tmp_path / "cluster", "head", ["localhost"], ["127.0.0.1"])
    return tmp_path / "cluster"


@pytest.fixture
def machine(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine that lets our cluster's key in, in a thread of its own: the command has a loop of its own."""
    monkeypatch.setattr(validation, "Wanted", partial(validation.Wanted, bulk_s=0.02))
    ours = asyncssh.read_private_key(folder / "authority" / "ssh_key")
    with served(Machine(tmp_path / "machine", client_key=ours)) as running:
        yield running


@contextmanager
def served(machine: Machine) -> Iterator[Machine]:
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with sshd(machine):
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        yield machine
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def run(folder: Path, machine: Machine, *more: str) -> Result:
    where = ["--user", "admin", "--port", str(machine.port), "--folder", str(folder)]
    return CliRunner().invoke(app, ["127.0.0.1", *where, *more])


def test_a_fingerprint_that_was_compared_lets_a_machine_in_and_the_next_check_needs_none(
    folder: Path, machine: Machine
) -> None:
    first = run(folder, machine, "--fingerprint", machine.fingerprint)
    assert first.exit_code == 0 and "can join" in first.output
    assert KnownHosts(folder / "known_hosts").keys("127.0.0.1", machine.port) == (machine.pinned,)
    assert run(folder, machine).exit_code == 0


def test_an_unknown_machine_is_exit_code_1_and_nobody_is_asked_where_nobody_sits(
    folder: Path, machine: Machine
) -> None:
    result = run(folder, machine, "--json")
    (report,) = json.loads(result.stdout)
    assert result.exit_code == 1 and report["fit"] is False
    assert report["fingerprint"] == machine.fingerprint
    assert report["findings"][0]["what"] == "host key unknown"
    assert machine.commands == []


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 1)])
def test_a_person_who_sits_there_is_shown_the_fingerprint_and_asked(
    folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, answer: bool, code: int
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(check_command, "vouches", lambda report: asked.append(report.fingerprint) or answer)
    monkeypatch.setattr("sys.stdin", Terminal())
    ended = 0
    try:
        check_command.check(["127.0.0.1"], user="admin", port=machine.port, folder=folder)
    except typer.Exit as exit:
        ended = exit.exit_code
    assert (asked, ended) == ([machine.fingerprint], code)


class Terminal(io.StringIO):
    """Somebody sits there."""

    def isatty(self) -> bool:
        return True


def test_the_question_shows_the_host_and_the_fingerprint_and_no_is_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions: list[tuple[str, bool]] = []

    def confirm(text: str, default: bool, err: bool) -> bool:
        questions.append((text, default))
        return default

    monkeypatch.setattr(typer, "confirm", confirm)
    report = check_command.Report("studio.local", "admin", 22, "SHA256:abc", ())
    assert check_command.vouches(report) is False
    assert questions == [("Is it the same?", False)]
    shown = capsys.readouterr().err
    assert "studio.local" in shown and "SHA256:abc" in shown and "ssh-keygen -lf" in shown


def test_one_fingerprint_is_of_one_machine(folder: Path) -> None:
    with pytest.raises(BadSetting, match="one machine"):
        check_command.check(["a", "b"], fingerprint="SHA256:" + "A" * 43, folder=folder)


def test_a_host_that_is_an_option_is_refused_before_anything_is_connected(folder: Path) -> None:
    with pytest.raises(Refused, match="neither a name nor an address"):
        check_command.check(["-oProxyCommand=reboot"], user="admin", folder=folder)


def test_without_a_cluster_one_is_told_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="init"):
        check_command.check(["a"], user="admin", folder=tmp_path / "none")


def test_what_a_machine_says_is_shown_and_not_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    finding = check_command.Finding("probe", "blocking", "[red]said[/]", "[b]", "[link=x]do[/link]")
    check_command.show(check_command.Report("h", "u", 22, None, (finding,)))
    shown = capsys.readouterr().out
    assert "[red]said[/]" in shown and "[link=x]do[/link]" in shown and "cannot join" in shown
