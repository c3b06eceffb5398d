"""The coordinator tells its nodes, over SSH, where Ray's head is, and who is no longer trusted.

A node that is elsewhere now is found by what it announces and known by its host key: certificate and members
follow it. What a node does about the head is `ray_keeper`'s, in `omlx node run` there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import structlog

from omlx.cluster.head_address import HeadAddress
from omlx.cluster.joining import Held, certify, follow, reached_at
from omlx.cluster.liveness import answers
from omlx.cluster.members import Joined, Members
from omlx.cluster.node_identity import own_addresses
from omlx.cluster.nodes import NodeId
from omlx.cluster.remote_script import FRAME, MOST_AT_ONCE, access_of, run_script
from omlx.cluster.ssh import open_ssh, target
from omlx.cluster.trust import Trust
from omlx.errors import BadSetting, Refused, SshFailed

if TYPE_CHECKING:
    from omlx.cluster.ray_processes import RaySession

log = structlog.get_logger()

LISTEN_S = 2.0
"""Who is asked over mDNS answers within a tenth of that."""
MOST_HEARD = 32
"""Addresses that are announced under one node's id, by it or by others."""
SUMMON = FRAME.format(
    body="""        from omlx.cluster.certificates import facts
        from omlx.cluster.head_address import HeadAddress, write_head
        from omlx.cluster.membership import News, install_news, open_member
        from omlx.cluster.node_identity import own_addresses
        from omlx.node.tls import CERTIFICATE
        head, _, news = data.partition(b"\\n")
        head, news = HeadAddress.unpack(head), News.unpack(news)
        install_news(folder, news)
        write_head(folder, head)
        member = open_member(folder)
        shown = facts(Path(member.security.folder, CERTIFICATE).read_bytes())
        said = {
            "node_id": member.node_id,
            "serial": f"{shown.serial:x}",
            "addresses": list(own_addresses()),
        }
        try:
            from omlx.cluster.node_agent import holder
            return said | {"agent": holder(folder.parent / "node.lock") is not None}
        except (ImportError, OmlxError, OSError):
            return said | {"agent": False}"""
)


class Summoned(Held, frozen=True, kw_only=True):
    """What a node answers that has taken the news and the head's address."""

    agent: bool
    """Whether `omlx node run` runs there. Without it nothing follows."""


@dataclass(frozen=True, slots=True)
class _Away:
    """Nobody who is the node was spoken to."""

    why: str


Whereabouts: TypeAlias = Callable[[Collection[Joined]], Awaitable[Mapping[NodeId, tuple[str, ...]]]]


async def whereabouts(
    nodes: Collection[Joined], addresses: Callable[[], tuple[str, ...]] = own_addresses
) -> dict[NodeId, tuple[str, ...]]:
    """Where they say over mDNS that they are, as far as SSH servers greet there.

    Anybody can say that: who is really there is told by the host key alone. addresses: as of `multicast`.
    """
    # Here, because a coordinator whose nodes all answer does without zeroconf.
    from omlx.cluster.discovery import browsing, multicast
    from omlx.cluster.roster import Seen

    wanted = {node.id: node for node in nodes}
    said: dict[NodeId, dict[str, None]] = {id: {} for id in wanted}
    try:
        async with multicast(addresses) as sockets, browsing(sockets) as browser:
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTEN_S):
                    async for event in browser:
                        if not isinstance(event, Seen) or (node := wanted.get(event.node.id)) is None:
                            continue
                        if event.node.host_key_fingerprint == node.fingerprint:
                            said[node.id] |= dict.fromkeys(event.node.addresses)
    except Refused as refused:
        log.info("nodes that moved cannot be listened for", why=str(refused))
        return {}
    found = {}
    for id, node in wanted.items():
        asked = [one for one in said[id] if one != node.host][:MOST_HEARD]
        greeted = await asyncio.gather(*(answers(one, node.port) for one in asked))
        if there := tuple(one for one, greets in zip(asked, greeted, strict=True) if greets):
            found[id] = there
    return found


async def summon(
    trust: Trust, members: Members, head: HeadAddress, listen: Whereabouts = whereabouts
) -> dict[NodeId, Summoned | str]:
    """Have the nodes' Ray join this head; by node, or why it was not told. To be repeated at will: what a
    node has heard already changes nothing there, except that it tries at once.

    Who does not answer where it was is listened for. A node that has other addresses than its certificate
    names gets another one, and is reached at them from now on.
    """
    letter = head.pack() + b"\n" + trust.news().pack()
    told = await _tell_all(trust, {node.id: (node, (node.host,)) for node in members}, letter)
    away = [node for node in members if isinstance(told[node.id], _Away)]
    found = await listen(away) if away else {}
    told |= await _tell_all(
        trust, {node.id: (node, found[node.id]) for node in away if found.get(node.id)}, letter
    )
    return {id: answer.why if isinstance(answer, _Away) else answer for id, answer in told.items()}


async def _tell_all(
    trust: Trust, calls: Mapping[NodeId, tuple[Joined, tuple[str, ...]]], letter: bytes
) -> dict[NodeId, Summoned | str | _Away]:
    """Each node at the first of its hosts where it is. A few at a time, as in `ask_all`."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(node: Joined, hosts: tuple[str, ...]) -> Summoned | str | _Away:
        async with places:
            for host in hosts:
                answer = await _tell(trust, node, host, letter)
                if not isinstance(answer, _Away):
                    break
            return answer

    async with asyncio.TaskGroup() as group:
        tasks = {id: group.create_task(one(*call)) for id, call in calls.items()}
    return {id: task.result() for id, task in tasks.items()}


async def _tell(trust: Trust, node: Joined, host: str, letter: bytes) -> Summoned | str | _Away:
    # Elsewhere than where it is known, it is known by what it showed when it joined.
    vouched = None if host == node.host else node.fingerprint
    try:
        async with AsyncExitStack() as stack:
            where = target(host, node.user, node.port)
            try:
                shell = await stack.enter_async_context(open_ssh(where, access_of(trust), vouched))
            except SshFailed as failed:
                return _Away(str(failed))
            answer = await run_script(shell, SUMMON, letter, Summoned)
            if await certify(trust, node, shell, answer):
                log.info("a node is certified anew", node=node.name, addresses=answer.addresses)
            there = reached_at(node, host, shell.peer_address, answer.addresses)
        if there != node:
            await asyncio.to_thread(follow, trust, there)
            log.info("a node moved", node=node.name, host=there.host, addresses=there.addresses)
    except (SshFailed, BadSetting) as failed:
        return str(failed)
    return answer


def head_of(session: "RaySession") -> HeadAddress:
    """Of a head that `start_head` has started. Its number is when that was, in milliseconds."""
    address, _, port = session.head.rpartition(":")
    number = max((int(one.started * 1000) for one in session.processes), default=0)
    return HeadAddress(address, int(port), number)


def hindrance(node: Joined, answer: Summoned | str) -> str | None:
    """Why that node's Ray will not come; None where nothing is in its way. A line for a person."""
    if isinstance(answer, str):
        return f"{node.name} was not told where Ray's head is: {answer}"
    if not answer.agent:
        return f"omlx node does not run on {node.name}: start it there with `omlx node install`"
    return None
