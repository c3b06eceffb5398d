"""What the relay does to frames, without a network."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.relay import HEADER_BYTES, LEAST_BUFFER_BYTES, Lane, Link

HEADER = bytes(HEADER_BYTES)
UNICAST, MDNS, BROADCAST = bytes.fromhex("027700000001"), bytes.fromhex("01005e0000fb"), b"\xff" * 6


@dataclass
class Sent:
    frames: list[bytes] = field(default_factory=list)

    def send(self, frame: bytes, /) -> int:
        self.frames.append(frame)
        return len(frame)


def never() -> float:
    return 0.999


def passed(link: Link, *targets: bytes, draw: float = 0.999) -> list[bytes]:
    sent = Sent()
    lane = Lane(sent)
    for target in targets:
        lane.take(HEADER + target, 0.0, link, lambda: draw)
    lane.give(1e9)
    return [frame[HEADER_BYTES:] for frame in sent.frames]


def test_a_filter_of_multicast_lets_arp_through() -> None:
    assert passed(Link(multicast=False), UNICAST, MDNS, BROADCAST) == [UNICAST, BROADCAST]
    assert passed(Link(), UNICAST, MDNS, BROADCAST) == [UNICAST, MDNS, BROADCAST]


def test_a_lossy_link_loses_what_the_dice_say() -> None:
    assert passed(Link(loss=0.5), UNICAST, draw=0.49) == []
    assert passed(Link(loss=0.5), UNICAST, draw=0.5) == [UNICAST]


def test_a_delayed_frame_leaves_at_its_time_and_not_before() -> None:
    sent = Sent()
    lane = Lane(sent)
    lane.take(HEADER + UNICAST, 10.0, Link(delay_s=0.25), never)
    assert lane.idle_s(10.0, most=5) == pytest.approx(0.25)
    lane.give(10.2)
    assert sent.frames == []
    lane.give(10.3)
    assert sent.frames == [HEADER + UNICAST]
    assert lane.waiting_bytes == 0


def test_frames_follow_each_other_at_the_rate() -> None:
    lane = Lane(Sent())
    for _ in range(3):
        lane.take(HEADER + bytes(1000), 0.0, Link(rate_bytes_s=1000), never)
    assert [at for at, _ in lane.waiting] == pytest.approx([1, 2, 3])


def test_what_a_full_link_is_given_is_lost() -> None:
    lane = Lane(Sent())
    for _ in range(1000):
        lane.take(HEADER + bytes(1000), 0.0, Link(rate_bytes_s=1000), never)
    assert lane.waiting_bytes < LEAST_BUFFER_BYTES + 2000


@given(
    st.lists(st.tuples(st.integers(0, 1500), st.floats(0, 0.1), st.floats(0, 0.99)), max_size=40),
    st.builds(
        Link,
        st.floats(0, 0.1),
        st.floats(0, 0.1),
        st.just(0.0),
        st.sampled_from([0.0, 1e4, 1e7]),
        st.just(True),
    ),
)
def test_no_frame_overtakes_another_or_leaves_before_it_came(
    frames: list[tuple[int, float, float]], link: Link
) -> None:
    sent = Sent()
    lane = Lane(sent)
    now = 0.0
    given_frames = []
    for number, (size, after_s, drawn) in enumerate(frames):
        now += after_s
        frame = HEADER + number.to_bytes(2, "big") + bytes(size)
        lane.take(frame, now, link, iter([drawn]).__next__)
        given_frames.append(frame)
        assert all(at >= now + link.delay_s - link.jitter_s - 1e-9 for at, f in lane.waiting if f is frame)
    times = [at for at, _ in lane.waiting]
    assert times == sorted(times)
    lane.give(1e9)
    assert sent.frames == given_frames
    assert lane.waiting_bytes == 0
