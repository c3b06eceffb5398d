"""Frames: what goes in comes out, and what is none of ours is refused before it is believed."""

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.errors import LinkLost, OutOfStep, TooLate
from omlx.ids import Epoch, PlanId, SeqId
from omlx.node.step import Admit, Sampled, SamplingParams, Slice, StepPlan, StepResult
from omlx.node.wire import (
    CONTROL,
    HEADER,
    HIDDEN,
    NO_TAG,
    Begin,
    Begun,
    Broken,
    Done,
    Load,
    Loaded,
    Ping,
    Pong,
    Refusal,
    Step,
    Tag,
    ToHead,
    ToStage,
    control_frame,
    pack_header,
    parse_header,
    read_exactly,
    read_for_head,
    read_for_stage,
)

numbers = st.integers(0, 2**31)
tokens = st.lists(numbers, max_size=9).map(tuple)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**63 - 1),
    logit_bias=st.lists(st.tuples(numbers, st.floats(-9, 9)), max_size=3).map(tuple),
    top_logprobs=st.none() | st.integers(0, 20),
)
plans = st.builds(
    StepPlan,
    numbers.map(PlanId),
    numbers.map(Epoch),
    tokens,
    st.lists(st.builds(Admit, numbers.map(SeqId), params, tokens, tokens), max_size=3).map(tuple),
    st.lists(st.builds(Slice, numbers.map(SeqId), tokens, numbers, st.booleans()), max_size=3).map(tuple),
)
results = st.builds(
    StepResult,
    numbers.map(PlanId),
    numbers.map(Epoch),
    st.lists(st.builds(Sampled, numbers.map(SeqId), numbers, st.none() | st.floats(-9, 0)), max_size=3).map(
        tuple
    ),
)


@given(
    st.one_of(
        plans.map(Step),
        st.builds(Ping, numbers),
        st.builds(Load, st.text(), numbers, st.none() | numbers, st.text(), st.floats(0, 1)),
        st.builds(
            Begin,
            numbers.map(Epoch),
            st.none() | st.tuples(st.text(), numbers),
            st.binary(),
            st.floats(0, 9),
            st.floats(0, 9),
        ),
    )
)
def test_a_message_to_a_stage_arrives_as_it_was_sent(message: ToStage) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(control_frame(message))
        assert read_for_stage(theirs) == message


@given(
    st.one_of(
        results.map(Done),
        st.builds(Loaded, numbers, numbers, numbers),
        st.builds(Begun, numbers.map(Epoch)),
        st.builds(Broken, numbers.map(Epoch), st.text()),
        st.builds(Refusal, st.text(), st.text()),
        st.builds(Pong, numbers, numbers, numbers, numbers),
    )
)
def test_a_message_to_the_head_arrives_as_it_was_sent(message: ToHead) -> None:
    async def arrive() -> ToHead:
        reader = asyncio.StreamReader()
        reader.feed_data(control_frame(message))
        return await read_for_head(reader)

    assert asyncio.run(arrive()) == message


@given(st.integers(0, 3), st.integers(0, 2**32 - 1), numbers, st.integers(0, 99), st.integers(0, 5))
def test_a_header_is_read_back_or_refused(kind: int, epoch: int, plan: int, part: int, dtype: int) -> None:
    tag = Tag(Epoch(epoch), PlanId(plan), part)
    data = pack_header(kind, tag, 24, dtype, (1, 2, 3))
    if kind == 3 or (kind == HIDDEN and dtype not in (0, 3)):
        with pytest.raises(OutOfStep):
            parse_header(data)
    else:
        header = parse_header(data)
        assert (header.kind, header.tag, header.length, header.shape) == (kind, tag, 24, (1, 2, 3))


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_noise_is_no_header(noise: bytes) -> None:
    if not noise.startswith(b"oMLX"):
        with pytest.raises(OutOfStep):
            parse_header(noise)


def test_an_absurd_length_is_refused_before_memory_is_taken_for_it() -> None:
    for kind, shape in ((CONTROL, (0, 0, 0)), (HIDDEN, (1, 1, 2**32 - 1))):
        with pytest.raises(OutOfStep):
            parse_header(pack_header(kind, NO_TAG, 2**50, 0, shape))


def test_a_frame_that_is_no_message_is_out_of_step() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack_header(CONTROL, NO_TAG, 3) + b"abc")
        with pytest.raises(OutOfStep):
            read_for_stage(theirs)


def test_a_closed_a_reset_and_a_silent_socket_are_told_apart() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(b"half")
        ours.close()
        with pytest.raises(LinkLost):
            read_exactly(theirs, memoryview(bytearray(9)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.01)
        with pytest.raises(TooLate):
            read_exactly(theirs, memoryview(bytearray(9)))
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        # Linger of zero: closing sends a reset.
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(LinkLost):
            read_exactly(near, memoryview(bytearray(9)))
