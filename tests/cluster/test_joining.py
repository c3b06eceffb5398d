"""Where a member is from now on, and what becomes of it when it leaves meanwhile."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omlx.cluster.joining import follow, reached_at
from omlx.cluster.members import Joined, add_member, read_members
from omlx.cluster.nodes import NodeId
from omlx.cluster.trust import Trust, init_trust, issue, revoke

OLD, NEW, CABLE = "10.0.0.2", "10.0.0.3", "169.254.7.7"
WHEN = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return init_trust(tmp_path / "cluster", "head", [], [])


def node(host: str = OLD, *addresses: str) -> Joined:
    where = {"host": host, "user": "admin", "port": 22, "fingerprint": "SHA256:" + "A" * 43}
    what = {"chip": "Apple M3 Ultra", "memory_bytes": 1, "addresses": addresses or (host,), "links": ()}
    return Joined(id=NodeId("b"), name="mac-b", joined_at=WHEN, **where, **what)  # type: ignore[arg-type]


def test_a_node_that_is_where_it_was_stays_as_it_is() -> None:
    for one in (node(), node("mac-b.local", OLD), node(OLD, CABLE, OLD)):
        assert reached_at(one, one.host, OLD, (OLD, CABLE)) == one


def test_a_node_with_another_address_is_reached_there() -> None:
    assert reached_at(node(), NEW, NEW, (NEW,)) == node(NEW)


def test_a_name_that_leads_to_another_address_stays() -> None:
    assert reached_at(node("mac-b.local", OLD), "mac-b.local", NEW, (NEW,)) == node("mac-b.local", NEW)


def test_the_fastest_address_stays_first_while_the_node_has_it() -> None:
    moved = reached_at(node(OLD, CABLE, OLD), NEW, NEW, (NEW, CABLE))
    assert (moved.host, moved.addresses[0]) == (NEW, CABLE)
    assert reached_at(node(OLD, CABLE, OLD), OLD, OLD, (OLD,)).addresses == (OLD,), "the cable is out"


def test_an_address_that_the_node_does_not_tell_counts_where_it_was_reached_there() -> None:
    """A tunnel's is not among its own."""
    assert reached_at(node("100.64.0.2"), "100.64.0.2", "100.64.0.2", (OLD,)) == node("100.64.0.2")


def test_a_node_is_followed_and_the_others_stay(trust: Trust) -> None:
    other = replace(node("10.0.0.9"), id=NodeId("c"), name="mac-c")
    for one in (node(), other):
        issue(trust, one.id, [], one.addresses)
        add_member(trust.folder, one)
    follow(trust, node(NEW))
    assert {one.id: one.host for one in read_members(trust.folder)} == {"b": NEW, "c": "10.0.0.9"}


def test_a_node_that_left_while_it_was_followed_is_no_member_again(trust: Trust) -> None:
    issue(trust, "b", [], [OLD])
    revoke(trust, "b")
    follow(trust, node(NEW))
    assert not read_members(trust.folder).joined
