"""A machine joins the cluster, leaves it, or hears who is no longer trusted: over SSH, the root of all trust.

What runs there is one of the scripts below, to the letter, in the Python that `omlx` there belongs to; data
goes in as bytes behind it, and comes back as one JSON line.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from omlx.cluster.findings import Report
from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.members import Joined, Members, add_member, now, read_members, remove_member
from omlx.cluster.membership import News
from omlx.cluster.nodes import NodeId
from omlx.cluster.ssh import Access, RemoteProcess, Shell, open_ssh, target
from omlx.cluster.trust import Trust, issue, revoke
from omlx.cluster.validation import NO_PYTHON, START
from omlx.errors import BadSetting, SshFailed

ANSWER_WITHIN_S = 20.0
"""Starting Python there and writing a few files."""
MOST_ANSWER_BYTES = 65536
MOST_AT_ONCE = 8
MARK = b"omlx-answer "
_FRAME = """
import json, sys
from pathlib import Path
data = i.read(int(i.readline()))
def answer():
    from omlx.errors import OmlxError
    folder = Path("~/.omlx/cluster")
    try:
{body}
    except OmlxError as error:
        return {{"error": str(error)}}
sys.stdout.write("omlx-answer " + json.dumps(answer()) + "\\n")
"""
IDENTIFY = _FRAME.format(
    body="""        from omlx.cluster.node_identity import node_id, own_addresses
        return {"node_id": node_id(), "addresses": list(own_addresses())}"""
)
INSTALL = _FRAME.format(
    body="""        from omlx.cluster.membership import Bundle, install_bundle
        return {"node_id": install_bundle(folder, Bundle.unpack(data)).node_id}"""
)
REMOVE = _FRAME.format(
    body="""        from omlx.cluster.membership import remove_bundle
        remove_bundle(folder)
        return {}"""
)
TAKE_NEWS = _FRAME.format(
    body="""        from omlx.cluster.membership import News, install_news
        install_news(folder, News.unpack(data))
        return {}"""
)


class Identity(msgspec.Struct, frozen=True):
    """What IDENTIFY answers."""

    node_id: str
    addresses: tuple[str, ...]


class Installed(msgspec.Struct, frozen=True):
    """What INSTALL answers."""

    node_id: str


class Nothing(msgspec.Struct, frozen=True):
    """What is answered where there is nothing to say."""


class _Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: str


_A = TypeVar("_A", Identity, Installed, Nothing)


@dataclass(frozen=True, slots=True)
class Left:
    """A node that is out. `unreached`: nodes that have not heard of it, and why each."""

    node: Joined
    unreached: dict[str, str]


def access_of(trust: Trust) -> Access:
    return Access(trust.ssh_key, KnownHosts(trust.folder / "known_hosts"))


async def join(trust: Trust, report: Report) -> Joined:
    """Make the machine of a report in which nothing blocks a node of the cluster.

    Raises SshFailed where it cannot be reached any more, BadSetting where it will not have it.
    """
    assert report.fit and report.facts is not None and report.fingerprint is not None
    where = target(report.host, report.user, report.port)
    async with open_ssh(where, access_of(trust)) as shell:
        identity = await _run(shell, IDENTIFY, b"", Identity)
        if identity.node_id == trust.node_id:
            raise BadSetting(f"{report.host} is this machine itself, which is in the cluster already")
        before = read_members(trust.folder)
        _check_identity(before, identity, report)
        reached = _by_speed(report)
        addresses = tuple(dict.fromkeys([*reached, *identity.addresses]))
        bundle = issue(trust, identity.node_id, (), addresses)
        installed = await _run(shell, INSTALL, bundle.pack(), Installed)
    if installed.node_id != identity.node_id:
        raise BadSetting(f"{report.host} answers as node {installed.node_id!r} after it was made another")
    joined = Joined(
        id=NodeId(identity.node_id),
        name=report.facts.host,
        host=report.host,
        user=report.user,
        port=report.port,
        fingerprint=report.fingerprint,
        chip=report.facts.chip,
        memory_bytes=report.facts.memory_bytes or 0,
        addresses=reached or (shell.peer_address,),
        links=report.links,
        joined_at=now(),
    )
    for one in before:
        if one.fingerprint == joined.fingerprint and one.id != joined.id:  # it has a new id
            await _forget(trust, one)
    add_member(trust.folder, joined)
    return joined


def _check_identity(members: Members, identity: Identity, report: Report) -> None:
    """Raises BadSetting for a machine that has the id of another one."""
    for one in members:
        if one.id == identity.node_id and one.fingerprint != report.fingerprint:
            raise BadSetting(
                f"{report.host} says that it is {one.name} ({one.host}), whose host key is another: its home "
                f"was copied, or it was set up anew. Delete ~/.omlx/node.json there, or let {one.name} leave "
                "first"
            )


async def leave(trust: Trust, node: Joined) -> Left:
    """Nobody here trusts the node from now on; then the others are told, and the node itself.

    What cannot be reached is named: it believes the node until it hears of it.
    """
    unreached = await _forget(trust, node)
    try:
        await _over(trust, node, REMOVE, b"")
    except (SshFailed, BadSetting) as error:
        unreached[node.name] = str(error)
    return Left(node, unreached)


async def _forget(trust: Trust, node: Joined) -> dict[str, str]:
    """Revoke it, here and with all others; returns whom that did not reach, and why."""
    news = revoke(trust, node.id)
    remove_member(trust.folder, node.id)
    return await spread(trust, read_members(trust.folder), news)


async def spread(trust: Trust, members: Members, news: News) -> dict[str, str]:
    """Hand to every node who is revoked, and Ray's new token; returns who has not got it, and why."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def tell(node: Joined) -> str | None:
        async with places:
            try:
                await _over(trust, node, TAKE_NEWS, news.pack())
            except (SshFailed, BadSetting) as error:
                return str(error)
        return None

    nodes = list(members)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(tell(node)) for node in nodes]
    return {node.name: why for node, task in zip(nodes, tasks, strict=True) if (why := task.result())}


async def _over(trust: Trust, node: Joined, script: str, data: bytes) -> None:
    async with open_ssh(target(node.host, node.user, node.port), access_of(trust)) as shell:
        await _run(shell, script, data, Nothing)


async def _run(shell: Shell, script: str, data: bytes, kind: type[_A]) -> _A:
    """Run one of the scripts above there. Raises SshFailed, BadSetting with the machine's own words."""
    code = script.encode("ascii")
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S), shell.start(START) as process:
            await process.write(b"%d\n%s%d\n%s" % (len(code), code, len(data), data))
            line = await _hear(process)
    except TimeoutError:
        raise _no_answer(f"nothing within {ANSWER_WITHIN_S:g} s", None) from None
    try:
        failed = msgspec.json.decode(line, type=_Failed)
    except msgspec.MsgspecError:
        pass  # an answer then
    else:
        raise BadSetting(f"{shell.peer_address} refuses: {failed.error}")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise _no_answer(str(error), None) from error


async def _hear(process: RemoteProcess) -> bytes:
    """The line behind the mark; what a login shell prints before it is passed over."""
    heard = b""
    while True:
        _, mark, behind = heard.partition(MARK)
        line, end, _ = behind.partition(b"\n")
        if mark and end:
            return line
        got = await process.read(MOST_ANSWER_BYTES)
        heard += got
        if not got or len(heard) > MOST_ANSWER_BYTES:
            raise _no_answer(await process.complaint(500), await process.exit_code())


def _no_answer(said: str, code: int | None) -> SshFailed:
    if code == NO_PYTHON:
        return SshFailed("omlx", "it is not installed there", "omlx", "pip install 'omlx-cluster[cluster]'")
    seen = f"no answer of ours ({said or f'exit code {code}'})"
    fix = "look whether `omlx --version` works there and is the same as here"
    return SshFailed("omlx", seen, "one", fix)


def _by_speed(report: Report) -> tuple[str, ...]:
    """Their addresses that answered, the shortest round trip first."""
    links = [link for link in report.links if link.round_trip_s is not None]
    return tuple(
        dict.fromkeys(link.theirs for link in sorted(links, key=lambda one: one.round_trip_s or 0.0))
    )
