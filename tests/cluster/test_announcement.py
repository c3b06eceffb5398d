"""What a node says in its TXT record, and what is taken of what anybody says there."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omlx.cluster.announcement import from_text, to_text
from omlx.cluster.nodes import MOST_MEMORY_BYTES, Node, NodeId, Versions, reach_of
from omlx.errors import Refused

LARGEST = Node(
    NodeId("f" * 32),
    "n" * 48,
    reach_of(["10.0.0.1"], 1.0),
    1.0,
    ssh_port=65535,
    agent_port=65535,
    versions=Versions(*("9" * 24,) * 5),
    chip="C" * 40,
    memory_bytes=MOST_MEMORY_BYTES,
    host_key_fingerprint="SHA256:" + "A" * 43,
    cluster="0" * 16,
)
SMALLEST = Node(NodeId("0" * 32), "n", reach_of(["10.0.0.1"], 1.0), 1.0)


def read(text: bytes, *addresses: str, port: int | None = 7000) -> Node:
    return from_text(text, addresses or ("10.0.0.1",), port, at=1.0, source="mdns")


def text_of(**said: str) -> bytes:
    parts = [
        f"{key}={value}".encode() for key, value in {"v": "1", "id": "0" * 32, "n": "mac", **said}.items()
    ]
    return b"".join(bytes([len(part)]) + part for part in parts)


@pytest.mark.parametrize("node", [LARGEST, SMALLEST], ids=["largest", "smallest"])
def test_what_is_said_is_understood(node: Node) -> None:
    assert read(to_text(node), port=node.agent_port) == node


def test_the_most_that_can_be_said_is_below_400_bytes() -> None:
    assert len(to_text(LARGEST)) < 400


def test_keys_that_a_later_version_adds_are_passed_over() -> None:
    assert read(text_of(new="1", MEM="5")).memory_bytes == 5


def test_of_a_key_given_twice_the_first_counts() -> None:
    assert read(to_text(replace(SMALLEST, name="first")) + b"\x08n=second").name == "first"


def test_a_port_of_nothing_is_none() -> None:
    assert read(text_of(), port=0).agent_port is None


@pytest.mark.parametrize(
    "text, why",
    [
        (b"", "protocol"),
        (text_of(v="2"), "protocol '2'"),
        (b"\x03v=1", "no id"),
        (text_of(id="host:studio"), "32 hexadecimal"),
        (text_of(id="x" * 32), "32 hexadecimal"),
        (text_of(n="-oProxyCommand=reboot"), "name"),
        (text_of(n="a`reboot`"), "name"),
        (text_of(n=""), "name"),
        (text_of(chip="\x1b[2J"), "chip"),
        (text_of(vo="1" * 25), "omlx"),
        (text_of(mem="1e9"), "mem"),
        (text_of(mem="-1"), "mem"),
        (text_of(mem="9" * 200), "mem"),
        (text_of(mem="0"), "mem"),
        (text_of(ssh="65536"), "ssh"),
        (text_of(ssh=""), "ssh"),
        (text_of(fp="SHA256:short"), "fingerprint"),
        (text_of(cl="zz"), "cluster"),
        (text_of() + b"\x20short", "ends in the middle"),
        (text_of() + b"\x05n2=\xff\xfe", "ASCII"),
        (text_of() + b"\xff" + b"x" * 255 + (b"\xff" + b"y" * 255) * 4, "bytes"),
    ],
)
def test_junk_is_refused_with_what_is_wrong(text: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read(text)


def test_digits_of_other_scripts_are_no_numbers() -> None:
    with pytest.raises(Refused, match="ASCII"):
        read(text_of(mem="\u0661\u0662"))


def test_a_node_without_an_address_is_refused() -> None:
    with pytest.raises(Refused, match="address"):
        from_text(text_of(), [], 7000, at=1.0, source="mdns")


def test_of_many_addresses_the_first_sixteen_are_kept() -> None:
    assert len(read(text_of(), *(f"10.0.0.{number}" for number in range(1, 100))).addresses) == 16


@given(st.binary(max_size=600))
@example(bytes([255]) * 300)
def test_any_bytes_make_a_node_or_a_sentence(text: bytes) -> None:
    try:
        read(text)
    except Refused as error:
        assert str(error)


@given(
    st.dictionaries(
        st.sampled_from(["v", "id", "n", "fp", "ssh", "cl", "chip", "mem", "vo", "vp"]),
        st.text(st.characters(codec="ascii"), max_size=60),
    )
)
def test_any_values_make_a_node_or_a_sentence(said: dict[str, str]) -> None:
    try:
        node = read(text_of(**said))
    except Refused as error:
        assert str(error)
    else:
        assert read(to_text(node)) == node
