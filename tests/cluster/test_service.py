"""Services: what their files say, read by other parsers, and what launchctl and systemctl are asked to do."""

import configparser
import os
import plistlib
import pwd
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster import service as services
from omlx.cluster.service import (
    Launchd,
    Service,
    Systemd,
    command_line,
    find_account,
    find_manager,
    plist,
    unit,
)
from omlx.errors import BadSetting, Refused

DEPLOY = Path(__file__).parents[2] / "deploy"

FAKE = """#!/bin/sh
echo "$0 $*" >> "$RECORD"
case "$*" in
  *"$FAILS"*) echo "Bootstrap failed: 5: Input/output error" >&2; exit 5;;
  *MainPID*) echo "${PID:-0}";;
  print*) [ -z "$PID" ] && { echo "Could not find service" >&2; exit 113; }
    printf 'ai.omlx.node = {\\n\\tactive count = 1\\n\\tpid = %s\\n}\\n' "$PID";;
esac
"""


class Recorded:
    """Programs first in PATH that write down what they are called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._record = folder / "record"
        for name in ("launchctl", "systemctl"):
            program = folder / name
            program.write_text(FAKE)
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")
        monkeypatch.setenv("RECORD", str(self._record))
        self.say(pid="", fails="no such words")

    def say(self, *, pid: str | None = None, fails: str | None = None) -> None:
        for name, value in (("PID", pid), ("FAILS", fails)):
            if value is not None:
                self._monkeypatch.setenv(name, value)

    def calls(self) -> list[str]:
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        self._record.unlink(missing_ok=True)
        return [line.rsplit("/launchctl ", 1)[-1].rsplit("/systemctl ", 1)[-1] for line in lines]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    (tmp_path / "programs").mkdir()
    return Recorded(tmp_path / "programs", monkeypatch)


def service(*command: str, user: str | None = None, log: str = "/home/me/.omlx/logs/node.log") -> Service:
    words = command or ("/opt/omlx/bin/omlx", "node", "run")
    return Service("ai.omlx.node", "omlx-node", "oMLX node", words, Path(log), user)


def parsed(text: bytes) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text.decode())
    return parser


# ------------------------------------------------------------------ texts


def test_a_plist_starts_the_program_always_and_logs_into_one_file() -> None:
    words = ("/Users/me & you/venv/bin/omlx", "node", "run", "--address", "<10.0.0.2>")
    said = plistlib.loads(plist(service(*words)))
    assert said["Label"] == "ai.omlx.node"
    assert tuple(said["ProgramArguments"]) == words
    assert said["RunAtLoad"] is True and said["KeepAlive"] is True
    assert said["StandardOutPath"] == said["StandardErrorPath"] == "/home/me/.omlx/logs/node.log"
    assert said["Umask"] == 0o077
    assert "UserName" not in said
    assert plistlib.loads(plist(service(user="me")))["UserName"] == "me"


def test_a_unit_starts_the_program_always_and_logs_into_one_file() -> None:
    said = parsed(unit(service(user="me", log="/var/log/100%.log"), system=True))
    assert shlex.split(said["Service"]["ExecStart"]) == ["/opt/omlx/bin/omlx", "node", "run"]
    assert said["Service"]["Restart"] == "always"
    assert said["Service"]["User"] == "me"
    assert said["Service"]["StandardOutput"] == "append:/var/log/100%%.log"
    assert said["Unit"]["StartLimitIntervalSec"] == "0"
    assert said["Install"]["WantedBy"] == "multi-user.target"
    users = parsed(unit(service(), system=False))
    assert users["Install"]["WantedBy"] == "default.target"
    assert "User" not in users["Service"] and "After" not in users["Unit"]


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126)), min_size=1, max_size=5))
def test_no_argument_is_more_than_text_to_systemd(arguments: list[str]) -> None:
    line = command_line(["/bin/omlx", *arguments])
    # shlex undoes quotes and backslashes as systemd does; specifiers and variables we undo ourselves.
    undone = shlex.split(line.replace("$$", "\x00"))
    assert [word.replace("\x00", "$").replace("%%", "%") for word in undone] == ["/bin/omlx", *arguments]
    assert "$" not in line.replace("$$", "") and "%" not in line.replace("%%", "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ("omlx", "node")},
        {"command": ("/bin/omlx", "a\nExecStartPre=/bin/evil")},
        {"log": Path("/tmp/a\nUser=root")},
        {"log": Path("node.log")},
        {"user": "me\nExecStart=/bin/evil"},
        {"user": "-oProxy"},
        {"unit": "../../evil"},
        {"label": "a/b"},
        {"title": "a\n[Install]"},
    ],
)
def test_what_would_be_another_line_of_a_service_file_is_refused(wrong: dict[str, object]) -> None:
    plain: dict[str, object] = {
        "label": "ai.omlx.node",
        "unit": "omlx-node",
        "title": "oMLX node",
        "command": ("/bin/omlx",),
        "log": Path("/tmp/log"),
    }
    with pytest.raises(BadSetting):
        Service(**(plain | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "words"), [("node", ("node", "run")), ("coordinator", ("serve",))])
def test_what_lies_in_deploy_is_what_would_be_installed(name: str, words: tuple[str, ...]) -> None:
    title = {"node": "oMLX node: announces this machine", "coordinator": "oMLX coordinator: omlx serve"}[name]

    def template(home: str) -> Service:
        program, log = f"{home}/.omlx/venv/bin/omlx", Path(f"{home}/.omlx/logs/{name}.log")
        return Service(f"ai.omlx.{name}", f"omlx-{name}", title, (program, *words), log)

    assert (DEPLOY / f"ai.omlx.{name}.plist").read_bytes() == plist(template("/Users/YOU"))
    assert (DEPLOY / f"omlx-{name}.service").read_bytes() == unit(template("/home/YOU"), system=False)


# ------------------------------------------------------------------ in and out


def test_launchd_is_asked_to_take_the_new_file_in_place_of_the_old(
    tmp_path: Path, recorded: Recorded
) -> None:
    manager = Launchd("gui/501", tmp_path / "LaunchAgents", tmp_path / "LaunchDaemons")
    manager.put_in(service())
    file = tmp_path / "LaunchAgents/ai.omlx.node.plist"
    assert file.read_bytes() == plist(service())
    assert file.stat().st_mode & 0o777 == 0o644
    assert recorded.calls() == [
        "bootout gui/501/ai.omlx.node",
        "enable gui/501/ai.omlx.node",
        f"bootstrap gui/501 {file}",
    ]
    assert manager.pid(service()) is None
    recorded.say(pid="4711")
    assert manager.pid(service()) == 4711


def test_launchd_that_does_not_take_it_is_asked_again_and_then_quoted(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "BOOTSTRAP_S", 0.3)
    recorded.say(fails="bootstrap")
    with pytest.raises(Refused, match=r"5: Input/output error; if nobody is logged in .* with sudo"):
        Launchd("gui/501", tmp_path, tmp_path / "other").put_in(service())
    assert sum(call.startswith("bootstrap") for call in recorded.calls()) > 1


def test_launchd_stops_it_before_the_file_goes(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Launchd("system", tmp_path, tmp_path / "other")
    assert not manager.take_out(service())
    manager.put_in(service())
    recorded.calls()
    monkeypatch.setattr(services, "ENDS_WITHIN_S", 0.2)
    recorded.say(pid="4711")
    with pytest.raises(Refused, match="it still runs"):
        manager.take_out(service())
    assert manager.file(service()).exists()
    recorded.say(pid="")
    assert manager.take_out(service())
    assert not manager.file(service()).exists()
    assert recorded.calls()[0] == "bootout system/ai.omlx.node"


@pytest.mark.parametrize("scope", ["--system", "--user"])
def test_systemd_is_asked_to_read_enable_and_start_it_and_the_reverse(
    tmp_path: Path, recorded: Recorded, scope: str
) -> None:
    manager = Systemd(scope == "--system", tmp_path / "units", tmp_path / "other")
    assert not manager.take_out(service())
    assert recorded.calls() == []
    for _ in range(2):
        manager.put_in(service())
        assert recorded.calls() == [
            f"{scope} --no-ask-password daemon-reload",
            f"{scope} --no-ask-password enable omlx-node.service",
            f"{scope} --no-ask-password restart omlx-node.service",
        ]
    assert [path.name for path in (tmp_path / "units").iterdir()] == ["omlx-node.service"]
    assert manager.pid(service()) is None
    recorded.say(pid="4711")
    assert manager.pid(service()) == 4711
    recorded.calls()
    assert manager.take_out(service())
    assert recorded.calls() == [
        f"{scope} --no-ask-password disable --now omlx-node.service",
        f"{scope} --no-ask-password daemon-reload",
    ]
    assert not manager.file(service()).exists()


def test_systemd_that_refuses_is_quoted(tmp_path: Path, recorded: Recorded) -> None:
    recorded.say(fails="enable")
    with pytest.raises(Refused, match=r"systemctl --user enable omlx-node.service: Bootstrap failed"):
        Systemd(False, tmp_path, tmp_path / "other").put_in(service())


def test_a_service_of_the_system_is_seen_by_its_user(tmp_path: Path) -> None:
    users = Launchd("gui/501", tmp_path / "mine", tmp_path / "systems")
    assert users.elsewhere(service()) is None
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems/ai.omlx.node.plist").touch()
    assert users.elsewhere(service()) == tmp_path / "systems/ai.omlx.node.plist"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, recorded: Recorded) -> None:
    (tmp_path / "units").write_text("a file")
    with pytest.raises(Refused, match=r"service file .*/units/omlx-node\.service: "):
        Systemd(False, tmp_path / "units", tmp_path / "other").put_in(service())
    assert recorded.calls() == []


def test_a_manager_that_hangs_is_given_up(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "CALL_S", 0.2)
    (tmp_path / "programs/systemctl").write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(Refused, match=r"systemctl --user .* has not returned within 0.2 s"):
        Systemd(False, tmp_path, tmp_path / "other").put_in(service())


def test_without_any_manager_it_says_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=r"there is no (systemctl|launchctl) here.*`omlx node run`"):
        find_manager(find_account())


def test_with_sudo_the_service_is_for_the_one_who_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    somebody = next(one for one in pwd.getpwall() if one.pw_uid != 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", somebody.pw_name)
    account = find_account()
    assert (account.name, account.home, account.own) == (somebody.pw_name, Path(somebody.pw_dir), False)
    monkeypatch.delenv("SUDO_USER")
    assert find_account().own
    monkeypatch.setenv("SUDO_USER", "no-such-account")
    with pytest.raises(BadSetting, match="no such account"):
        find_account()
