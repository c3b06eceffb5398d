"""A host looks at others over OpenSSH, with addresses, memory and faults of their own."""

import json
import sys
import time
from typing import Any

import pytest

from tests.lab.conftest import NewHosts
from tests.lab.fleet import Fleet
from tests.lab.host import Host
from tests.lab.machine import ROOT

CHECK = """
import asyncio, json, sys
from pathlib import Path
from omlx.cluster.findings import to_json
from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.ssh import Access, target
from omlx.cluster.validation import Asked, Wanted, check_hosts
key, known_hosts, *hosts = sys.argv[1:]
access = Access(Path(key), KnownHosts(Path(known_hosts)))
asked = [Asked(target(host, "root", 22)) for host in hosts]
reports = asyncio.run(check_hosts(asked, access, Wanted(bulk_s=0.1)))
print(json.dumps([to_json(report) for report in reports]))
"""


@pytest.fixture(scope="module")
def three(hosts: NewHosts) -> Fleet:
    return hosts(3, memory_gib=(64, 16, 128))


def check(fleet: Fleet, *others: Host) -> list[dict[str, Any]]:
    """What the first host finds."""
    command = [sys.executable, "-c", CHECK, fleet.key, fleet.known_hosts, *(other.ip for other in others)]
    ran = fleet.hosts[0].run(command, folder=ROOT, check=True)
    reports: list[dict[str, Any]] = json.loads(ran.stdout)
    return reports


def blocking(report: dict[str, Any]) -> list[str]:
    return [finding["what"] for finding in report["findings"] if finding["level"] == "blocking"]


def finding(report: dict[str, Any], what: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["findings"] if one["what"] == what)
    return found


def test_each_host_is_seen_with_its_own_memory_chip_and_links(three: Fleet) -> None:
    a, b, c = three.hosts
    for host, gib, report in zip((b, c), (16, 128), check(three, b, c), strict=True):
        assert report["fit"], report["findings"]
        assert report["host"] == host.ip and report["facts"]["host"] == host.name
        assert report["facts"]["memory_bytes"] == gib << 30
        assert report["facts"]["chip"] == "Apple M4 Max"
        (link,) = report["links"]
        assert (link["ours"], link["theirs"]) == (a.ip, host.ip)
        assert 0 < link["round_trip_s"] < 1
        assert link["bytes_per_s_there"] > 1e6 and link["bytes_per_s_back"] > 1e6


def test_a_host_that_is_cut_off_is_given_up_in_seconds_and_hides_no_other(three: Fleet) -> None:
    _, b, c = three.hosts
    three.lab.cut(c)
    try:
        start = time.monotonic()
        good, bad = check(three, b, c)
    finally:
        three.lab.heal(c)
    assert time.monotonic() - start < 20
    assert good["fit"] and blocking(bad) == ["connection"]
    assert finding(bad, "connection")["seen"] == "no answer in time"


def test_a_host_that_sleeps_answers_at_the_port_and_is_given_up_all_the_same(three: Fleet) -> None:
    _, _, c = three.hosts
    three.lab.suspend(c)
    try:
        (report,) = check(three, c)
    finally:
        three.lab.resume(c)
    assert blocking(report) == ["connection"]


def test_a_long_way_is_measured_and_warned_of(three: Fleet) -> None:
    _, b, _ = three.hosts
    three.lab.shape(b, delay_ms=5)
    try:
        (report,) = check(three, b)
    finally:
        three.lab.shape(b)
    assert report["fit"]
    assert 0.009 < report["links"][0]["round_trip_s"] < 0.1
    assert any(one["level"] == "warning" and one["what"].startswith("link") for one in report["findings"])


def test_a_host_that_was_set_up_anew_is_a_changed_one(three: Fleet) -> None:
    _, _, c = three.hosts
    three.lab.crash(c)
    c.sshd.change_key()
    three.lab.boot(c)
    c.start_sshd()
    (report,) = check(three, c)
    assert blocking(report) == ["host key changed"]
    assert f"ssh-keygen -R '{c.ip}'" in finding(report, "host key changed")["fix"]
