"""Nodes are told over real SSH where Ray's head is: what they keep of it, and what they answer."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import asyncssh
import pytest

from omlx.cluster.head_address import HeadAddress, read_head
from omlx.cluster.joining import spread
from omlx.cluster.members import Joined, Members, now
from omlx.cluster.membership import install_bundle, open_member, remove_bundle
from omlx.cluster.node_agent import only_one
from omlx.cluster.nodes import NodeId
from omlx.cluster.ray_processes import RaySession
from omlx.cluster.recorded_process import RecordedProcess
from omlx.cluster.remote_script import access_of
from omlx.cluster.summoning import Summoned, head_of, hindrance, summon
from omlx.cluster.trust import Trust, init_trust, issue, revoke
from tests.cluster.ssh_server import Machine, sshd

HEAD = HeadAddress("10.0.0.1", 6399, 7)
T = TypeVar("T")


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return init_trust(tmp_path / "cluster", "head", [], [])


def machine(trust: Trust, id: str) -> Machine:
    """One that lets the coordinator in."""
    return Machine(trust.folder.parent / id, client_key=asyncssh.read_private_key(trust.ssh_key))


def cluster_folder(one: Machine) -> Path:
    return one.home / ".omlx" / "cluster"


def member(trust: Trust, id: str) -> Machine:
    made = machine(trust, id)
    install_bundle(cluster_folder(made), issue(trust, id, [], []))
    return made


def former_member(trust: Trust, id: str) -> Machine:
    made = member(trust, id)
    remove_bundle(cluster_folder(made))
    return made


def joined(id: str, one: Machine) -> Joined:
    where = {"host": "127.0.0.1", "user": "admin", "port": one.port, "fingerprint": one.fingerprint}
    what = {"chip": "Apple M3 Ultra", "memory_bytes": 1, "addresses": ("127.0.0.1",), "links": ()}
    return Joined(id=NodeId(id), name=f"mac-{id}", joined_at=now(), **where, **what)  # type: ignore[arg-type]


def with_servers(trust: Trust, machines: dict[str, Machine], ask: Callable[[Members], Awaitable[T]]) -> T:
    """What is answered while these machines take connections."""

    async def main() -> T:
        async with AsyncExitStack() as stack:
            for one in machines.values():
                await stack.enter_async_context(sshd(one))
                access_of(trust).known_hosts.pin("127.0.0.1", one.port, one.pinned)
            return await ask(Members(tuple(joined(id, one) for id, one in machines.items())))

    return asyncio.run(main())


def test_a_node_keeps_where_the_head_is_takes_the_news_and_says_whether_its_agent_runs(trust: Trust) -> None:
    machines = {"b": member(trust, "b"), "c": member(trust, "c")}
    issue(trust, "d", [], [], timedelta(days=1))
    revoke(trust, "d")
    with only_one(machines["c"].home / ".omlx" / "node.lock"):
        answers = with_servers(trust, machines, lambda members: summon(trust, members, HEAD))
    assert answers == {"b": Summoned(agent=False), "c": Summoned(agent=True)}
    for one in machines.values():
        assert read_head(cluster_folder(one)) == HEAD
        assert open_member(cluster_folder(one)).token_path.read_text() == trust.token()
    nodes = {id: joined(id, one) for id, one in machines.items()}
    assert hindrance(nodes["c"], answers[NodeId("c")]) is None
    assert hindrance(nodes["b"], answers[NodeId("b")]) == (
        "omlx node does not run on mac-b: start it there with `omlx node install`"
    )


def test_a_lock_that_cannot_be_read_counts_as_no_agent(trust: Trust) -> None:
    machines = {"b": member(trust, "b")}
    (machines["b"].home / ".omlx" / "node.lock").symlink_to("/dev/null")
    answers = with_servers(trust, machines, lambda members: summon(trust, members, HEAD))
    assert answers == {"b": Summoned(agent=False)}


def test_a_node_that_is_away_or_has_left_says_so_and_hinders_no_other(trust: Trust) -> None:
    machines = {"b": member(trust, "b"), "left": former_member(trust, "left")}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = machine(trust, "away")
        away.port = closed.getsockname()[1]

    async def ask(members: Members) -> dict[NodeId, Summoned | str]:
        access_of(trust).known_hosts.pin("127.0.0.1", away.port, away.pinned)
        return await summon(trust, members.with_(joined("away", away)), HEAD)

    answers = with_servers(trust, machines, ask)
    assert answers[NodeId("b")] == Summoned(agent=False)
    assert "refuses: this machine is in no cluster" in str(answers[NodeId("left")])
    assert "takes no SSH connections" in str(answers[NodeId("away")])
    said = hindrance(joined("away", away), answers[NodeId("away")])
    assert said is not None and said.startswith("mac-away was not told where Ray's head is: ")


def test_news_are_spread_and_who_has_not_got_them_is_named(trust: Trust) -> None:
    machines = {"b": member(trust, "b"), "left": former_member(trust, "left")}
    issue(trust, "d", [], [])
    news = revoke(trust, "d")
    unreached = with_servers(trust, machines, lambda members: spread(trust, members, news))
    assert list(unreached) == ["mac-left"] and "in no cluster" in unreached["mac-left"]
    assert open_member(cluster_folder(machines["b"])).token_path.read_text() == news.token


def test_a_head_that_is_started_anew_has_a_larger_number(trust: Trust, tmp_path: Path) -> None:
    def session(*started: float) -> RaySession:
        processes = tuple(RecordedProcess(pid, at) for pid, at in enumerate(started))
        here = open_member(trust.folder)
        return RaySession(here, "10.0.0.1", "10.0.0.1:6399", tmp_path, tmp_path, processes, None)

    first, second = head_of(session(1000.0, 1000.5)), head_of(session(1003.0))
    assert first.place == second.place == ("10.0.0.1", 6399)
    assert first.number < second.number
