"""Nodes are told over real SSH where Ray's head is: what they keep of it, and what they answer."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import asyncssh
import pytest
from cryptography import x509

from omlx.cluster.certificates import facts
from omlx.cluster.discovery import announcing, multicast
from omlx.cluster.head_address import HeadAddress, read_head
from omlx.cluster.joining import spread
from omlx.cluster.members import Joined, Members, add_member, now, read_members
from omlx.cluster.membership import install_bundle, open_member, remove_bundle
from omlx.cluster.node_agent import only_one
from omlx.cluster.node_identity import own_addresses
from omlx.cluster.nodes import Node, NodeId
from omlx.cluster.ray_processes import RaySession
from omlx.cluster.recorded_process import RecordedProcess
from omlx.cluster.remote_script import access_of
from omlx.cluster.summoning import Summoned, head_of, hindrance, summon, whereabouts
from omlx.cluster.trust import Trust, init_trust, issue, renew, revoke
from tests.cluster.ssh_server import Machine, sshd

HEAD = HeadAddress("10.0.0.1", 6399, 7)
HERE = ("127.0.0.1",)
ID = "b" * 32
ELSEWHERE = "127.0.0.2"
T = TypeVar("T")


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return init_trust(tmp_path / "cluster", "head", [], [])


def machine(trust: Trust, id: str) -> Machine:
    """One that lets the coordinator in."""
    return Machine(trust.folder.parent / id, client_key=asyncssh.read_private_key(trust.ssh_key))


def cluster_folder(one: Machine) -> Path:
    return one.home / ".omlx" / "cluster"


def member(trust: Trust, id: str, addresses: Sequence[str] | None = None, days: int = 365) -> Machine:
    """Its certificate names what it has, or `addresses`."""
    named = own_addresses() if addresses is None else addresses
    made = machine(trust, id)
    install_bundle(cluster_folder(made), issue(trust, id, [], named, timedelta(days=days)))
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


def agents(answers: Mapping[NodeId, Summoned | str]) -> dict[str, bool]:
    """Whether one runs on each node, all of which have answered."""
    told = {id: answer for id, answer in answers.items() if isinstance(answer, Summoned)}
    assert len(told) == len(answers), answers
    return {id: answer.agent for id, answer in told.items()}


async def on_loopback(nodes: Collection[Joined]) -> dict[NodeId, tuple[str, ...]]:
    return await whereabouts(nodes, lambda: HERE)


def held(one: Machine) -> x509.Certificate:
    return x509.load_pem_x509_certificate((cluster_folder(one) / "node" / "node.crt").read_bytes())


def named(one: Machine) -> set[str]:
    """Addresses in its certificate."""
    names = held(one).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(address) for address in names.get_values_for_type(x509.IPAddress)}


def test_a_node_keeps_where_the_head_is_takes_the_news_and_says_whether_its_agent_runs(trust: Trust) -> None:
    machines = {"b": member(trust, "b"), "c": member(trust, "c")}
    issue(trust, "d", [], [], timedelta(days=1))
    revoke(trust, "d")
    with only_one(machines["c"].home / ".omlx" / "node.lock"):
        answers = with_servers(trust, machines, lambda members: summon(trust, members, HEAD))
    assert agents(answers) == {"b": False, "c": True}
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
    assert agents(answers) == {"b": False}


def test_a_node_that_is_away_or_has_left_says_so_and_hinders_no_other(trust: Trust) -> None:
    machines = {"b": member(trust, "b"), "left": former_member(trust, "left")}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = machine(trust, "away")
        away.port = closed.getsockname()[1]

    async def ask(members: Members) -> dict[NodeId, Summoned | str]:
        access_of(trust).known_hosts.pin("127.0.0.1", away.port, away.pinned)
        return await summon(trust, members.with_(joined("away", away)), HEAD, on_loopback)

    answers = with_servers(trust, machines, ask)
    assert isinstance(answers[NodeId("b")], Summoned)
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


# ---------------------------------------------------------------- other addresses, another certificate


def told(trust: Trust, one: Machine) -> Summoned | str:
    return with_servers(trust, {"b": one}, lambda members: summon(trust, members, HEAD, on_loopback))[
        NodeId("b")
    ]


@pytest.mark.skipif(not own_addresses(), reason="this machine has no network")
def test_a_node_with_another_address_than_its_certificate_names_is_certified_anew_once(trust: Trust) -> None:
    """It could not serve Ray's gRPC at its new address."""
    node = member(trust, "b", ["10.9.8.7"])
    assert isinstance(told(trust, node), Summoned)
    assert named(node) == {*own_addresses(), *HERE}
    assert open_member(cluster_folder(node)).security.context(server=True)
    serial = held(node).serial_number
    assert isinstance(told(trust, node), Summoned)
    assert held(node).serial_number == serial, "else its Ray would start anew at every call"


def test_a_certificate_is_replaced_before_it_runs_out(trust: Trust) -> None:
    node = member(trust, "b", days=29)
    assert isinstance(told(trust, node), Summoned)
    assert open_member(cluster_folder(node)).days_left(now()) > 300


def test_a_certificate_that_never_reached_its_node_is_not_taken_for_the_one_it_has(trust: Trust) -> None:
    node = member(trust, "b", days=29)
    lost = renew(trust, "b", own_addresses())
    assert isinstance(told(trust, node), Summoned)
    assert held(node).serial_number != facts(lost.certificate).serial
    assert open_member(cluster_folder(node)).days_left(now()) > 300


def test_a_node_that_may_have_no_certificate_gets_none(trust: Trust) -> None:
    node = member(trust, "b", days=29)
    before = held(node)
    revoke(trust, "b")
    assert "is no node of this cluster: join it first" in str(told(trust, node))
    assert held(node) == before


def test_a_machine_that_is_another_node_by_now_is_not_certified_as_the_one_it_was(trust: Trust) -> None:
    node = member(trust, "c", days=29)
    assert "is node 'c', no more mac-b: join it again" in str(told(trust, node))
    assert held(node).serial_number == int(trust.ledger().issued[-1].serial, 16)


def moved(trust: Trust, node: Machine, there: Machine) -> tuple[Summoned | str, Joined]:
    """What comes of a call to `node`, which is known at an address where nobody is, while `there` answers at
    the one that is announced for it; and where it is known to be after that."""

    async def main() -> Summoned | str:
        async with sshd(there), multicast(lambda: HERE) as sockets:
            node.port = there.port
            known = replace(joined(ID, node), host=ELSEWHERE, addresses=(ELSEWHERE,))
            add_member(trust.folder, known)
            said = Node(NodeId(ID), "mac-b", (), 1.0, host_key_fingerprint=node.fingerprint)
            async with announcing(sockets, said):
                return (await summon(trust, Members((known,)), HEAD, on_loopback))[known.id]

    answer = asyncio.run(main())
    return answer, read_members(trust.folder).joined[0]


def test_a_node_that_moved_is_found_by_what_it_announces_and_known_by_its_host_key(trust: Trust) -> None:
    node = member(trust, ID)
    answer, known = moved(trust, node, node)
    assert isinstance(answer, Summoned), answer
    assert read_head(cluster_folder(node)) == HEAD
    assert (known.host, known.addresses) == (HERE[0], HERE)
    assert access_of(trust).known_hosts.keys(HERE[0], node.port) == (node.pinned,)


def test_whoever_announces_itself_as_a_node_that_moved_is_not_told_anything(trust: Trust) -> None:
    node, stranger = member(trust, ID), member(trust, "stranger")
    answer, known = moved(trust, node, stranger)
    assert f"host key: 127.0.0.1 shows {stranger.fingerprint}" in str(answer)
    assert stranger.commands == [] and read_head(cluster_folder(stranger)) is None
    assert known.host == ELSEWHERE
    assert access_of(trust).known_hosts.keys(HERE[0], stranger.port) == ()
