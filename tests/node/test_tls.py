"""Links and control connections between machines: friends get through, strangers disturb nobody."""

import asyncio
import hashlib
import os
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import mlx.core as mx
import pytest
from structlog.testing import capture_logs

from omlx.cluster.membership import News, install_bundle, install_news
from omlx.cluster.trust import Trust, init_trust, issue, renew, revoke
from omlx.errors import BadSetting, LinkLost, StageLost, TooLate
from omlx.ids import Epoch, PlanId
from omlx.node import door
from omlx.node.channel import PAIRED, Channel, open_streams
from omlx.node.links import TcpLink
from omlx.node.tls import WELCOME, Security
from omlx.node.wire import Begin, Tag, read_exactly

BEGIN = Begin(Epoch(3), None, b"s" * 32, join_within_s=10.0, step_within_s=5.0)


@dataclass(frozen=True)
class Cluster:
    trust: Trust
    folder: Path

    def member(self, node_id: str, valid_for: timedelta = timedelta(days=9)) -> Security:
        return install_bundle(self.folder / node_id, issue(self.trust, node_id, [], [], valid_for)).security

    def take(self, news: News, *node_ids: str) -> None:
        for node_id in node_ids:
            install_news(self.folder / node_id, news)


def make_cluster(folder: Path) -> Cluster:
    return Cluster(init_trust(folder / "cluster", "head", [], []), folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return make_cluster(tmp_path)


@contextmanager
def listening() -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener, listener.getsockname()


def still() -> bool:
    return False


def tag(plan: int) -> Tag:
    return Tag(BEGIN.epoch, PlanId(plan), 0)


# ------------------------------------------------------------------ strangers, each with a real socket


def scanner(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    sock = socket.create_connection(address)
    sock.sendall(b"\x00\x9c\x00\x01\x1a\x2b\x3c\x4d" * 200)
    return sock


def browser(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    sock = socket.create_connection(address)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return sock


def plain_stage(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    sock = socket.create_connection(address)
    sock.sendall(b"oMLX\x01\x01" + bytes(80))
    return sock


def hung_up(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    sock = socket.create_connection(address)
    sock.close()
    return sock


def _tls(address: tuple[str, int], context: ssl.SSLContext) -> socket.socket:
    sock = context.wrap_socket(socket.create_connection(address), do_handshake_on_connect=False)
    threading.Thread(target=_shake, args=(sock,), daemon=True).start()
    return sock


def _shake(sock: ssl.SSLSocket) -> None:
    with suppress(OSError, ValueError):
        sock.settimeout(3)
        sock.do_handshake()
        sock.recv(1)


def no_certificate(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _tls(address, context)


def wrong_authority(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    folder = cluster.folder / "theirs"
    folder.mkdir(exist_ok=True)
    other = make_cluster(folder).member("b").context(server=False)
    other.verify_mode = ssl.CERT_NONE
    return _tls(address, other)


def expired(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    return _tls(address, cluster.member("late", timedelta(seconds=-1)).context(server=False))


def revoked(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    context = cluster.member("thrown-out").context(server=False)
    cluster.take(revoke(cluster.trust, "thrown-out"), "a")
    return _tls(address, context)


def copied_id(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    """A node of the cluster, where another one is due."""
    return _tls(address, cluster.member("c").context(server=False))


def old_tls(address: tuple[str, int], cluster: Cluster) -> socket.socket:
    context = cluster.member("b").context(server=False)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    return _tls(address, context)


STRANGERS: dict[Callable[[tuple[str, int], Cluster], socket.socket], str] = {
    scanner: "record layer failure|wrong version number",
    browser: "http request",
    plain_stage: "record layer failure|wrong version number",
    hung_up: "unexpected eof|eof|reset|not connected",
    no_certificate: "peer did not return a certificate",
    wrong_authority: "self-signed certificate in certificate chain|unable to get local issuer certificate"
    "|certificate signature failure",
    expired: "certificate has expired",
    revoked: "certificate revoked",
    copied_id: "it is node 'c', not 'b'",
    old_tls: "unsupported protocol",
}


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
def test_a_stranger_is_refused_in_one_line_and_the_right_one_gets_through(
    cluster: Cluster, stranger: Callable[[tuple[str, int], Cluster], socket.socket]
) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    with listening() as (listener, address), capture_logs() as logs:
        sock = stranger(address, cluster)
        givers: list[TcpLink] = []
        friend = threading.Timer(0.3, lambda: givers.append(TcpLink.connect(address, BEGIN, theirs, "a")))
        friend.start()
        started = time.monotonic()
        taker = TcpLink.accept(listener, BEGIN, still, ours, "b")
        assert time.monotonic() - started < 3.0
        friend.join()
        givers[0].close()
        taker.close()
        sock.close()
    (line,) = [entry for entry in logs if entry["event"] == "connection refused"]
    assert line["address"].startswith("127.0.0.1:")
    assert any(why in line["why"] for why in STRANGERS[stranger].split("|")), line


def test_silent_ones_are_gone_after_the_deadline_and_hold_up_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_WITHIN_S", 0.5)
    ours, theirs = cluster.member("a"), cluster.member("b")
    with listening() as (listener, address), capture_logs() as logs:
        silent = [socket.create_connection(address) for _ in range(door.VISITORS + 8)]
        giver = TcpLink.connect(address, BEGIN, theirs, "a")
        started = time.monotonic()
        taker = TcpLink.accept(listener, BEGIN, still, ours, "b")
        assert time.monotonic() - started < 2.0
        giver.give(tag(0), mx.ones((1, 1, 4)))
        assert taker.take(tag(0)).shape == (1, 1, 4)
        with pytest.raises(TooLate):
            TcpLink.accept(listener, short(0.9), still, ours, "b")
        for sock in silent:
            sock.settimeout(2)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
            sock.close()
        giver.close()
        taker.close()
    assert len([entry for entry in logs if entry["event"] == "connection refused"]) == len(silent)


def test_one_who_sends_a_byte_now_and_then_is_gone_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_WITHIN_S", 0.4)
    with listening() as (listener, address), capture_logs() as logs:
        dripping = socket.create_connection(address)
        gone = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not gone.wait(0.1):
                    dripping.sendall(b"o")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TooLate):
            TcpLink.accept(listener, short(1.0), still)
        gone.set()
        thread.join()
        dripping.close()
    assert [line["why"] for line in logs] == ["it was not through after 0.4 s"]


def short(join_within_s: float) -> Begin:
    return Begin(BEGIN.epoch, None, BEGIN.secret, join_within_s, step_within_s=1.0)


def test_a_certified_node_with_the_wrong_secret_is_refused_too(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    wrong = Begin(BEGIN.epoch, None, b"x" * 32, 5.0, 5.0)
    with listening() as (listener, address), capture_logs() as logs:
        giver = TcpLink.connect(address, wrong, theirs, "a")
        with pytest.raises(TooLate):
            TcpLink.accept(listener, short(0.5), still, ours, "b")
        giver.close()
    refused = [entry["why"] for entry in logs if entry["event"] == "connection refused"]
    assert set(refused) == {"it did not show what it had to"}  # it tries a few times


# ------------------------------------------------------------------ the side that connects


def refusal(address: tuple[str, int], security: Security, peer: str | None) -> str:
    link = TcpLink.connect(address, BEGIN, security, peer)
    end = time.monotonic() + 5
    with pytest.raises(StageLost) as lost:
        while time.monotonic() < end:
            link.give(tag(0), mx.ones((1, 1, 4)))
            time.sleep(0.01)
    link.close()
    return str(lost.value)


@pytest.mark.parametrize(
    ("who", "wanted", "why"),
    [
        ("wrong authority", "a", "not to be trusted: "),
        ("revoked", "a", "not to be trusted: certificate revoked"),
        ("expired", "a", "not to be trusted: certificate has expired"),
        ("another node", "z", "not to be trusted: it is node 'a', not 'z'"),
        ("we are revoked", "a", "does not let us in: "),
    ],
)
def test_who_connects_checks_the_listener_as_strictly(
    cluster: Cluster, tmp_path: Path, who: str, wanted: str, why: str
) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    if who == "wrong authority":
        (tmp_path / "theirs").mkdir()
        ours = make_cluster(tmp_path / "theirs").member("a")
    elif who == "revoked":
        cluster.take(revoke(cluster.trust, "a"), "b")
    elif who == "expired":
        ours = cluster.member("a", timedelta(seconds=-1))
    elif who == "we are revoked":
        cluster.take(revoke(cluster.trust, "b"), "a")
    with listening() as (listener, address), capture_logs():
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(refusal(address, theirs, wanted)))
        asking.start()
        with pytest.raises(TooLate):
            TcpLink.accept(listener, BEGIN, lambda: not asking.is_alive(), ours, "b")
        asking.join()
    assert why in answers[0]


def test_a_renewed_node_is_let_in_and_so_is_one_let_in_anew(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b", timedelta(seconds=-1))
    install_bundle(cluster.folder / "b", renew(cluster.trust, "b"))
    for _ in range(2):
        with listening() as (listener, address):
            giver = TcpLink.connect(address, BEGIN, theirs, "a")
            taker = TcpLink.accept(listener, BEGIN, still, ours, "b")
            giver.give(tag(0), mx.ones((1, 1, 4)))
            assert taker.take(tag(0)).shape == (1, 1, 4)
            giver.close()
            taker.close()
        cluster.take(revoke(cluster.trust, "b"), "a")
        cluster.member("b")


def test_certificates_that_cannot_be_used_lose_the_link_with_a_sentence(cluster: Cluster) -> None:
    theirs = cluster.member("b")
    key = Path(theirs.folder) / "node.key"
    with listening() as (listener, address):
        key.chmod(0o644)
        with pytest.raises(LinkLost, match="open to others"):
            TcpLink.connect(address, BEGIN, theirs, "a")
        with pytest.raises(LinkLost, match="open to others"):
            TcpLink.accept(listener, BEGIN, still, theirs, "b")
        key.chmod(0o600)
        (Path(theirs.folder) / "revocations.crl").unlink()
        with pytest.raises(BadSetting, match="cannot be used"):
            theirs.context(server=True)


def test_a_session_is_never_resumed_past_the_revocation_list(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    server, client = ours.context(server=True), theirs.context(server=False)
    left, right = socket.socketpair()
    with (
        server.wrap_socket(left, server_side=True, do_handshake_on_connect=False) as one,
        client.wrap_socket(right, do_handshake_on_connect=False) as other,
    ):
        shaking = threading.Thread(target=one.do_handshake)
        shaking.start()
        other.do_handshake()
        shaking.join()
        one.sendall(b"x")
        assert other.recv(1) == b"x"
        assert other.version() == "TLSv1.3"
        assert other.compression() is None
        assert other.session is None or not other.session.has_ticket


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 1, 64), (1, 3000, 64)])
def test_a_hidden_state_arrives_bit_for_bit_over_tls(cluster: Cluster, shape: tuple[int, int, int]) -> None:
    hidden = mx.random.normal(shape).astype(mx.bfloat16)
    mx.eval(hidden)
    with listening() as (listener, address):
        giver = TcpLink.connect(address, BEGIN, cluster.member("b"), "a")
        taker = TcpLink.accept(listener, BEGIN, still, cluster.member("a"), "b")
        giver.give(tag(0), hidden)
        assert mx.array_equal(taker.take(tag(0)), hidden).item()
        giver.close()
        with pytest.raises(LinkLost):
            taker.take(tag(1))
        taker.close()


def test_who_waits_for_room_learns_soon_that_the_other_side_refuses(cluster: Cluster) -> None:
    begin = Begin(BEGIN.epoch, None, BEGIN.secret, 20.0, step_within_s=20.0)
    theirs = cluster.member("b")
    with listening() as (listener, address), capture_logs():
        giver = TcpLink.connect(address, begin, theirs, "a")
        over = threading.Event()

        def hang_up() -> None:
            while not over.is_set():
                with suppress(OSError):
                    listener.settimeout(0.1)
                    listener.accept()[0].close()

        hanging_up = threading.Timer(0.3, hang_up)
        hanging_up.start()
        started = time.monotonic()
        with pytest.raises(LinkLost, match="does not let us in"):
            for plan in range(64):
                giver.give(tag(plan), mx.ones((1, 1, 4)))
        assert 0.2 < time.monotonic() - started < 5
        over.set()
        hanging_up.join(5)
        giver.close()


def test_three_that_connect_in_a_circle_before_they_accept_all_get_through(cluster: Cluster) -> None:
    """As stages do: each has one thread, which first connects to the next one."""
    ids = ["a", "b", "c"]
    members = [cluster.member(id) for id in ids]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ids]
    found: dict[int, tuple[TcpLink, TcpLink]] = {}

    def join(i: int) -> None:
        behind, before = (i + 1) % 3, (i - 1) % 3
        sink = TcpLink.connect(listeners[behind].getsockname(), BEGIN, members[i], ids[behind])
        found[i] = (TcpLink.accept(listeners[i], BEGIN, still, members[i], ids[before]), sink)

    threads = [threading.Thread(target=join, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    for i in range(3):
        found[i][1].give(tag(i), mx.full((1, 1, 4), i))
    for i in range(3):
        assert found[i][0].take(tag((i - 1) % 3))[0, 0, 0].item() == (i - 1) % 3
    for source, sink in found.values():
        source.close()
        sink.close()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("waits", ["give", "take"])
def test_closing_a_tls_link_wakes_who_waits_and_no_thread_stays(cluster: Cluster, waits: str) -> None:
    begin = Begin(BEGIN.epoch, None, BEGIN.secret, 10.0, step_within_s=60.0)
    big = mx.ones((1, 4096, 1024))
    mx.eval(big)
    before = threading.active_count()
    with listening() as (listener, address):
        giver = TcpLink.connect(address, begin, cluster.member("b"), "a")
        taker = TcpLink.accept(listener, begin, still, cluster.member("a"), "b")
        link = giver if waits == "give" else taker
        threading.Timer(0.2, link.close).start()
        with pytest.raises(LinkLost):
            for plan in range(64):
                if waits == "give":
                    giver.give(tag(plan), big)
                else:
                    taker.take(tag(plan))
        giver.close()
        taker.close()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before


# ------------------------------------------------------------------ control connections


@contextmanager
def channel(cluster: Cluster) -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = cluster.member("a"), cluster.member("b")
    with listening() as (listener, address):
        opened: list[Channel] = []
        opening = threading.Thread(target=lambda: opened.append(Channel.connect(address, theirs, "a")))
        opening.start()
        accepted = Channel.accept(listener, ours, "b", 5.0)
        opening.join()
    try:
        yield accepted, opened[0]
    finally:
        accepted.close()
        opened[0].close()


def test_a_control_connection_reads_and_writes_at_once_and_ends_like_a_socket(cluster: Cluster) -> None:
    with channel(cluster) as (one, other):
        assert (one.peer, other.peer) == ("b", "a")
        one.sendall(b"down")
        other.sendall(b"up!!")
        for end, wanted in ((other, b"down"), (one, b"up!!")):
            got = bytearray(4)
            assert end.recv_into(memoryview(got)) == 4
            assert got == wanted
        one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            one.recv_into(memoryview(bytearray(1)))
        threading.Timer(0.1, one.close).start()
        assert other.recv_into(memoryview(bytearray(1))) == 0


def test_closing_a_control_connection_wakes_who_reads_from_it_in_another_thread(cluster: Cluster) -> None:
    with channel(cluster) as (one, _):
        one.settimeout(30)
        threading.Timer(0.1, one.close).start()
        started = time.monotonic()
        with suppress(OSError):
            assert one.recv_into(memoryview(bytearray(1))) == 0
        assert time.monotonic() - started < 10


def test_halves_of_different_nodes_or_connections_are_not_put_together(cluster: Cluster) -> None:
    ours, theirs, third = (cluster.member(id) for id in ("a", "b", "c"))
    with listening() as (listener, address), capture_logs():
        greeted: list[bytes] = []
        results: list[bytes] = []

        def half(security: Security, shows: bytes) -> None:
            with suppress(OSError), socket.create_connection(address) as plain:
                sock = security.context(server=False).wrap_socket(plain)
                greeted.append(sock.recv(1))
                sock.sendall(shows)
                sock.settimeout(5)
                results.append(sock.recv(1))
                sock.close()

        shows = [
            (theirs, b"oMLX>" + b"n" * 16),
            (third, b"oMLX<" + b"n" * 16),  # same nonce, another node
            (theirs, b"oMLX<" + b"m" * 16),  # another nonce
            (theirs, b"oMLX?" + b"n" * 16),
        ]
        threads = [threading.Thread(target=half, args=pair) for pair in shows]
        for thread in threads:
            thread.start()
        with pytest.raises(TooLate):
            Channel.accept(listener, ours, None, 1.0)
        for thread in threads:
            thread.join()
    assert greeted == [WELCOME] * len(shows) and PAIRED not in results


def test_a_control_connection_nobody_accepts_is_an_error_in_time(cluster: Cluster) -> None:
    theirs = cluster.member("b")
    with listening() as (_, address):
        started = time.monotonic()
        with pytest.raises(
            LinkLost, match=r"^127\.0\.0\.1:\d+: the other side does not let us in: nothing came"
        ):
            Channel.connect(address, theirs, "a", within_s=0.4)
        with pytest.raises(LinkLost, match=r"within 0\.4 s"):
            asyncio.run(open_streams(address, theirs, "a", within_s=0.4))
        assert time.monotonic() - started < 2
    with pytest.raises(LinkLost, match="does not let us in: Connection refused"):
        Channel.connect(address, theirs, "a")
    with pytest.raises(LinkLost, match="does not let us in: Connection refused"):
        asyncio.run(open_streams(address, theirs, "a"))


def echo(channel: Channel, size: int) -> None:
    data = bytearray(size)
    with suppress(OSError, StageLost):
        while True:
            read_exactly(channel, memoryview(data))  # type: ignore[arg-type]
            channel.sendall(data)


def test_the_head_speaks_on_asyncio_to_a_stage_that_blocks(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")

    async def head(address: tuple[str, int]) -> None:
        with pytest.raises(LinkLost, match="it is node 'a', not 'z'"):
            await open_streams(address, theirs, "z")
        streams = await open_streams(address, theirs, "a")
        assert streams.peer == "a"
        for _ in range(3):
            data = os.urandom(300_000)
            streams.writer.write(data)
            assert await streams.reader.readexactly(len(data)) == data
        streams.close()
        await asyncio.sleep(0)

    with listening() as (listener, address), capture_logs():
        ends: list[Channel] = []

        def stage() -> None:
            ends.append(Channel.accept(listener, ours, "b", 10.0))
            echo(ends[0], 300_000)

        running = threading.Thread(target=stage)
        running.start()
        asyncio.run(head(address))
        running.join(timeout=5)
        assert not running.is_alive()
        ends[0].close()


def test_the_head_is_told_when_the_stage_is_gone(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")

    async def head(address: tuple[str, int]) -> None:
        streams = await open_streams(address, theirs, "a")
        async with asyncio.timeout(5):  # outside: its TimeoutError is an OSError too
            with pytest.raises((asyncio.IncompleteReadError, OSError)):
                await streams.reader.readexactly(1)
        streams.close()
        await asyncio.sleep(0)

    with listening() as (listener, address):
        stage = threading.Thread(target=lambda: Channel.accept(listener, ours, "b", 10.0).close())
        stage.start()
        asyncio.run(head(address))
        stage.join()


def test_a_revoked_head_is_refused_with_a_sentence(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    cluster.take(revoke(cluster.trust, "b"), "a")
    with listening() as (listener, address), capture_logs() as logs:
        asked: list[str] = []

        def ask() -> None:
            for connect in (
                lambda: asyncio.run(open_streams(address, theirs, "a")),
                lambda: Channel.connect(address, theirs, "a"),
            ):
                with pytest.raises(LinkLost) as lost:
                    connect()
                asked.append(str(lost.value))

        asking = threading.Thread(target=ask)
        asking.start()
        with pytest.raises(TooLate):
            Channel.accept(listener, ours, None, 10.0, over=lambda: not asking.is_alive())
        asking.join()
    assert all("revoked" in text or "let us in" in text for text in asked), asked
    assert [entry["why"] for entry in logs] == ["certificate revoked"] * 2


ECHO = textwrap.dedent(
    """
    import hashlib, socket, sys, threading
    from omlx.node.channel import Channel
    from omlx.node.tls import Security
    from omlx.node.wire import read_exactly
    port, folder, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    channel = Channel.connect(("127.0.0.1", port), Security(folder), "a")
    block = bytes(range(256)) * 4096
    def send():
        for i in range(size // len(block)):
            channel.sendall(bytes([i % 256]) + block[1:])
    sending = threading.Thread(target=send)
    sending.start()
    digest, got = hashlib.sha256(), bytearray(len(block))
    for _ in range(size // len(block)):
        read_exactly(channel, memoryview(got))
        digest.update(got)
    sending.join()
    print(digest.hexdigest())
    channel.sendall(b"x")
    channel.recv_into(memoryview(bytearray(1)))
    """
)


def test_two_processes_send_100_mb_both_ways_at_once_and_not_a_bit_is_wrong(cluster: Cluster) -> None:
    ours, theirs = cluster.member("a"), cluster.member("b")
    blocks = 100
    block = bytes(range(256)) * 4096
    with listening() as (listener, address):
        child = subprocess.Popen(
            [sys.executable, "-c", ECHO, str(address[1]), theirs.folder, str(blocks * len(block))],
            stdout=subprocess.PIPE,
        )
        ours_end = Channel.accept(listener, ours, "b", 20.0)
    sent, received, got = hashlib.sha256(), hashlib.sha256(), bytearray(len(block))

    def send() -> None:
        for i in range(blocks):
            data = bytes([(7 * i) % 256]) + block[1:]
            sent.update(data)
            ours_end.sendall(data)

    sending = threading.Thread(target=send)
    sending.start()
    for i in range(blocks):
        read_exactly(ours_end, memoryview(got))  # type: ignore[arg-type]
        received.update(got)
        assert got[0] == i % 256
        assert got[1:] == block[1:]
    sending.join()
    ours_end.recv_into(memoryview(got))
    ours_end.close()
    output, _ = child.communicate(timeout=20)
    assert output.decode().strip() == sent.hexdigest()
