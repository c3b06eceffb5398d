"""The node's agent with real mDNS on the loopback interface: what it says, and when it says it anew."""

import asyncio
import errno
import fcntl
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from omlx.cluster import node_agent
from omlx.cluster.discovery import Browser, browsing, multicast
from omlx.cluster.membership import open_member, remove_bundle
from omlx.cluster.node_agent import Holder, Membership, among, holder, only_one, run_agent
from omlx.cluster.nodes import Node, cluster_mark
from omlx.cluster.roster import Lost, Seen
from omlx.cluster.trust import init_trust
from omlx.errors import Refused
from tests.cluster.hearing import WITHIN_S, event_of

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEvLO8mz0CqTDGAxhHq0oTMMRVJXkx3WXOzvZ1Vvs2aA root@mac\n"


def here() -> tuple[str, ...]:
    return ("127.0.0.1",)


def run_beside(home: Path, talk: Callable[[Browser, Node], Awaitable[None]]) -> None:
    """`talk` while an agent runs, with the browser of another machine; then its goodbye is heard."""

    async def main() -> None:
        ended, started = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with multicast(here) as sockets, browsing(sockets) as browser, asyncio.TaskGroup() as group:
            group.create_task(
                run_agent(
                    home,
                    ended,
                    lambda node, _: started.set_result(node),
                    addresses=here,
                    host_key=home / "host_key.pub",
                    look_every_s=0.05,
                )
            )
            node = await asyncio.wait_for(started, WITHIN_S)
            await talk(browser, node)
            ended.set()
            await event_of(browser, node.id, lambda event: isinstance(event, Lost))

    asyncio.run(main())


def test_joining_and_leaving_a_cluster_is_announced(tmp_path: Path) -> None:
    async def talk(browser: Browser, node: Node) -> None:
        await event_of(browser, node.id, lambda event: isinstance(event, Seen) and event.node.cluster is None)
        trust = init_trust(tmp_path / "cluster", "head", [], ["10.0.0.1"])
        mark = cluster_mark(trust.cluster_id)
        await event_of(browser, node.id, lambda event: isinstance(event, Seen) and event.node.cluster == mark)
        remove_bundle(tmp_path / "cluster")
        # Who still has a record in its cache takes no notice when that is said again: ask with an empty one.
        async with multicast(here) as sockets, browsing(sockets) as fresh:
            await event_of(
                fresh, node.id, lambda event: isinstance(event, Seen) and event.node.cluster is None
            )

    run_beside(tmp_path, talk)


def test_a_host_key_that_is_made_later_is_announced(tmp_path: Path) -> None:
    """macOS makes it when Remote Login is switched on for the first time."""

    async def talk(browser: Browser, node: Node) -> None:
        assert node.host_key_fingerprint is None
        (tmp_path / "host_key.pub").write_text(HOST_KEY)
        await event_of(
            browser,
            node.id,
            lambda event: isinstance(event, Seen) and event.node.host_key_fingerprint is not None,
        )

    run_beside(tmp_path, talk)


def test_a_membership_that_cannot_be_read_is_said_once_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    mark = cluster_mark(init_trust(folder, "head", [], ["10.0.0.1"]).cluster_id)
    membership = Membership(folder)
    assert membership.look() == mark
    key = folder / "node" / "node.key"
    key.chmod(0o644)
    folder.touch()
    os.utime(folder, (1, 1))
    with capture_logs() as logs:
        assert membership.look() == membership.look() == mark
        assert Membership(folder).look() is None
    assert [line["log_level"] for line in logs] == ["warning", "warning"]
    assert "open to others" in logs[0]["why"]
    key.chmod(0o600)
    assert membership.look() == mark
    assert open_member(folder).node_id == "head"
    remove_bundle(folder)
    assert membership.look() is None


def test_what_did_not_change_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cluster"
    init_trust(folder, "head", [], ["10.0.0.1"])
    membership = Membership(folder)
    mark = membership.look()

    def fail(_: Path) -> str:
        raise AssertionError("read again")

    monkeypatch.setattr("omlx.cluster.node_agent._mark_in", fail)
    assert membership.look() == mark


def test_of_given_addresses_those_that_this_machine_has_are_announced() -> None:
    assert among(("203.0.113.9", "127.0.0.1"))() == ("127.0.0.1",)


def test_one_agent_at_a_time_and_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "LOCK_WITHIN_S", 0.1)
    file = tmp_path / "home" / "node.lock"
    assert holder(file) is None
    with only_one(file) as lock:
        assert holder(file) == Holder(os.getpid(), False)
        lock.write(announced=True)
        assert holder(file) == Holder(os.getpid(), True)
        said = rf"already running, pid {os.getpid()} \(it holds .*node\.lock\)"
        with pytest.raises(Refused, match=said), only_one(file):
            pass
    assert holder(file) is None
    assert file.stat().st_mode & 0o777 == 0o600
    with only_one(file):
        pass


def test_looking_at_the_lock_keeps_no_agent_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "node.lock"
    file.touch()
    looking = os.open(file, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    ending = threading.Timer(0.1, os.close, (looking,))
    ending.start()
    with only_one(file):
        assert holder(file) == Holder(os.getpid(), False)
    ending.join()


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "node.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(Refused, match="lock file"), only_one(tmp_path / "node.lock"):
        pass
    with pytest.raises(Refused, match="lock file"):
        holder(tmp_path / "node.lock")
    assert (tmp_path / "precious").read_text() == "kept"


def test_macos_that_lets_nothing_out_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr("omlx.cluster.node_identity.hardware_mark", lambda: None)

    async def talk(_: Browser, __: Node) -> None:
        refused = OSError(errno.EHOSTUNREACH, "No route to host")
        for _i in range(2):
            logging.getLogger("zeroconf").warning("Error with socket %s: %s", "en0", refused)

    with capture_logs() as logs:
        run_beside(tmp_path, talk)
    said = [line for line in logs if "errno 65" in line["event"]]
    assert len(said) == 1 and "Local Network" in said[0]["fix"]


def test_a_machine_in_no_cluster_needs_no_cryptography_and_no_mlx_to_announce_itself() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, omlx.cluster.node_agent; "
            "print([name for name in ('cryptography', 'mlx', 'ray', 'asyncssh') if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_what_goes_wrong_beside_the_announcing_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(home: Path, ended: asyncio.Event) -> None:
        raise ValueError(f"a mistake of ours about {home}, {ended}")

    async def talk(browser: Browser, node: Node) -> None:
        await event_of(browser, node.id, lambda event: isinstance(event, Seen))

    monkeypatch.setattr(node_agent, "keep_ray", broken)
    with capture_logs() as logs:
        run_beside(tmp_path, talk)
    (line,) = [line for line in logs if line["log_level"] == "error"]
    assert isinstance(line["exc_info"], ValueError)
