"""Real mDNS on the loopback interface. Others may talk there too, so each test looks for ids of its own."""

import asyncio
import errno
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from zeroconf import ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo

from omlx.cluster import discovery, listed_hosts
from omlx.cluster.complaints import EVERY_S, MOST_SOURCES, Complaints
from omlx.cluster.discovery import SERVICE, Browser, Multicast, announcing, browsing, multicast
from omlx.cluster.inbox import MOST_WAITING, Inbox
from omlx.cluster.listed_hosts import check_hosts, look_up
from omlx.cluster.nodes import Node, NodeId, Versions, reach_of
from omlx.cluster.roster import Lost, Roster, Seen, fold
from omlx.errors import BadSetting, Refused
from tests.cluster.hearing import WITHIN_S, event_of

HERE = ("127.0.0.1",)
LINUX = sys.platform == "linux"

KILLED = """
import asyncio, sys
from omlx.cluster.discovery import announcing, multicast
from omlx.cluster.nodes import Node, NodeId

async def main():
    node = Node(NodeId(sys.argv[1]), "killed", (), 1.0)
    async with multicast(lambda: ("127.0.0.1",)) as sockets, announcing(sockets, node):
        print("announced", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def here() -> tuple[str, ...]:
    return HERE


def new_node(**given: object) -> Node:
    plain = Node(
        NodeId(secrets.token_hex(16)),
        "mac",
        reach_of(HERE, 1.0),
        1.0,
        agent_port=7000,
        versions=Versions(omlx="0.1.0"),
        chip="Apple M4",
        memory_bytes=64 * 2**30,
        host_key_fingerprint="SHA256:" + "A" * 43,
    )
    return replace(plain, **given)  # type: ignore[arg-type]


async def nothing_of(browser: Browser, node: Node, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            raise AssertionError(f"heard {await event_of(browser, node.id)}")
    except TimeoutError:
        pass


def run(talk: Callable[[Multicast, Browser], Awaitable[None]], *hosts: str) -> None:
    """`talk` with the sockets of one machine, to announce, and the browser of another."""

    async def main() -> None:
        async with multicast(here) as theirs, multicast(here) as ours, browsing(ours, hosts) as browser:
            await talk(theirs, browser)

    asyncio.run(main())


def test_a_node_is_seen_with_what_it_says_and_marked_when_it_says_goodbye() -> None:
    node = new_node()

    async def talk(sockets: Multicast, browser: Browser) -> None:
        async with announcing(sockets, node) as announcer:
            seen = await event_of(browser, node.id)
            assert isinstance(seen, Seen)
            assert replace(seen.node, reach=node.reach, seen_at=1.0) == node
            assert seen.node.addresses == HERE
            assert abs(seen.node.seen_at - time.time()) < WITHIN_S
            await announcer.update(replace(node, chip="Apple M5", memory_bytes=2**30))
            changed = await event_of(browser, node.id, lambda event: event != seen)
            assert isinstance(changed, Seen)
            assert (changed.node.chip, changed.node.memory_bytes) == ("Apple M5", 2**30)
        lost = await event_of(browser, node.id, lambda event: isinstance(event, Lost))
        known = fold(fold(Roster(), changed), lost).get(node.id)
        assert known is not None and known.gone

    run(talk)


def test_what_is_said_again_after_something_else_is_news() -> None:
    """A node that joined and left within ten seconds stayed on the old mark where it was listened to."""
    node = new_node()
    other = replace(node, chip="Apple M5")

    async def main() -> None:
        async with (
            multicast(here) as ours,
            browsing(ours) as browser,
            multicast(here) as theirs,
            announcing(theirs, node) as announcer,
        ):
            for said in (node, other, node, other):
                await announcer.update(said)
                await event_of(
                    browser,
                    node.id,
                    lambda event, said=said: isinstance(event, Seen) and event.node.chip == said.chip,
                )

    asyncio.run(main())


def test_a_node_that_was_there_before_is_seen() -> None:
    node = new_node()

    async def main() -> None:
        async with multicast(here) as theirs, announcing(theirs, node):
            start = time.monotonic()
            async with multicast(here) as ours, browsing(ours) as browser:
                await event_of(browser, node.id)
                assert time.monotonic() - start < WITHIN_S
                start = time.monotonic()
            assert time.monotonic() - start < 2.0

    asyncio.run(main())


def test_a_killed_node_says_nothing_and_nothing_is_said_of_it() -> None:
    node = new_node()

    async def talk(_: Multicast, browser: Browser) -> None:
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, node.id, stdout=subprocess.PIPE
        )
        try:
            assert killed.stdout is not None
            async with asyncio.timeout(20):
                assert await killed.stdout.readline() == b"announced\n"
            await event_of(browser, node.id)
        finally:
            killed.send_signal(signal.SIGKILL)
            await killed.wait()
        await nothing_of(browser, node, 1.5)

    run(talk)


def test_two_machines_with_one_id_are_both_heard() -> None:
    node = new_node()
    copy = replace(node, name="copy", host_key_fingerprint="SHA256:" + "B" * 43)

    async def talk(sockets: Multicast, browser: Browser) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(announcing(sockets, node))
            first = await event_of(browser, node.id)
            other = await stack.enter_async_context(multicast(here))
            await stack.enter_async_context(announcing(other, copy))
            second = await event_of(
                browser, node.id, lambda event: isinstance(event, Seen) and event.node.name == "copy"
            )
        known = fold(fold(Roster(), first), second).get(node.id)
        assert known is not None and known.node.name == "mac"
        assert [impostor.name for impostor in known.impostors] == ["copy"]

    run(talk)


def test_addresses_that_change_are_announced_and_an_odd_interface_does_no_harm() -> None:
    node = new_node()
    # 203.0.113.9 is nobody's: it stands for an interface that cannot multicast.
    now = [("127.0.0.1", "203.0.113.9")]

    async def main() -> None:
        async with (
            multicast(lambda: now[0], poll_s=0.1) as theirs,
            announcing(theirs, node),
            multicast(here) as ours,
            browsing(ours) as browser,
        ):
            first = await event_of(browser, node.id)
            assert isinstance(first, Seen) and set(first.node.addresses) == {*now[0]}
            # An announcement replaces no records of the last second (RFC 6762, section 10.2).
            await asyncio.sleep(1.1)
            now[0] = ("127.0.0.1", "127.0.0.2")
            await event_of(
                browser,
                node.id,
                lambda event: isinstance(event, Seen) and set(event.node.addresses) == {*now[0]},
            )

    asyncio.run(main())


def test_without_any_network_nothing_breaks_and_with_one_the_node_is_announced() -> None:
    node = new_node()
    now: list[tuple[str, ...]] = [()]

    async def main() -> None:
        async with (
            multicast(lambda: now[0], poll_s=0.05) as sockets,
            announcing(sockets, node),
            browsing(sockets) as alone,
            multicast(here) as others,
            browsing(others) as browser,
        ):
            await nothing_of(alone, node, 0.05)
            now[0] = HERE
            seen = await event_of(browser, node.id)
            assert isinstance(seen, Seen) and seen.node.addresses == HERE

    asyncio.run(main())


def test_one_change_that_cannot_be_announced_does_not_end_the_announcing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, now, announce, failed = new_node(), [HERE], discovery.Announcer.repeat, asyncio.Event()

    async def once_not(announcer: discovery.Announcer) -> None:
        if not failed.is_set():
            failed.set()
            raise Refused("there is no room for it")
        await announce(announcer)

    monkeypatch.setattr(discovery.Announcer, "repeat", once_not)

    async def main() -> None:
        async with (
            multicast(lambda: now[0], poll_s=0.05) as sockets,
            announcing(sockets, node),
            multicast(here) as others,
            browsing(others) as browser,
        ):
            assert isinstance(await event_of(browser, node.id), Seen)
            now[0] = ("127.0.0.9", *HERE)
            await asyncio.wait_for(failed.wait(), WITHIN_S)
            now[0] = ("127.0.0.8", *HERE)
            await event_of(browser, node.id, wanted=lambda event: "127.0.0.8" in addresses_of(event))

    asyncio.run(main())


def addresses_of(event: Seen | Lost) -> tuple[str, ...]:
    return event.node.addresses if isinstance(event, Seen) else ()


def test_a_listed_host_is_known_at_once_and_identified_by_its_own_answer() -> None:
    # An address of this test alone, where there are some: a question to 127.0.0.1 may end at another test.
    own = f"127.77.{secrets.randbelow(256)}.{secrets.randbelow(250) + 1}" if LINUX else HERE[0]
    node = new_node()

    async def main() -> None:
        async with (
            multicast(lambda: (own,)) as theirs,
            announcing(theirs, node),
            multicast(here) as ours,
            browsing(ours, ["no-such-host.invalid", own]) as browser,
        ):
            seen = [await asyncio.wait_for(anext(browser), WITHIN_S)]
            while not (
                isinstance(seen[-1], Seen) and seen[-1].node.asked_as == own and seen[-1].node.identified
            ):
                seen.append(await asyncio.wait_for(anext(browser), WITHIN_S))
        roster = Roster()
        for event in seen:
            roster = fold(roster, event)
        assert [event.node.id for event in seen if isinstance(event, Seen)].count(NodeId(f"host:{own}")) > 0
        known = roster.get(node.id)
        assert known is not None and known.node.addresses == (own,)
        assert roster.get(NodeId(f"host:{own}")) is None

    asyncio.run(main())


JUNK = {
    "empty": b"",
    "huge": b"\xff" + b"x" * 255 + (b"\xff" + b"y" * 255) * 4,
    "binary": b"\x05\xff\xfe=\x00\x1b",
    "evil": b"\x03v=1\x23id=" + b"0" * 32 + b"\x19n=-oProxyCommand=touch /x",
    "numbers": b"\x03v=1\x23id=" + b"0" * 32 + b"\x03n=m\x08mem=1e99",
}


def test_junk_is_dropped_with_one_line_a_source_and_others_are_heard() -> None:
    node, mark = new_node(), secrets.token_hex(4)

    def junk(name: str, text: bytes) -> ServiceInfo:
        return ServiceInfo(
            SERVICE,
            f"{name}-{mark}.{SERVICE}",
            7,
            properties=text,
            server=f"{name}-{mark}.local.",
            parsed_addresses=["127.0.0.1"],
        )

    async def talk(sockets: Multicast, browser: Browser) -> None:
        zeroconf = sockets.zeroconf
        infos = [junk(name, text) for name, text in JUNK.items()]
        for said in [
            await zeroconf.async_register_service(info, cooperating_responders=True) for info in infos
        ]:
            await said
        await (await zeroconf.async_update_service(junk("evil", b"\x05a=\x1b[2J")))
        async with announcing(sockets, node):
            await event_of(browser, node.id)

    with capture_logs() as logs:
        run(talk)
    ours = [line for line in logs if mark in str(line.get("source"))]
    assert sorted(line["source"].split("-")[0] for line in ours) == sorted(JUNK)
    assert all(line["log_level"] == "warning" for line in ours)
    assert all(str(line["why"]).isascii() and str(line["why"]).isprintable() for line in ours)


class Asking(AsyncServiceInfo):
    """Counts how many ask at once for the rest of an announcement."""

    now = most = 0

    async def async_request(self, *given: Any, **more: Any) -> bool:
        Asking.now += 1
        Asking.most = max(Asking.most, Asking.now)
        try:
            return await super().async_request(*given, **more)
        finally:
            Asking.now -= 1


def test_an_announcement_that_is_never_whole_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointer without the records that it points to: asked for, in vain, by at most a few at a time."""
    monkeypatch.setattr(discovery, "AsyncServiceInfo", Asking)
    node = new_node()

    async def talk(sockets: Multicast, browser: Browser) -> None:
        for number in range(200):
            browser.change(
                browser._sockets.zeroconf.zeroconf,
                SERVICE,
                f"ghost-{number}.{SERVICE}",
                ServiceStateChange.Added,
                source="mdns",
            )
        async with announcing(sockets, node):
            await event_of(browser, node.id)

    run(talk)
    assert Asking.most == discovery.RESOLVERS


def test_a_port_that_cannot_be_shared_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    async def main() -> None:
        async with multicast(here):
            pass

    monkeypatch.setattr(discovery, "AsyncZeroconf", refuse)
    with pytest.raises(Refused, match=r"UDP port 5353 \(Address already in use"):
        asyncio.run(main())


# ------------------------------------------------------------------ the parts


def test_of_each_node_the_newest_waits_and_no_more_than_there_is_room_for() -> None:
    async def main() -> None:
        inbox = Inbox()
        node = new_node()
        inbox.put(Seen(node))
        inbox.put(Seen(replace(node, asked_as="studio", chip="Apple M1")))
        inbox.put(Seen(replace(node, seen_at=2.0, chip="Apple M5")))
        seen = await inbox.get()
        assert isinstance(seen, Seen)
        assert (seen.node.chip, seen.node.asked_as) == ("Apple M5", "studio")
        assert all(inbox.put(Seen(new_node())) for _ in range(MOST_WAITING))
        assert not inbox.put(Seen(new_node()))
        for _ in range(MOST_WAITING):
            await inbox.get()
        inbox.fail(Refused("the end"))
        with pytest.raises(Refused, match="the end"):
            await inbox.get()

    asyncio.run(main())


def test_complaints_are_one_a_minute_about_a_source_and_bounded_over_all() -> None:
    now = [0.0]
    complaints = Complaints(lambda: now[0])
    with capture_logs() as logs:
        assert complaints.tell("a\n\x1b[2J", "b\u202e" * 1000)
        assert not complaints.tell("a\n\x1b[2J", "again")
        assert [complaints.tell(str(number), "x") for number in range(2 * MOST_SOURCES)].count(True) == (
            MOST_SOURCES - 1
        )
        now[0] = EVERY_S
        assert complaints.tell("a\n\x1b[2J", "later")
    assert logs[0]["source"] == "a\\n\\x1b[2J"
    assert len(str(logs[0]["why"])) < 2000
    assert len(logs) == MOST_SOURCES + 1


def test_listed_hosts_are_checked_and_bounded() -> None:
    assert check_hosts(["studio.local", "10.0.0.2", "studio.local"]) == ("studio.local", "10.0.0.2")
    with pytest.raises(BadSetting, match="neither a name nor an address"):
        check_hosts(["-oProxyCommand=reboot"])
    with pytest.raises(BadSetting, match="at most"):
        check_hosts(f"mac-{number}" for number in range(100))


def test_a_resolver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(host: str) -> tuple[str, ...]:
        released.wait(30)
        return ("10.0.0.9",)

    monkeypatch.setattr(listed_hosts, "_resolve", hang)
    start = time.monotonic()
    assert asyncio.run(look_up("studio.local", 0.1)) == ()
    assert time.monotonic() - start < 2.0
    released.set()


def test_names_are_looked_up_and_unknown_ones_have_no_address() -> None:
    assert "127.0.0.1" in asyncio.run(look_up("localhost"))
    assert asyncio.run(look_up("10.0.0.2")) == ("10.0.0.2",)
    assert asyncio.run(look_up("no-such-host.invalid")) == ()
