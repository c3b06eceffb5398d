"""`omlx node` as its user meets it: a real agent, and a pretended systemd that really starts it."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omlx import node_commands
from omlx.cluster.discovery import browsing, multicast
from omlx.cluster.node_agent import holder, only_one
from omlx.cluster.roster import Lost, Seen
from omlx.cluster.service import Account, Service, Systemd
from omlx.errors import BadSetting, Refused
from omlx.node_commands import check_addresses, find_program, node_service
from tests.cluster.hearing import event_of

MAIN = """
from omlx.cli import main
main()
"""
INSTALL = Path(__file__).parents[1] / "deploy/install.sh"
OMLX = [sys.executable, "-c", MAIN]
HERE = ("--address", "127.0.0.1")
STARTS_WITHIN_S = 20.0

SYSTEMCTL = """\
#!{python} -ES
# Keeps one service running, as its file says.
import fcntl, os, shlex, signal, subprocess, sys
from pathlib import Path

folder = Path(__file__).parent
kept = folder / "pid"

def end():
    if kept.exists():
        os.kill(int(kept.read_text()), signal.SIGTERM)
        kept.unlink()
        with (folder / "home/.omlx/node.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)

def start():
    unit = (folder / "units/omlx-node.service").read_text()
    command = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    process = subprocess.Popen(
        shlex.split(command.removeprefix("ExecStart=")),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    kept.write_text(str(process.pid))

match sys.argv[3]:
    case "restart":
        end()
        start()
    case "disable":
        end()
    case "show":
        print(kept.read_text() if kept.exists() else 0)
"""


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"HOME": str(home), "COLUMNS": "200"}


def omlx(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OMLX, *words], capture_output=True, text=True, timeout=60, check=False, env=environment(home)
    )


@contextmanager
def agent(home: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*OMLX, "node", "run", *HERE, *words], stdout=subprocess.PIPE, text=True, env=environment(home)
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_agent_is_seen_refuses_a_second_one_and_says_goodbye(tmp_path: Path) -> None:
    async def main(process: subprocess.Popen[str]) -> None:
        said = json.loads(await asyncio.to_thread(first_line, process))
        assert said["pid"] == process.pid
        assert (said["addresses"], said["ssh_port"], said["cluster"]) == (["127.0.0.1"], 2222, None)
        async with multicast(lambda: HERE[1:]) as sockets, browsing(sockets) as browser:
            seen = await event_of(browser, said["id"])
            assert isinstance(seen, Seen)
            assert (seen.node.addresses, seen.node.ssh_port) == (("127.0.0.1",), 2222)
            assert seen.node.agent_port is None and seen.node.memory_bytes is not None
            second = await asyncio.to_thread(omlx, tmp_path, "node", "run", *HERE)
            assert second.returncode == 2 and second.stdout == ""
            assert second.stderr.startswith(f"omlx: already running, pid {process.pid} ")
            assert len(second.stderr.strip().splitlines()) == 1
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await event_of(browser, said["id"], lambda event: isinstance(event, Lost))
            assert await asyncio.to_thread(process.wait, 10) == 0
            assert time.monotonic() - start < 3.0

    with agent(tmp_path, "--json", "--ssh-port", "2222") as process:
        asyncio.run(main(process))


def test_a_killed_agent_leaves_no_lock_in_the_way_and_keeps_its_id(tmp_path: Path) -> None:
    lock = tmp_path / ".omlx/node.lock"
    with agent(tmp_path) as process:
        line = first_line(process)
        name, id = line.split()[:2]
        assert line == f"{name} {id} is announced at 127.0.0.1; no cluster"
        found = holder(lock)
        assert found is not None and (found.pid, found.announced) == (process.pid, True)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert lock.exists() and holder(lock) is None
    with agent(tmp_path) as process:
        assert first_line(process).split()[1] == id
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0


def test_without_zeroconf_it_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.modules['zeroconf'] = None; sys.argv[1:] = ['node', 'run']{MAIN}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(tmp_path),
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "omlx: omlx node needs zeroconf, which is not installed; pip install 'omlx-cluster[cluster]'"
    )


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    done = omlx(tmp_path, "node", "run", "--address", "studio.local")
    assert done.returncode == 2 and "--address 'studio.local' is no IPv4 address" in done.stderr
    with pytest.raises(BadSetting):
        check_addresses(["fe80::1"])


# ------------------------------------------------------------------ install, uninstall


class Machine:
    """Somebody's account on a machine with a systemd that is pretended, but starts what it is told to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.account = Account("me", folder / "home", False)
        self.manager = Systemd(False, folder / "units", folder / "systems")
        self._program("systemctl", SYSTEMCTL.format(python=sys.executable))
        self._program("omlx", f'#!/bin/sh\nexport HOME={self.account.home}\nexec {shlex.join(OMLX)} "$@"\n')
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(node_commands, "find_account", lambda: self.account)
        monkeypatch.setattr(node_commands, "find_manager", lambda _: self.manager)
        monkeypatch.setattr(node_commands, "find_program", lambda _: str(folder / "omlx"))

    def _program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    @property
    def unit(self) -> Path:
        return self.folder / "units/omlx-node.service"

    @property
    def lock(self) -> Path:
        return self.account.home / ".omlx/node.lock"

    def end(self) -> None:
        found = holder(self.lock)
        if found is not None and found.pid not in (None, os.getpid()):
            os.kill(found.pid, signal.SIGKILL)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(node_commands, "RUNS_WITHIN_S", STARTS_WITHIN_S)
    made = Machine(tmp_path, monkeypatch)
    yield made
    made.end()


def called(*words: str) -> str:
    done = CliRunner().invoke(node_commands.app, [*words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_installed_it_runs_again_it_is_brought_up_to_date_and_uninstalled_it_is_gone(
    machine: Machine,
) -> None:
    first = json.loads(called("install", "--json", *HERE))
    running = holder(machine.lock)
    assert running is not None and running.pid == first["pid"]
    assert first["file"] == str(machine.unit) and first["scope"] == "user"
    assert first["command"] == [str(machine.folder / "omlx"), "node", "run", *HERE]
    assert first["log"] == str(machine.account.home / ".omlx/logs/node.log")
    assert (machine.account.home / ".omlx/logs").stat().st_mode & 0o777 == 0o700
    assert first["undo"].endswith("omlx node uninstall")

    again = called("install", *HERE, "--ssh-port", "2222").splitlines()
    assert again[0] == f"wrote {machine.unit}"
    assert "omlx node runs as me, pid " in again[1]
    assert '"--ssh-port" "2222"' in machine.unit.read_text()
    running = holder(machine.lock)
    assert running is not None and running.pid != first["pid"] and f"pid {running.pid};" in again[1]

    assert called("uninstall").startswith(
        f"stopped, and removed {machine.unit}; node.json, cluster and logs in"
    )
    assert holder(machine.lock) is None and not machine.unit.exists()
    assert called("uninstall").startswith(f"nothing was installed: there is no {machine.unit}")
    assert json.loads(called("uninstall", "--json"))["removed"] is False


def test_an_agent_started_by_hand_is_in_the_way_and_nothing_is_written(machine: Machine) -> None:
    with (
        only_one(machine.lock),
        pytest.raises(Refused, match=rf"by hand: end it first \(pid {os.getpid()}\)"),
    ):
        called("install")
    assert not machine.unit.exists()


def test_a_service_that_does_not_come_up_is_told_by_its_own_last_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_commands, "RUNS_WITHIN_S", 0.5)
    log = machine.account.home / ".omlx/logs/node.log"
    machine._program("omlx", f"#!/bin/sh\necho 'omlx: mDNS cannot share \x1bUDP port 5353' > {log}\n")
    with pytest.raises(
        Refused, match=r"does not run after 0\.5 s: omlx: mDNS cannot share UDP port 5353 \(in "
    ):
        called("install")


def test_a_service_of_the_whole_machine_is_not_installed_beside(machine: Machine) -> None:
    (machine.folder / "systems").mkdir()
    (machine.folder / "systems/omlx-node.service").touch()
    with pytest.raises(
        Refused, match=r"installed as .*systems/omlx-node\.service already: sudo omlx node uninst"
    ):
        called("install")
    assert f"there is {machine.folder}/systems/omlx-node.service too" in called("uninstall")


def test_for_another_account_nothing_is_written_into_its_folders() -> None:
    service: Service = node_service(Account("me", Path("/home/me"), True), "/home/me/venv/bin/omlx", (), 22)
    assert (service.user, service.log) == ("me", Path("/var/log/omlx-node.log"))
    service = node_service(Account("root", Path("/root"), True), "/opt/venv/bin/omlx", (), 22)
    assert (service.user, service.log) == (None, Path("/root/.omlx/logs/node.log"))


def test_the_program_is_this_pythons_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    account = Account("me", tmp_path, False)
    assert find_program(account) == str(Path(sys.executable).parent / "omlx")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(BadSetting, match="there is no program"):
        find_program(account)
    (tmp_path / "omlx").write_text("#!/bin/sh\n")
    (tmp_path / "omlx").chmod(0o755)
    assert find_program(account) == str(tmp_path / "omlx")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_roots_service_runs_no_program_of_another_account(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    (tmp_path / "omlx").write_text("#!/bin/sh\n")
    (tmp_path / "omlx").chmod(0o755)
    os.chown(tmp_path / "omlx", 1, 1)
    with pytest.raises(BadSetting, match=r"omlx is not root's, and root's service would run it"):
        find_program(Account("root", Path("/root"), True))


# ------------------------------------------------------------------ deploy/install.sh

PYTHON = """#!/bin/sh
# A Python 3.13 that makes environments of copies of itself.
echo "$(basename "$0") $*" >> "$RECORD"
case "$1 $2" in
  "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && cp "$0" "$4/bin/omlx";;
  "-V ") echo "Python 3.13.0";;
esac
"""


def install_sh(
    home: Path, *words: str, script: Path = INSTALL, more: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    programs, record = home / "programs", home / "record"
    programs.mkdir(exist_ok=True)
    (programs / "python3.13").write_text(PYTHON)
    (programs / "python3.13").chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(script), *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "RECORD": str(record)} | (more or {}),
    )
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return done, [line for line in lines if " -c " not in line and not line.endswith(" -V")]


def test_the_script_installs_its_checkout_and_puts_the_service_in(tmp_path: Path) -> None:
    done, calls = install_sh(tmp_path)
    assert done.returncode == 0, done.stderr
    pip = "python -m pip install --quiet --disable-pip-version-check --upgrade"
    extras = "cluster" if sys.platform == "darwin" else "cluster,cpu"
    assert calls == [
        f"python3.13 -m venv --clear {tmp_path}/.omlx/venv",
        f"{pip} {INSTALL.parents[1]}[{extras}]",
        "omlx node install",
    ]
    assert (tmp_path / ".omlx").stat().st_mode & 0o777 == 0o700
    _, again = install_sh(tmp_path, "--no-service")
    assert again == calls[1:2]
    away = tmp_path / "install.sh"
    away.write_text(INSTALL.read_text())
    assert install_sh(tmp_path, script=away)[1][0] == f"{pip} omlx-cluster[{extras}]"
    (tmp_path / "-a wheel").touch()
    given = install_sh(tmp_path, str(tmp_path / "-a wheel"), "--no-service")
    assert given[1] == [f"{pip} {tmp_path}/-a wheel[{extras}]"]


def test_the_script_says_what_is_wrong_and_does_nothing(tmp_path: Path) -> None:
    for words, more, said in (
        (("--sytem",), {}, "there is no option --sytem"),
        (("nowhere.whl",), {}, "there is no nowhere.whl"),
        ((), {"SUDO_USER": "me"}, "start it without sudo"),
        ((), {"PATH": str(tmp_path)}, "no Python 3.11, 3.12 or 3.13"),
    ):
        done, calls = install_sh(tmp_path, *words, more=more)
        assert done.returncode == 2 and said in done.stderr, done
        assert calls == []
    assert not (tmp_path / ".omlx").exists()
