"""A machine joins the cluster, leaves it, or hears who is trusted no more: over SSH, the root of trust."""

import asyncio
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass, replace

import msgspec

from omlx.cluster.facts import Facts
from omlx.cluster.findings import Report
from omlx.cluster.members import Joined, Members, add_member, now, read_members, remove_member
from omlx.cluster.membership import Bundle, News
from omlx.cluster.nodes import MOST_ADDRESSES, NodeId
from omlx.cluster.rates import find_chip
from omlx.cluster.remote_script import ANSWER_WITHIN_S, FRAME, access_of, ask, ask_all, run_script
from omlx.cluster.speed import GAUGE_WITHIN_S, PerSecond
from omlx.cluster.ssh import Shell, open_ssh, target
from omlx.cluster.trust import Trust, issue, renew, revoke
from omlx.errors import BadSetting, SshFailed

IDENTIFY = FRAME.format(
    body="""        from omlx.cluster.node_identity import node_id, own_addresses
        return {"node_id": node_id(), "addresses": list(own_addresses())}"""
)
INSTALL = FRAME.format(
    body="""        from omlx.cluster.authorized_keys import let_in
        from omlx.cluster.membership import Bundle, install_bundle
        key, _, bundle = data.partition(b"\\n")
        node_id = install_bundle(folder, Bundle.unpack(bundle)).node_id
        let_in(key.decode("ascii"))
        return {"node_id": node_id}"""
)
REMOVE = FRAME.format(
    body="""        from omlx.cluster.membership import remove_bundle
        remove_bundle(folder)
        return {}"""
)
MEASURE = FRAME.format(
    body="""        from omlx.cluster.speed import own_speed
        speed = own_speed()
        return {} if speed is None else {"speed": [speed.bandwidth, speed.compute]}"""
)
TAKE_NEWS = FRAME.format(
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


class Shown(msgspec.Struct, frozen=True):
    """What MEASURE answers; None: it could not be measured."""

    speed: tuple[PerSecond, PerSecond] | None = None


class Held(msgspec.Struct, frozen=True):
    """What a node says of its certificate and of itself."""

    node_id: str
    serial: str
    """Hexadecimal, as in the ledger."""
    addresses: tuple[str, ...]
    """That it has at the moment, of IPv4."""


class Nothing(msgspec.Struct, frozen=True):
    """What is answered where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Left:
    """A node that is out. `unreached`: nodes that have not heard of it, and why each."""

    node: Joined
    unreached: dict[str, str]


async def join(trust: Trust, report: Report) -> Joined:
    """Make the machine of a report in which nothing blocks a node of the cluster.

    From now on it lets the cluster's key in: until then one of the person's own may have been needed. Raises
    SshFailed where it cannot be reached any more, BadSetting where it will not have it.
    """
    assert report.fit and report.facts is not None and report.fingerprint is not None
    where = target(report.host, report.user, report.port)
    async with open_ssh(where, replace(access_of(trust), own_keys=True)) as shell:
        identity = await run_script(shell, IDENTIFY, b"", Identity)
        if identity.node_id == trust.node_id:
            raise BadSetting(f"{report.host} is this machine itself, which is in the cluster already")
        before = read_members(trust.folder)
        _check_identity(before, identity, report)
        reached = _by_speed(report)
        addresses = tuple(dict.fromkeys([*reached, *identity.addresses]))
        bundle = issue(trust, identity.node_id, (), addresses)
        await _hand_over(trust, shell, bundle)
        speed = await _speed(shell, report.facts)
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
        speed=speed,
    )
    for one in before:
        if one.fingerprint == joined.fingerprint and one.id != joined.id:  # it has a new id
            await _forget(trust, one)
    add_member(trust.folder, joined)
    return joined


async def _speed(shell: Shell, facts: Facts) -> tuple[float, float] | None:
    """None where the table knows its chip, or it cannot be measured. Raises SshFailed, BadSetting."""
    if find_chip(facts.chip, facts.memory_bytes) is not None:
        return None
    shown = await run_script(shell, MEASURE, b"", Shown, GAUGE_WITHIN_S + ANSWER_WITHIN_S)
    return shown.speed


def _check_identity(members: Members, identity: Identity, report: Report) -> None:
    """Raises BadSetting for a machine that has the id of another one."""
    for one in members:
        if one.id == identity.node_id and one.fingerprint != report.fingerprint:
            raise BadSetting(
                f"{report.host} says that it is {one.name} ({one.host}), whose host key is another: its home "
                f"was copied, or it was set up anew. Delete ~/.omlx/node.json there, or let {one.name} leave "
                "first"
            )


async def certify(trust: Trust, node: Joined, shell: Shell, held: Held) -> bool:
    """A new certificate where the one that it has names not all of its addresses, or runs out soon; whether
    that was so.

    Its Ray starts anew by itself then. Raises SshFailed, and BadSetting where it may have none.
    """
    if held.node_id != node.id:
        raise BadSetting(f"{shell.peer_address} is node {held.node_id!r}, no more {node.name}: join it again")
    wanted = tuple(dict.fromkeys([*held.addresses[:MOST_ADDRESSES], *_ipv4(shell.peer_address)]))
    ledger = await asyncio.to_thread(trust.ledger)
    # By what it holds and not by what it was last given: that may never have reached it.
    issued = ledger.find(held.serial)
    if issued is not None and not issued.revoked and issued.serves(wanted, now()):
        return False
    await _hand_over(trust, shell, await asyncio.to_thread(renew, trust, node.id, wanted))
    return True


async def _hand_over(trust: Trust, shell: Shell, bundle: Bundle) -> None:
    letter = trust.ssh_public_key().encode("ascii") + b"\n" + bundle.pack()
    installed = await run_script(shell, INSTALL, letter, Installed)
    if installed.node_id != bundle.node_id:
        raise BadSetting(
            f"{shell.peer_address} answers as node {installed.node_id!r} after it was made another"
        )


def _ipv4(address: str) -> tuple[str, ...]:
    """It, if it is one: Ray speaks no other. Addresses of IPv6 may change every day."""
    return (address,) if ipaddress.ip_address(address.partition("%")[0]).version == 4 else ()


def follow(trust: Trust, node: Joined) -> None:
    """From now on it is reached as `node` says, unless it has left meanwhile."""
    add_member(trust.folder, node)
    issued = trust.ledger().newest(node.id)
    # Who leaves is revoked first and forgotten then: if that was before this line, it is to be done again.
    if issued is None or issued.revoked:
        remove_member(trust.folder, node.id)


def reached_at(node: Joined, host: str, peer: str, own: Collection[str]) -> Joined:
    """The node as it was reached just now: at `host`, which is at the address `peer`, having `own` ones.

    Addresses that it has no more are left out once one of them is where its neighbours would go.
    """
    there = tuple(one for one in node.addresses if one == peer or one in own)
    stays = bool(there) and there[0] == node.addresses[0]
    return replace(node, host=host, addresses=node.addresses if stays else there or (peer,))


async def leave(trust: Trust, node: Joined) -> Left:
    """Nobody here trusts the node from now on; then the others are told, and the node itself.

    What cannot be reached is named: it believes the node until it hears of it.
    """
    unreached = await _forget(trust, node)
    try:
        await ask(trust, node, REMOVE, b"", Nothing)
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
    answers = await ask_all(trust, members, TAKE_NEWS, news.pack(), Nothing)
    return {node.name: why for node in members if isinstance(why := answers[node.id], str)}


def _by_speed(report: Report) -> tuple[str, ...]:
    """Their addresses that answered, the shortest round trip first."""
    links = [link for link in report.links if link.round_trip_s is not None]
    return tuple(
        dict.fromkeys(link.theirs for link in sorted(links, key=lambda one: one.round_trip_s or 0.0))
    )
