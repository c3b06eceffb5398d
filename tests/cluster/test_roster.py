"""The fold of what was heard: identities stay, addresses come and go, nobody takes another's place."""

from dataclasses import replace
from itertools import permutations
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster import roster as roster_module
from omlx.cluster.nodes import (
    MOST_ADDRESSES,
    Address,
    Node,
    NodeId,
    Versions,
    check_host,
    cluster_mark,
    listed_host,
    reach_of,
)
from omlx.cluster.roster import (
    MOST_IMPOSTORS,
    MOST_NODES,
    Checked,
    Event,
    Joined,
    Known,
    Left,
    Lost,
    Roster,
    Seen,
    fold,
)
from omlx.errors import Refused


def id_of(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def key_of(number: int) -> str:
    return "SHA256:" + f"{number:043d}"


def node(
    number: int = 1, *addresses: str, at: float = 100.0, key: int | None = None, **given: object
) -> Node:
    """Its host key has its own number unless told otherwise."""
    plain = Node(
        id_of(number),
        f"mac-{number}",
        reach_of(addresses or (f"10.0.{number // 250}.{number % 250 + 1}",), at),
        at,
        host_key_fingerprint=key_of(number if key is None else key),
    )
    return replace(plain, **given)  # type: ignore[arg-type]


def after(*events: Event, start: Roster | None = None) -> Roster:
    roster = start or Roster()
    for event in events:
        roster = fold(roster, event)
    return roster


def only(roster: Roster) -> Known:
    (known,) = roster
    return known


# ------------------------------------------------------------------ what a node may say


@pytest.mark.parametrize(
    "field, text",
    [
        ("name", "-oProxyCommand=reboot"),
        ("name", "mac; reboot"),
        ("name", "mac\n"),
        ("name", "[red]mac"),
        ("name", "\uff4dac"),
        ("name", ""),
        ("name", "m" * 49),
        ("chip", "M3\x1b[2J"),
        ("chip", "M" * 41),
        ("host_key_fingerprint", "MD5:00"),
        ("cluster", "ours"),
        ("id", "host:-oProxyCommand=reboot"),
        ("id", "A" * 32),
        ("id", ""),
        ("asked_as", "-p"),
    ],
)
def test_a_text_that_could_do_harm_makes_no_node(field: str, text: str) -> None:
    with pytest.raises(Refused):
        node(**{field: text})


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_is_one(port: int) -> None:
    with pytest.raises(Refused, match="ssh port"):
        node(ssh_port=port)
    with pytest.raises(Refused, match="agent port"):
        node(agent_port=port)


@pytest.mark.parametrize("size", [0, -1, 2**50 + 1])
def test_memory_is_some(size: int) -> None:
    with pytest.raises(Refused, match="memory"):
        node(memory_bytes=size)


@pytest.mark.parametrize("text", ["10.0.0", "010.0.0.1", "fe80::1%en0", "studio.local", "::FFFF", "-1", ""])
def test_an_address_is_one_in_its_usual_spelling(text: str) -> None:
    with pytest.raises(Refused, match="address"):
        Address(text, 0.0)


@pytest.mark.parametrize("text", ["studio", "studio.local", "10.0.0.2", "fd00::2", "a-b.c_d.e.", "Mac-1.lan"])
def test_hosts_that_people_have(text: str) -> None:
    assert check_host(f" {text} ") == text


@pytest.mark.parametrize(
    "text",
    ["-oProxyCommand=reboot", "a b", "a;b", "$(a)", "a..b", "-", "", "a" * 64, "a." * 130, "a\nb", "a%b"],
)
def test_what_is_no_host_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(Refused, match="neither a name nor an address") as raised:
        check_host(text)
    assert "\n" not in str(raised.value)


def test_versions_that_differ_are_named() -> None:
    ours = Versions(omlx="1.0", mlx="0.32")
    assert ours.differing(Versions(omlx="1.0", mlx="0.31", ray="2.60.0")) == ("mlx", "ray")
    assert ours.differing(ours) == ()


def test_a_clusters_mark_tells_clusters_apart_and_not_their_id() -> None:
    assert cluster_mark("a") != cluster_mark("b")
    assert node(cluster=cluster_mark("a")).cluster == cluster_mark("a")


# ------------------------------------------------------------------ seeing


def test_a_node_is_kept_by_its_identity_and_not_by_its_address() -> None:
    roster = after(Seen(node(1, "10.0.0.5", at=1)), Seen(node(1, "10.0.0.9", at=2, name="renamed")))
    assert only(roster).node.name == "renamed"
    assert only(roster).node.addresses == ("10.0.0.9", "10.0.0.5")


def test_what_was_said_last_counts_however_late_older_news_come() -> None:
    roster = after(Seen(node(1, at=2, chip="Apple M4")), Seen(node(1, at=1, chip="Apple M1")))
    assert only(roster).node.chip == "Apple M4"
    assert only(roster).node.seen_at == 2


def test_link_local_addresses_come_last_unless_there_is_nothing_else() -> None:
    roster = after(Seen(node(1, "169.254.3.4", "10.0.0.5", at=1)), Seen(node(1, "169.254.9.9", at=2)))
    assert only(roster).node.addresses == ("10.0.0.5", "169.254.9.9", "169.254.3.4")
    assert node(2, "169.254.3.4").addresses == ("169.254.3.4",)


def test_the_oldest_addresses_make_room() -> None:
    events = [Seen(node(1, f"10.0.1.{number}", at=number)) for number in range(1, MOST_ADDRESSES + 5)]
    addresses = only(after(*events)).node.addresses
    assert len(addresses) == MOST_ADDRESSES
    assert addresses[0] == f"10.0.1.{MOST_ADDRESSES + 4}"
    assert "10.0.1.4" not in addresses


def test_a_goodbye_marks_and_a_later_announcement_clears_it() -> None:
    seen, lost = Seen(node(1, at=1)), Lost(id_of(1), key_of(1), 2)
    assert only(after(seen, lost)).gone
    assert not only(after(seen, lost, Seen(node(1, at=3)))).gone
    assert not only(after(Seen(node(1, at=3)), lost)).gone


def test_nobody_says_goodbye_for_another() -> None:
    assert not only(after(Seen(node(1, at=1)), Lost(id_of(1), key_of(9), 2))).gone
    assert len(after(Lost(id_of(1), key_of(1), 2))) == 0


def test_a_listed_host_stands_for_itself_until_it_answers() -> None:
    listed = Seen(listed_host("studio.local", ["10.0.0.5"], 1))
    answer = Seen(node(1, "10.0.0.5", at=2, source="static", asked_as="studio.local"))
    assert only(after(listed)).node.id == "host:studio.local"
    for events in permutations([listed, answer]):
        assert only(after(*events)).node.id == id_of(1)


def test_a_node_hides_no_listed_host_by_claiming_its_address() -> None:
    roster = after(Seen(listed_host("studio.local", ["10.0.0.5"], 1)), Seen(node(1, "10.0.0.5", at=2)))
    assert len(roster) == 2


@pytest.mark.parametrize("host", ["fd00::2", "::1", "10.0.0.5", "a.b-c", "x" * 63])
def test_any_listed_host_can_be_a_node(host: str) -> None:
    assert listed_host(host, [], 1).asked_as == host


# ------------------------------------------------------------------ joining, checking, leaving


def test_only_joining_makes_a_node_ours() -> None:
    assert after(Seen(node(1)), Seen(node(2))).joined == ()
    roster = after(Seen(node(1)), Joined(node(1), "10.0.0.2"), Seen(node(2)))
    assert [known.node.id for known in roster.joined] == [id_of(1)]


def test_whoever_has_left_is_forgotten_and_may_come_again_with_another_key() -> None:
    gone = after(Joined(node(1), "10.0.0.2"), Left(id_of(1)))
    assert len(gone) == 0
    assert only(after(Seen(node(1, key=2)), start=gone)).node.host_key_fingerprint == key_of(2)


@pytest.mark.parametrize("bad", [node(1, host_key_fingerprint=None), listed_host("studio", [], 1)])
def test_nobody_joins_without_an_identity(bad: Node) -> None:
    with pytest.raises(Refused, match="cannot join"):
        fold(Roster(), Joined(bad, "10.0.0.2"))


def test_another_host_key_for_a_known_id_is_a_conflict_and_changes_nothing_else() -> None:
    before = after(Joined(node(1, "10.0.0.2", at=1), "10.0.0.2"))
    roster = after(Seen(node(1, "10.6.6.6", at=9, key=6, name="copy")), start=before)
    assert only(roster).node == only(before).node
    assert [other.name for other in only(roster).impostors] == ["copy"]
    assert roster.conflicts == (only(roster),)
    again = after(Joined(node(1, "10.6.6.6", at=9, key=6), "10.6.6.6"), start=roster)
    assert only(again).node.host_key_fingerprint == key_of(1)


def test_a_key_that_was_shown_beats_one_that_was_announced_first() -> None:
    roster = after(Seen(node(1, key=6)), Joined(node(1), "10.0.0.2"))
    assert only(roster).joined
    assert only(roster).node.host_key_fingerprint == key_of(1)
    assert [other.host_key_fingerprint for other in only(roster).impostors] == [key_of(6)]


def test_impostors_are_few_and_the_newest() -> None:
    events = [Seen(node(1, at=key, key=key)) for key in range(2, MOST_IMPOSTORS + 6)]
    kept = only(after(Seen(node(1, at=1)), *events)).impostors
    assert [other.seen_at for other in kept] == [9, 8, 7, 6]


def test_a_machine_without_a_host_key_shows_one_later() -> None:
    without, shown = Seen(node(1, at=2, host_key_fingerprint=None)), Seen(node(1, at=1))
    for events in permutations([without, shown]):
        known = only(after(*events))
        assert known.node.host_key_fingerprint == key_of(1)
        assert known.impostors == ()


def test_where_a_node_showed_its_key_is_tried_first_and_stays() -> None:
    flood = [Seen(node(1, f"10.9.9.{number}", at=50 + number)) for number in range(1, 40)]
    roster = after(Joined(node(1, "10.0.0.2", at=1), "10.0.0.2"), *flood)
    assert only(roster).addresses[0] == "10.0.0.2"
    assert "10.0.0.2" not in only(roster).node.addresses


def test_a_check_counts_only_for_the_key_that_was_checked() -> None:
    seen = Seen(node(1))
    assert only(after(seen)).problems is None
    checked = Checked(id_of(1), key_of(1), "10.0.0.2", at=5, problems=("mlx differs",))
    assert only(after(seen, checked)).problems == ("mlx differs",)
    assert only(after(seen, replace(checked, host_key_fingerprint=key_of(6)))).problems is None
    assert only(after(seen, checked, replace(checked, at=4, problems=()))).problems == ("mlx differs",)


# ------------------------------------------------------------------ bounds and order

few = st.integers(1, 6)
moments = st.integers(0, 3).map(float)
hosts = st.sampled_from(["10.0.0.1", "10.0.0.2", "169.254.1.1", "169.254.1.2", "fd00::1"])
sightings = st.builds(
    lambda number, at, addresses, chip, asked: Seen(
        node(number, *addresses, at=at, chip=chip, asked_as=f"h{number}" if asked else None)
    ),
    few,
    moments,
    st.lists(hosts, min_size=1, max_size=4, unique=True),
    st.sampled_from(["Apple M1", "Apple M2", None]),
    st.booleans(),
)
listings = st.builds(lambda number, at: Seen(listed_host(f"h{number}", ["10.0.0.1"], at)), few, moments)
events = st.one_of(
    sightings,
    listings,
    st.builds(lambda number, key, at: Seen(node(number, at=at, key=key)), few, few, moments),
    st.builds(lambda number, key, at: Lost(id_of(number), key_of(key), at), few, few, moments),
    st.builds(lambda number, key, at: Joined(node(number, at=at, key=key), "10.0.0.7"), few, few, moments),
    st.builds(lambda number, key, at: Checked(id_of(number), key_of(key), "10.0.0.7", at), few, few, moments),
)


@given(st.lists(st.one_of(sightings, listings), max_size=12), st.randoms(use_true_random=False))
def test_what_is_seen_may_come_in_any_order(seen: list[Seen], random: "object") -> None:
    shuffled = list(seen)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert after(*seen) == after(*shuffled)


@given(st.lists(sightings, max_size=12))
def test_what_is_seen_twice_is_seen_once(seen: list[Seen]) -> None:
    assert after(*seen, *seen) == after(*seen)


@given(st.lists(events, max_size=30), st.lists(events, max_size=30))
def test_a_joined_node_is_never_lost_and_keeps_its_key(before: list[Event], later: list[Event]) -> None:
    start = after(*before)
    end = after(*later, start=start)
    for known in start.joined:
        now = end.get(known.node.id)
        assert now is not None and now.joined
        assert now.node.host_key_fingerprint == known.node.host_key_fingerprint
        assert set(known.proven) <= set(now.proven)


@given(st.data())
def test_the_bound_holds_and_the_joined_stay(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roster_module, "MOST_NODES", 4)
        roster = Roster()
        for event in data.draw(st.lists(events, max_size=30)):
            joined = {known.node.id for known in roster.joined}
            try:
                roster = fold(roster, event)
            except Refused:
                assert isinstance(event, Joined) and len(joined) == 4
            assert len(roster) <= 4
            assert joined <= {known.node.id for known in roster.joined}
            for known in roster:
                assert len(known.node.reach) <= MOST_ADDRESSES
                assert known.node.host_key_fingerprint not in {
                    other.host_key_fingerprint for other in known.impostors
                }


def test_of_too_many_the_oldest_unknown_go_and_a_full_cluster_says_so() -> None:
    full = after(*(Joined(node(number), "10.0.0.2") for number in range(MOST_NODES - 1)))
    roster = after(Seen(node(1000, at=1)), Seen(node(1001, at=2)), Seen(node(1002, at=1)), start=full)
    assert len(roster) == MOST_NODES
    assert roster.get(id_of(1001)) is not None
    full = after(Joined(node(1000), "10.0.0.2"), start=full)
    assert len(after(Seen(node(1001)), start=full).joined) == MOST_NODES
    with pytest.raises(Refused, match="256 nodes have joined"):
        fold(full, Joined(node(1001), "10.0.0.2"))


def test_a_roster_cannot_be_written_to() -> None:
    roster = after(Seen(node(1)))
    assert isinstance(roster.known, MappingProxyType)
