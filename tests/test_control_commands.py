"""`omlx cluster status`, `activate`, `deactivate`, `rebalance` and `leave` against a running server."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from omlx import cluster_commands
from omlx.cluster import joining
from omlx.cluster.members import Joined, add_member, read_members
from omlx.cluster.nodes import NodeId
from omlx.cluster.trust import Trust, init_trust, issue
from omlx.errors import BadSetting, DoesNotFit, Full, ModelNotFound, OmlxError, Refused
from tests.control_server import MAP, MINI, ScriptedControl, in_a_thread, with_lost_stage
from tests.test_cli import OMLX, omlx, refused
from tests.walk.servers import free_port, has_ended, serve, wait_until

KEY = "correct-horse"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The server under test logs in this process."""
    with capture_logs():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster that mini has joined; nobody listens where it is said to be."""
    trust = init_trust(tmp_path / "cluster", "head", ["localhost"], ["127.0.0.1"])
    issue(trust, MINI, [], ["127.0.0.1"])
    joined = Joined(
        id=NodeId(MINI),
        name="mini",
        host="127.0.0.1",
        user="admin",
        port=free_port(),
        fingerprint="SHA256:" + "A" * 43,
        chip="Apple M4",
        memory_bytes=16 * 10**9,
        addresses=("127.0.0.1",),
        links=(),
        joined_at=datetime.now(UTC),
    )
    add_member(trust.folder, joined)
    return trust.folder


def run(*words: str | int | Path, **environment: str) -> Result:
    return CliRunner().invoke(
        cluster_commands.app, [str(word) for word in words], env={"COLUMNS": "200"} | environment
    )


def done(result: Result) -> Result:
    assert result.exit_code == 0, (result.output, result.exception)
    return result


# ------------------------------------------------------------------ status


def test_status_shows_what_the_server_says_and_what_is_on_disk(folder: Path) -> None:
    with in_a_thread(ScriptedControl()) as port:
        text = done(run("status", "--port", port, "--folder", folder)).stdout
    assert f"studio 0-15 {'█' * 32} mini 16-23 {'█' * 16}" in text
    for word in ("64.00 GB", "3 running, 4 waiting", "admin@127.0.0.1", "Apple M4", "364 days"):
        assert word in text


def test_status_as_json_has_the_nodes_of_the_disk_and_the_servers_map(folder: Path) -> None:
    with in_a_thread(ScriptedControl()) as port:
        said = json.loads(done(run("status", "--port", port, "--folder", folder, "--json")).stdout)
    assert (said["server"], [node["id"] for node in said["nodes"]]) == (f"127.0.0.1:{port}", [MINI])
    assert said["shard_map"]["models"][0]["stages"][1]["end"] == 24


def test_status_without_a_server_is_what_is_on_disk_and_says_so(folder: Path) -> None:
    port = free_port()
    result = done(run("status", "--port", port, "--folder", folder))
    assert "Apple M4" in result.stdout and f"no server answers at 127.0.0.1:{port}" in result.stderr
    said = json.loads(done(run("status", "--port", port, "--folder", folder, "--json")).stdout)
    assert (said["server"], said["shard_map"], said["nodes"][0]["name"]) == (None, None, "mini")


def test_status_of_a_machine_in_no_cluster_is_what_its_server_says(tmp_path: Path) -> None:
    with in_a_thread(ScriptedControl()) as port:
        text = done(run("status", "--port", port, "--folder", tmp_path / "none")).stdout
    assert "mini 16-23" in text
    assert isinstance(run("status", "--port", port, "--folder", tmp_path / "none").exception, BadSetting)


def test_status_of_a_server_that_wants_its_key_falls_back_and_says_which_setting(folder: Path) -> None:
    with in_a_thread(ScriptedControl(), api_key=KEY) as port:
        where = ("status", "--port", port, "--folder", folder)
        without, with_key = done(run(*where)), done(run(*where, OMLX_API_KEY=KEY))
    assert "OMLX_API_KEY" in without.stderr and "mini 16-23" not in without.stdout
    assert "mini 16-23" in with_key.stdout


def test_status_beside_another_kind_of_server_says_that_it_is_none(folder: Path) -> None:
    with in_a_thread(None) as port:
        result = done(run("status", "--port", port, "--folder", folder))
    assert "no omlx server of this version" in result.stderr and "Apple M4" in result.stdout


def test_watching_and_json_contradict_each_other() -> None:
    assert isinstance(run("status", "--watch", "--json").exception, BadSetting)


class Screen:
    """A terminal that `omlx cluster status --watch` draws on."""

    def __init__(self, port: int, home: Path) -> None:
        self.text = ""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*OMLX, "cluster", "status", "--watch", "--port", str(port)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"HOME": str(home), "COLUMNS": "150", "LINES": "50", "TERM": "xterm"},
        )
        os.close(theirs)

    def shows(self, pattern: str, within_s: float = 60.0) -> bool:
        """Reads on until the pattern is there."""
        end = time.monotonic() + within_s
        while not re.search(pattern, self.text, re.DOTALL) and time.monotonic() < end:
            if not self._read(end - time.monotonic()):
                break
        return re.search(pattern, self.text, re.DOTALL) is not None

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        while self._read(10.0):
            pass
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._ours)

    def _read(self, within_s: float) -> bool:
        if not select.select([self._ours], [], [], max(0.0, within_s))[0]:
            return False
        try:
            piece = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)


def test_watching_draws_again_survives_the_server_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    control, port = ScriptedControl(), free_port()
    with in_a_thread(control, port=port):
        screen = Screen(port, tmp_path)
        try:
            assert screen.shows("studio (\x1b[^m]*m)?0-15|studio 0-15"), screen.text
            control.map = with_lost_stage(MAP)
            assert screen.shows("lost: mini 16-23"), screen.text
        except BaseException:
            screen.close()
            raise
    try:
        assert screen.shows(r"no answer from the server since \d+ s"), screen.text
        control.map, screen.text = MAP, ""
        with in_a_thread(control, port=port):
            assert screen.shows("3 running, 4 waiting"), screen.text
            assert screen.interrupt() == 0
        assert "Traceback" not in screen.text and "Aborted" not in screen.text
    finally:
        screen.close()


# ------------------------------------------------------------------ orders


def test_orders_arrive_and_are_confirmed_in_a_line() -> None:
    control = ScriptedControl()
    with in_a_thread(control) as port:
        assert "Org/Name is idle, after" in done(run("activate", "Org/Name", "--port", port)).stdout
        text = done(run("deactivate", "Org/Name", "--within", 5, "--port", port)).stdout
        assert "Org/Name is not loaded any more" in text
        shown = done(run("rebalance", "tiny", "--dry-run", "--port", port)).stdout
        assert "+4 layers" in shown and "nothing was moved (--dry-run)" in shown
        assert done(run("rebalance", "tiny", "--port", port)).stdout.endswith("moved\n")
    assert control.asked == [
        ("activate", "Org/Name"),
        ("deactivate", "Org/Name", 5.0),
        ("rebalance", "tiny", True),
        ("rebalance", "tiny", False),
    ]


def test_orders_as_json_are_one_object() -> None:
    with in_a_thread(ScriptedControl()) as port:
        for words in (("activate", "tiny"), ("deactivate", "tiny")):
            said = json.loads(done(run(*words, "--port", port, "--json")).stdout)
            assert said == {"id": "tiny", "state": "ready"}
        said = json.loads(done(run("rebalance", "tiny", "--port", port, "--json")).stdout)
    assert said["moved"] is True and said["gain"] == 1.5


def test_the_key_and_the_port_come_from_the_settings() -> None:
    control = ScriptedControl()
    with in_a_thread(control, api_key=KEY) as port:
        done(run("activate", "tiny", OMLX_PORT=str(port), OMLX_API_KEY=KEY))
        wrong = run("activate", "tiny", OMLX_PORT=str(port), OMLX_API_KEY="wrong-horse")
    assert control.asked == [("activate", "tiny")]
    assert isinstance(wrong.exception, BadSetting) and "OMLX_API_KEY" in str(wrong.exception)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (BadSetting("nothing to move to"), Refused),
        (ModelNotFound("it went away"), Refused),
        (DoesNotFit("3 GB short", 3), Refused),
        (Full("another one is under way"), Full),
        (OmlxError("a stage did not start"), OmlxError),
    ],
)
def test_what_the_server_refuses_is_told_in_its_words(failure: OmlxError, kind: type[OmlxError]) -> None:
    with in_a_thread(ScriptedControl(failure=failure)) as port:
        error = run("rebalance", "tiny", "--port", port).exception
    assert type(error) is kind and str(failure) in str(error)


def test_without_a_server_an_order_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    port = str(free_port())
    for words in (("activate", "m"), ("deactivate", "m"), ("rebalance", "m", "--dry-run")):
        line = refused("cluster", *words, "--port", port, HOME=str(tmp_path))
        assert f"no server answers at 127.0.0.1:{port}" in line and "omlx serve" in line


def test_an_unknown_model_is_one_line_that_names_those_there_are(tmp_path: Path) -> None:
    with in_a_thread(ScriptedControl()) as port:
        line = refused("cluster", "activate", "Org/Other", "--port", str(port), HOME=str(tmp_path))
    assert "'Org/Other'" in line and "Org/Name" in line


@pytest.mark.parametrize(
    "command", ["status", "rebalance", "activate", "deactivate", "doctor", "leave", "init", "join"]
)
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    assert f"Example: omlx cluster {command}" in done(run(command, "--help")).stdout


# ------------------------------------------------------------------ leave


def names(folder: Path) -> list[str]:
    return [node.name for node in read_members(folder)]


def test_a_node_is_drained_by_the_server_before_it_leaves(folder: Path) -> None:
    control = ScriptedControl()
    with in_a_thread(control) as port:
        text = done(run("leave", "mini", "--port", port, "--folder", folder)).stdout
    assert control.asked == [("drain", MINI)] and names(folder) == []
    assert text.index("holds no layers any more") < text.index("no node of this cluster any more")


def test_a_node_that_cannot_be_drained_stays_unless_it_shall_leave_now(folder: Path) -> None:
    control = ScriptedControl(failure=DoesNotFit("the rest is 3 GB short", 3))
    with in_a_thread(control) as port:
        where = ("--port", port, "--folder", folder)
        error = run("leave", "mini", *where).exception
        assert isinstance(error, Refused) and "3 GB short" in str(error) and "--now" in str(error)
        assert names(folder) == ["mini"]
        said = json.loads(done(run("leave", "mini", "--now", "--json", *where)).stdout)
    assert said["drained"] is False and names(folder) == []


def test_a_node_that_is_drained_and_then_cannot_leave_is_given_back_to_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def let_go(trust: Trust, node: Joined) -> None:
        raise BadSetting("the ledger is held by another command")

    monkeypatch.setattr(joining, "leave", let_go)
    control = ScriptedControl()
    with in_a_thread(control) as port:
        result = run("leave", "mini", "--port", port, "--folder", folder)
    assert isinstance(result.exception, BadSetting) and names(folder) == ["mini"]
    assert control.asked == [("drain", MINI), ("undrain", MINI)] and "in use again" in result.stderr


def test_ctrl_c_while_a_node_is_drained_gives_it_back_to_use(folder: Path, tmp_path: Path) -> None:
    control = ScriptedControl(loading=asyncio.Event())
    with in_a_thread(control) as port:
        words = ["cluster", "leave", "mini", "--port", str(port), "--folder", str(folder)]
        leaving = subprocess.Popen([*OMLX, *words], stderr=subprocess.PIPE, text=True)
        try:
            wait_until(control.began.is_set, 30)
            leaving.send_signal(signal.SIGINT)
            _, said = leaving.communicate(timeout=30)
        finally:
            leaving.kill()
        wait_until(control.cancelled.is_set, 10)
    assert leaving.returncode != 0 and "Traceback" not in said and names(folder) == ["mini"]


def test_a_server_that_does_not_let_us_in_keeps_the_node_too(folder: Path) -> None:
    with in_a_thread(ScriptedControl(), api_key=KEY) as port:
        error = run("leave", "mini", "--port", port, "--folder", folder).exception
    assert isinstance(error, Refused) and "OMLX_API_KEY" in str(error) and names(folder) == ["mini"]


def test_a_node_leaves_without_a_server_or_one_that_does_not_know_it(folder: Path, tmp_path: Path) -> None:
    control = ScriptedControl(map=MAP.__class__("c1", MAP.nodes[:1], ()))
    with in_a_thread(control) as port:
        said = json.loads(done(run("leave", "mini", "--port", port, "--folder", folder, "--json")).stdout)
    assert control.asked == [] and said["drained"] is False and "mini" in said["unreached"]
    ran = omlx("cluster", "leave", "mini", "--port", str(port), "--folder", folder, HOME=str(tmp_path))
    assert ran.returncode == 2 and "no node 'mini'" in ran.stderr


# ------------------------------------------------------------------ `omlx serve` itself


def test_a_real_server_shows_its_stages_lets_a_model_go_and_loads_it_again(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    with serve(tiny("tiny-llama"), "--stages", "2") as server:
        where = ("--port", server.url.rpartition(":")[2])
        at = (*where, "--folder", tmp_path / "none", "--json")
        (model,) = json.loads(done(run("status", *at)).stdout)["shard_map"]["models"]
        spans = [(stage["start"], stage["end"], stage["state"]) for stage in model["stages"]]
        assert (model["state"], len(spans), spans[0][0], spans[-1][1]) == ("ready", 2, 0, model["layers"])
        assert f"{spans[0][0]}-{spans[0][1] - 1} █" in done(run("status", *where, *at[2:4])).stdout

        stages = server.stages()
        assert "not loaded any more" in done(run("deactivate", model["id"], *where)).stdout
        wait_until(lambda: all(map(has_ended, stages)), 10)
        assert "is ready" in done(run("activate", model["id"], *where)).stdout
        assert len(server.stages()) == 2
        alone = run("rebalance", model["id"], *where).exception
        assert isinstance(alone, Refused) and "one machine" in str(alone)
