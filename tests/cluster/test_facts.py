"""A machine's own words, turned into facts; and words that no machine of ours says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cluster import facts
from omlx.cluster.facts import ClockAnswer, Look, Unreadable, facts_of, printable, read_answer
from tests.cluster import samples
from tests.cluster.samples import look


def test_a_mac_is_read_out_of_its_own_commands() -> None:
    seen = facts_of(look())
    assert seen.chip == "Apple M4 Max"
    assert seen.memory_bytes == 64 * 2**30
    assert seen.available_bytes == 16384 * (100_000 + 200_000 + 30_000 + 10_000)
    assert (seen.wired_limit_mb, seen.sleep_minutes) == (0, 15)
    assert seen.versions["python"] == "3.11.7"


def test_the_kind_of_each_address_is_what_the_mac_calls_its_port_and_the_fastest_come_first() -> None:
    assert [(one.name, one.address, one.kind) for one in facts_of(look()).interfaces] == [
        ("bridge0", "169.254.7.9", "thunderbolt"),
        ("en0", "192.168.1.21", "ethernet"),
        ("en1", "192.168.1.20", "wifi"),
        ("bridge100", "192.168.64.1", "other"),
    ]


def test_an_ethernet_adapter_at_a_thunderbolt_port_is_ethernet() -> None:
    kinds = facts.hardware_ports(samples.HARDWARE_PORTS)
    assert kinds == {
        "en0": "ethernet",
        "bridge0": "thunderbolt",
        "en7": "ethernet",
        "en8": "ethernet",
        "en1": "wifi",
    }


def test_a_linux_machine_is_read_out_of_proc() -> None:
    seen = facts_of(
        look(
            system="Linux",
            sysctl={},
            cpuinfo="processor\t: 0\nmodel name\t: AMD EPYC\n",
            meminfo="MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n",
            linux_addresses=[
                ["lo", "127.0.0.1"],
                ["wlan0", "10.0.0.9"],
                ["eth0", "10.0.0.8"],
                ["docker0", "172.17.0.1"],
            ],
        )
    )
    assert (seen.chip, seen.memory_bytes, seen.available_bytes) == ("AMD EPYC", 2**34, 2**33)
    assert (seen.wired_limit_mb, seen.sleep_minutes) == (None, None)
    assert [(one.address, one.kind) for one in seen.interfaces] == [
        ("10.0.0.8", "ethernet"),
        ("10.0.0.9", "wifi"),
    ]


def test_what_cannot_be_read_is_none_and_no_error() -> None:
    silent = {"sysctl": {}, "vm_stat": "", "pmset": "", "hardware_ports": "", "ifconfig": ""}
    seen = facts_of(look(**silent))
    assert (seen.memory_bytes, seen.available_bytes, seen.wired_limit_mb, seen.sleep_minutes) == (None,) * 4
    assert (seen.chip, seen.interfaces) == ("arm64", ())


def test_sleep_with_power_counts_and_sleep_on_battery_does_not() -> None:
    assert facts.sleep_minutes(samples.PMSET_OF_A_MACBOOK) == 0
    assert facts.sleep_minutes(samples.PMSET_OF_A_STUDIO) == 15


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "a\x1b[2Jb"},
        {"host": "a\nb"},
        {"host": "a\n"},
        {"executable": "/bin/\u202epython"},
        {"host": "x" * 1000},
        {"disk_free_bytes": -1},
        {"disk_free_bytes": "much"},
        {"linux_addresses": [["eth0", "$(reboot)"]]},
        {"linux_addresses": [["eth0", "10.0.0.1"]] * 1000},
        {"node_id": "../../etc"},
        {"versions": {str(i): "1" for i in range(100)}},
        {"model": {"folder": "/m", "files": {"a": {"bytes": 1, "digest": "not hex"}}, "config": None}},
    ],
)
def test_words_that_no_probe_of_ours_says_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Unreadable, match="none of our probe's"):
        read_answer(json.dumps(samples.A_LOOK | wrong).encode(), Look)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"time": NaN}', b'{"time": 1e300}']
)
def test_an_answer_that_is_no_json_of_ours_is_refused(text: bytes) -> None:
    with pytest.raises(Unreadable):
        read_answer(text, ClockAnswer)


@given(st.text(max_size=2000))
def test_printable_is_one_line_of_a_length_without_control_characters(text: str) -> None:
    plain = printable(text)
    assert len(plain) <= 203 and len(plain.splitlines()) <= 1
    assert not any(ord(sign) < 32 or 0x7F <= ord(sign) < 0xA0 for sign in plain)
    assert printable(plain) == plain or len(plain) > 200
