"""Every way to hand on a hidden state keeps the same promises."""

import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from omlx.errors import LinkLost, OutOfStep, StageLost, TooLate
from omlx.ids import Epoch, PlanId
from omlx.node.links import DEPTH, Link, QueueLink, TcpLink
from omlx.node.wire import Begin, Tag

SECRET = b"s" * 32
EPOCH = Epoch(3)


def tag(plan: int, part: int = 0, epoch: Epoch = EPOCH) -> Tag:
    return Tag(epoch, PlanId(plan), part)


def begin(deadline_s: float, epoch: Epoch = EPOCH, secret: bytes = SECRET) -> Begin:
    return Begin(epoch, None, secret, join_within_s=deadline_s, step_within_s=deadline_s)


def still() -> bool:
    return False


@contextmanager
def tcp(deadline_s: float) -> Iterator[tuple[Link, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        giver = TcpLink.connect(address, begin(deadline_s))
        taker = TcpLink.accept(listener, begin(deadline_s), still)
        try:
            yield giver, taker
        finally:
            giver.close()
            taker.close()


@contextmanager
def queue(deadline_s: float) -> Iterator[tuple[Link, Link]]:
    link = QueueLink(deadline_s)
    yield link, link
    link.close()


KINDS = pytest.mark.parametrize("kind", [tcp, queue])


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 1, 64), (1, 700, 64)])
def test_a_hidden_state_arrives_bit_for_bit(kind, dtype: str, shape: tuple[int, int, int]) -> None:
    hidden = mx.random.normal(shape).astype(getattr(mx, dtype))
    mx.eval(hidden)
    with kind(5.0) as (giver, taker):
        giver.give(tag(0), hidden)
        found = taker.take(tag(0))
    assert found.dtype == hidden.dtype
    assert mx.array_equal(found, hidden).item()


@KINDS
def test_a_strided_view_arrives_as_what_it_shows(kind) -> None:
    whole = mx.arange(48, dtype=mx.float32).reshape(2, 3, 8)
    view = whole[:, ::2, :]
    mx.eval(view)
    with kind(5.0) as (giver, taker):
        giver.give(tag(0), view)
        assert mx.array_equal(taker.take(tag(0)), view).item()


@KINDS
def test_order_is_kept_and_another_step_is_refused(kind) -> None:
    hidden = mx.ones((1, 1, 4))
    with kind(5.0) as (giver, taker):
        giver.give(tag(0), hidden)
        giver.give(tag(0, part=1), hidden * 2)
        giver.give(tag(2), hidden)
        assert taker.take(tag(0))[0, 0, 0].item() == 1
        assert taker.take(tag(0, part=1))[0, 0, 0].item() == 2
        with pytest.raises(OutOfStep):
            taker.take(tag(1))


@KINDS
def test_nothing_before_the_deadline_is_an_error(kind) -> None:
    with kind(0.05) as (_, taker), pytest.raises(TooLate):
        taker.take(tag(0))


def test_a_neighbour_that_takes_nothing_pushes_back_within_the_deadline() -> None:
    with queue(0.05) as (giver, _):
        for plan in range(DEPTH):
            giver.give(tag(plan), mx.ones((1, 1, 4)))
        with pytest.raises(TooLate):
            giver.give(tag(DEPTH), mx.ones((1, 1, 4)))


def test_over_a_socket_too_nothing_piles_up_without_limit() -> None:
    big = mx.ones((1, 4096, 1024))
    mx.eval(big)
    with tcp(0.3) as (giver, _), pytest.raises(TooLate):
        for plan in range(64):
            giver.give(tag(plan), big)


def test_a_neighbour_that_hangs_up_is_lost_to_both_sides() -> None:
    with tcp(5.0) as (giver, taker):
        giver.close()
        with pytest.raises(LinkLost):
            taker.take(tag(0))
    with tcp(5.0) as (giver, taker):
        taker.close()
        with pytest.raises(StageLost):
            for plan in range(200):
                giver.give(tag(plan), mx.ones((1, 64, 1024)))


@pytest.mark.parametrize(
    ("epoch", "secret"),
    [(Epoch(2), SECRET), (EPOCH, b"x" * 32), (EPOCH, b"short"), (EPOCH, b"")],
)
def test_who_does_not_show_the_epoch_and_the_secret_is_hung_up_on(epoch: Epoch, secret: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = TcpLink.connect(listener.getsockname(), begin(1.0, epoch, secret))
        friend = TcpLink.connect(listener.getsockname(), begin(5.0))
        friend.give(tag(0), mx.ones((1, 1, 4)))
        taker = TcpLink.accept(listener, begin(5.0), still)
        assert taker.take(tag(0)).shape == (1, 1, 4)
        end = time.monotonic() + 4
        with pytest.raises(StageLost):  # it tries again for a while, and nobody looks at it any more
            while time.monotonic() < end:
                stranger.give(tag(0), mx.ones((1, 1, 4)))
                time.sleep(0.01)
        for link in (stranger, friend, taker):
            link.close()


def test_who_waits_at_the_door_of_an_epoch_that_is_over_is_joined_at_the_next() -> None:
    """Another stage was lost while the pipeline was rebuilt: the door of the old epoch took the connection
    for the new one, was closed, and that stage waited two minutes for a neighbour who thought it was in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = threading.Event()
        old, new = begin(30.0, Epoch(1)), begin(30.0, Epoch(2))

        def wait_in_vain() -> None:
            with pytest.raises(TooLate):
                TcpLink.accept(listener, old, told.is_set)

        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        giver = TcpLink.connect(listener.getsockname(), new)
        giver.give(tag(0, epoch=Epoch(2)), mx.ones((1, 1, 4)))
        time.sleep(0.2)  # it is through the old door's handshake, or hung up on
        told.set()
        waiting.join(5)
        started = time.monotonic()
        taker = TcpLink.accept(listener, new, still)
        assert taker.take(tag(0, epoch=Epoch(2))).shape == (1, 1, 4)
        assert time.monotonic() - started < 2
        for link in (giver, taker):
            link.close()


def test_an_end_that_is_closed_between_two_tries_to_join_tries_no_more() -> None:
    """It had hung up the socket of the last try, and the next one waited for a welcome for two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = set(threading.enumerate())
        giver = TcpLink.connect(listener.getsockname(), begin(30.0))
        (writer,) = set(threading.enumerate()) - before
        listener.accept()[0].close()
        time.sleep(0.02)  # into the pause before the next try
        giver.close()
        writer.join(2)
        assert not writer.is_alive()


def test_nobody_listening_and_nobody_connecting_are_errors_not_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with pytest.raises(TooLate):
            TcpLink.accept(listener, begin(0.05), still)
        started = time.monotonic()
        with pytest.raises(TooLate):
            TcpLink.accept(listener, begin(60.0), over=lambda: True)
        assert time.monotonic() - started < 5
    with pytest.raises(LinkLost):
        TcpLink.connect(address, begin(0.5))


@pytest.mark.parametrize("waits", ["give", "take"])
def test_closing_from_another_thread_wakes_who_waits_at_once(waits: str) -> None:
    """A stage that waits for a neighbour of an epoch that is over begins the next one without delay."""
    big = mx.ones((1, 4096, 1024))
    mx.eval(big)
    with tcp(60.0) as (giver, taker):
        link = giver if waits == "give" else taker
        threading.Timer(0.3, link.close).start()
        started = time.monotonic()
        with pytest.raises(LinkLost):
            for plan in range(64):
                if waits == "give":
                    link.give(tag(plan), big)
                else:
                    link.take(tag(plan))
        assert time.monotonic() - started < 10


def test_threads_end_with_their_link() -> None:
    before = threading.active_count()
    with tcp(5.0) as (giver, taker):
        giver.give(tag(0), mx.ones((1, 1, 4)))
        taker.take(tag(0))
        threads = [t for t in threading.enumerate() if t.name.startswith("link-")]
        assert len(threads) >= 2
    for thread in threads:
        thread.join(timeout=5)
    assert threading.active_count() <= before


RING = textwrap.dedent(
    """
    import sys, mlx.core as mx
    from omlx.node.host import join_group, give_up
    from omlx.node.links import MxLink
    from omlx.node.wire import Begin, Tag
    from omlx.errors import OutOfStep
    rank, ring = int(sys.argv[1]), tuple(sys.argv[2:])
    group = join_group(ring, rank, "ring")
    link = MxLink(group, 1 - rank, mx.new_stream(mx.cpu), give_up)
    shapes = [(1, 1, 8), (2, 3, 16), (1, 300, 64)]
    for plan, shape in enumerate(shapes):
        for dtype in (mx.float32, mx.bfloat16, mx.float16):
            hidden = (mx.arange(shape[0] * shape[1] * shape[2]).reshape(shape) % 7).astype(dtype)
            if rank == 0:
                link.give(Tag(1, plan, 0), hidden)
            else:
                found = link.take(Tag(1, plan, 0))
                assert found.dtype == dtype and mx.array_equal(found, hidden).item()
    if rank == 0:
        link.give(Tag(1, 9, 0), mx.ones((1, 1, 4)))
    else:
        try:
            link.take(Tag(1, 8, 0))
        except OutOfStep:
            print("all right")
    """
)


def test_a_ring_of_mx_distributed_carries_the_same_frames(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ring = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in (a, b)]
    script = tmp_path / "ring.py"
    script.write_text(RING)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *ring], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], json.dumps([e.decode() for _, e in outputs])
    assert outputs[1][0].decode().strip() == "all right"
