"""The nodes that joined: kept on disk, found by what people call them."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omlx.cluster.findings import LinkFinding
from omlx.cluster.members import MOST_MEMBERS, Joined, Members, add_member, read_members, remove_member
from omlx.cluster.nodes import NodeId
from omlx.errors import BadSetting

SLOW = LinkFinding("10.0.0.1", "10.0.0.2", "wifi", 0.004, 2e7, 3e7)
FAST = LinkFinding("169.254.0.1", "169.254.0.2", "thunderbolt", 0.0004, 9e8, 8e8)
BROKEN = LinkFinding("10.1.0.1", "10.1.0.2", "ethernet", 0.0001, None, None)


def node(number: int, name: str = "", host: str = "") -> Joined:
    return Joined(
        id=NodeId(f"{number:032x}"),
        name=name or f"mac-{number}",
        host=host or f"10.0.0.{number}",
        user="me",
        port=22,
        fingerprint=f"SHA256:{number}",
        chip="Apple M4",
        memory_bytes=16 << 30,
        addresses=("10.0.0.2",),
        links=(SLOW, FAST, BROKEN),
        joined_at=datetime(2026, 11, 30, tzinfo=UTC),
    )


def test_who_joined_is_there_after_a_restart_and_gone_after_leaving(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert list(read_members(tmp_path)) == []
    for number in (1, 2):
        add_member(tmp_path, node(number))
    moved = replace(node(1), host="10.0.0.9")
    add_member(tmp_path, moved)
    assert set(read_members(tmp_path)) == {moved, node(2)}
    assert (tmp_path / "members.json").stat().st_mode & 0o077 == 0
    remove_member(tmp_path, node(2).id)
    remove_member(tmp_path, node(2).id)
    assert list(read_members(tmp_path)) == [moved]


def test_a_node_is_found_by_host_name_short_name_or_the_beginning_of_its_id() -> None:
    one, other = node(0xABCD << 112, "studio.local", "192.168.1.5"), node(2, "mini")
    members = Members((one, other))
    for word in ("192.168.1.5", "studio.local", "studio", one.id[:4], one.id):
        assert members.find(word) == one
    assert members.find("mini") == other


@pytest.mark.parametrize(
    ("word", "said"), [("nobody", "there are: studio, mini, mini"), ("mini", "means several")]
)
def test_a_word_for_nobody_or_several_is_refused_with_what_there_is(word: str, said: str) -> None:
    members = Members((node(1, "studio"), node(2, "mini"), node(3, "mini")))
    with pytest.raises(BadSetting, match=said):
        members.find(word)


def test_a_file_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    add_member(tmp_path, node(1))
    (tmp_path / "members.json").chmod(0o644)
    with pytest.raises(BadSetting, match="open to others"):
        read_members(tmp_path)
    (tmp_path / "members.json").chmod(0o600)
    (tmp_path / "members.json").write_text('{"joined": [{}]}')
    with pytest.raises(BadSetting, match=r"members\.json cannot be read"):
        read_members(tmp_path)


def test_there_is_a_limit_and_joining_again_does_not_count_against_it() -> None:
    full = Members(tuple(node(number) for number in range(1, MOST_MEMBERS + 1)))
    with pytest.raises(BadSetting, match="at most"):
        full.with_(node(MOST_MEMBERS + 1))
    assert len(list(full.with_(node(7)))) == MOST_MEMBERS


def test_the_fastest_link_is_the_shortest_that_was_measured_whole() -> None:
    assert node(1).fastest_link == (0.0002, 8e8)
    assert replace(node(1), links=(BROKEN,)).fastest_link is None
