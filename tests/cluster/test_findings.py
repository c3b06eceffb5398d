"""The rules: what each makes of two machines, and that a report says the worst first."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster.facts import Interface, Measured, Reached
from omlx.cluster.findings import LEVELS, Finding, LinkFinding, Report, sort_findings, to_json
from omlx.cluster.rules import Case, clock, judge, links_of, model_difference, slower
from tests.cluster.samples import GB, mac, model_files

REACHED = (Reached("10.0.0.2", "10.0.0.1", None),)
VERSIONS = mac().versions
LINK = LinkFinding("10.0.0.1", "10.0.0.2", "ethernet", 0.0003, 110e6, 108e6)


def case(**changed: Any) -> Case:
    """Two Macs with which nothing is wrong."""
    good: dict[str, Any] = {
        "ours": mac(host="here"),
        "theirs": mac(),
        "there": REACHED,
        "back": REACHED,
        "links": (LINK,),
    }
    return Case(**(good | changed))


def theirs(**changed: Any) -> Case:
    return case(theirs=mac(**changed))


def link(**changed: Any) -> Case:
    return case(links=(msgspec.structs.replace(LINK, **changed),))


LINK_NAME = "link 10.0.0.1 - 10.0.0.2"
REFUSED = (Reached("10.0.0.2", None, "ECONNREFUSED"), Reached("10.0.0.3", None, "ETIMEDOUT"))
OTHER_MODEL = case(ours=mac(model=model_files()), theirs=mac(model=model_files(bytes=6)))
NO_ROUTE = (Reached("10.0.0.2", None, "EHOSTUNREACH"),)


def test_two_equal_macs_give_nothing_but_facts() -> None:
    findings = judge(case())
    assert {finding.level for finding in findings} == {"fact"}
    assert all(not finding.fix for finding in findings)


@pytest.mark.parametrize(
    ("seen", "what", "level", "words"),
    [
        (theirs(versions=VERSIONS | {"omlx": "0.9"}), "omlx version", "blocking", "install omlx 1.0 there"),
        (theirs(versions=VERSIONS | {"mlx": None}), "mlx version", "blocking", "/opt/omlx/bin/python3"),
        (theirs(versions=VERSIONS | {"python": "3.11.8"}), "python version", "blocking", "Python 3.11.7"),
        (theirs(versions=VERSIONS | {"mlx-lm": "0.1"}), "mlx-lm version", "blocking", "or 0.1 here"),
        (case(ours=mac(versions=VERSIONS | {"ray": None})), "ray version", "blocking", "install ray here"),
        (theirs(system="Linux", release="6.1"), "system", "warning", "last bits"),
        (theirs(available_bytes=GB), "memory", "warning", "close what takes"),
        (theirs(memory_bytes=None), "memory", "warning", "vm_stat"),
        (theirs(wired_limit_mb=60_999), "GPU wired limit", "warning", "sysctl iogpu.wired_limit_mb="),
        (theirs(disk_free_bytes=10 * GB), "disk", "warning", "make room"),
        (theirs(disk_free_bytes=GB // 2), "disk", "blocking", "make room"),
        (theirs(disk_free_bytes=None), "disk", "warning", "cache folder"),
        (theirs(sleep_minutes=10), "sleep", "warning", "pmset -c sleep 0"),
        (case(clock_offset_s=1.5), "clock", "warning", "clocks"),
        (case(clock_offset_s=-61.0), "clock", "blocking", "certificates"),
        (case(there=REFUSED), "ports from here to there", "blocking", "studio.local's firewall"),
        (case(back=REFUSED), "ports from there to here", "blocking", "here's firewall"),
        (case(back=()), "ports from there to here", "blocking", "firewall"),
        (case(there=NO_ROUTE), "ports from here to there", "blocking", "Local Network"),
        (case(back=NO_ROUTE), "ports from there to here", "blocking", "Local Network"),
        (link(kind="wifi", round_trip_s=0.02), "network", "warning", "Thunderbolt or Ethernet"),
        (link(round_trip_s=0.02), LINK_NAME, "warning", "directly"),
        (link(round_trip_s=None), LINK_NAME, "warning", "cable"),
        (OTHER_MODEL, "model", "blocking", "delete"),
    ],
)
def test_each_fault_is_one_finding_with_what_to_do(seen: Case, what: str, level: str, words: str) -> None:
    wrong = [finding for finding in judge(seen) if finding.level != "fact"]
    assert [(finding.what, finding.level) for finding in wrong] == [(what, level)]
    assert words in wrong[0].fix


def test_errno_65_on_a_mac_is_said_to_be_the_local_network_permission() -> None:
    found = next(f for f in judge(case(back=NO_ROUTE)) if f.blocking)
    assert "errno 65" in found.seen
    assert "allow /opt/omlx/bin/python3 there in System Settings" in found.fix


def test_no_route_on_linux_is_no_question_of_a_permission() -> None:
    found = judge(case(ours=mac(system="Linux"), theirs=mac(system="Linux"), back=NO_ROUTE))
    assert "Local Network" not in next(finding for finding in found if finding.blocking).fix


def test_one_address_that_works_is_enough_and_the_others_are_named() -> None:
    found = judge(case(there=(*REACHED, *REFUSED)))
    assert not any(finding.blocking for finding in found)
    assert any("not over 10.0.0.2 ECONNREFUSED" in finding.seen for finding in found)


def test_where_omlx_is_missing_what_comes_with_it_is_not_missed_one_by_one() -> None:
    bare = dict.fromkeys(VERSIONS) | {"python": "3.9.6"}
    found = [finding.what for finding in judge(theirs(versions=bare)) if finding.blocking]
    assert found == ["omlx version", "python version"]


def test_a_version_that_neither_machine_has_blocks() -> None:
    bare = mac(versions=VERSIONS | {"ray": None})
    found = [finding for finding in judge(case(ours=bare, theirs=bare)) if finding.blocking]
    assert [(finding.what, finding.seen) for finding in found] == [("ray version", "not installed")]
    assert "here either" in found[0].wanted


@given(st.floats(-1e6, 1e6), st.floats(0, 100))
def test_a_clock_is_only_blamed_for_what_it_is_off_at_the_least(offset: float, doubt: float) -> None:
    (found,) = clock(case(clock_offset_s=offset, clock_doubt_s=doubt))
    least = abs(offset) - doubt
    assert found.level == ("blocking" if least > 60 else "warning" if least > 1 else "fact")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (model_files("a" * 64), model_files("a" * 64), None),
        (model_files("a" * 64), model_files(None), None),
        (model_files("a" * 64), model_files("b" * 64), "other contents"),
        (model_files(bytes=5), model_files(bytes=6), "6 bytes, here 5"),
        (model_files(config="c"), model_files(config="d"), "config.json"),
        (model_files(config="c"), model_files(config=None), None),
    ],
)
def test_copies_of_a_model_differ_by_what_is_known_of_both(ours: Any, theirs: Any, words: str | None) -> None:
    difference = model_difference(ours, theirs)
    assert difference is None if words is None else words in (difference or "")


def test_a_model_that_is_missing_there_does_not_block() -> None:
    missing = model_files()
    found = judge(case(ours=mac(model=missing), theirs=mac(model=type(missing)("/models/one", {}, None))))
    assert not any(finding.blocking for finding in found)
    assert any(finding.what == "model" and "not in /models/one" in finding.seen for finding in found)


def test_a_link_has_the_slower_kind_of_its_ends_and_each_direction_of_its_own_measurement() -> None:
    ours = mac(interfaces=(Interface("en1", "10.0.0.1", "wifi"),))
    measured, back = Measured("10.0.0.2", 0.001, 5e6), Measured("10.0.0.1", 0.002, 4e6)
    (found,) = links_of(ours, mac(), REACHED, (measured,), (back,))
    assert found == LinkFinding("10.0.0.1", "10.0.0.2", "wifi", 0.001, 5e6, 4e6)


@given(st.permutations(["other", "wifi", "ethernet", "thunderbolt"]))
def test_the_slower_of_two_kinds_does_not_depend_on_their_order(kinds: list[Any]) -> None:
    assert slower(kinds[0], kinds[1]) == slower(kinds[1], kinds[0])


@given(st.lists(st.sampled_from(LEVELS)))
def test_the_worst_come_first_and_equals_keep_their_order(levels: list[Any]) -> None:
    found = sort_findings(Finding(str(i), level, "") for i, level in enumerate(levels))
    assert sorted(finding.what for finding in found) == sorted(str(i) for i in range(len(levels)))
    for one, next_one in itertools.pairwise(found):
        assert (LEVELS.index(one.level), int(one.what)) < (LEVELS.index(next_one.level), int(next_one.what))


def test_a_report_is_fit_when_nothing_blocks_and_its_json_says_so() -> None:
    warned = Report("a", "admin", 22, None, (Finding("sleep", "warning", "x"),), mac(), (LINK,))
    blocked = Report("a", "admin", 22, None, (Finding("disk", "blocking", "x"),))
    assert (warned.fit, blocked.fit) == (True, False)
    plain = to_json(warned)
    assert plain["fit"] is True and plain["facts"]["chip"] == "Apple M4 Max"
    assert plain["links"][0]["kind"] == "ethernet" and to_json(blocked)["fit"] is False
