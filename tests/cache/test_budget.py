"""Sizes as people write them, and the free space that is left to others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.cache.budget import bytes_of, free_floor_bytes, parse_size
from omlx.errors import BadSetting

GB = 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * GB),
        ("8 gib", 8 * 2**30),
        (" 1.5TB ", 1_500 * GB),
        ("512kB", 512_000),
        ("4096", 4096),
        ("0", 0),
        ("0GB", 0),
        ("10%", 10 * GB),
        ("12.5 %", 12_500_000_000),
        ("0%", 0),
        ("100%", 100 * GB),
        ("100.0%", 100 * GB),
    ],
)
def test_a_size_is_bytes_or_a_share_of_the_whole(text: str, size: int) -> None:
    assert parse_size(text, 100 * GB, "hot_cache_max_size") == size


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "lots", "8 gigs", "-1GB", "-5%", "101%", "100.01%", "10%%", "%", "GB", "1e9", "8GB%"),
        *("8,5GB", "nan", "inf", "\u0663GB", "1=2", "8GB\nx", "9" * 5000),
    ],
)
def test_a_size_that_is_none_is_refused_in_one_line_that_names_the_setting(text: str) -> None:
    with pytest.raises(BadSetting) as refused:
        parse_size(text, 100 * GB, "paged_ssd_cache_max_size")
    line = str(refused.value)
    assert line.startswith("setting paged_ssd_cache_max_size = '")
    assert "8GB" in line and "100%" in line and "0 for none" in line
    assert "\n" not in line and len(line) < 250


@given(st.text(max_size=12), st.integers(0, 2**63))
def test_whether_a_text_is_a_size_does_not_depend_on_the_whole(text: str, whole_bytes: int) -> None:
    try:
        parse_size(text, 0, "x")
    except BadSetting:
        with pytest.raises(BadSetting):
            parse_size(text, whole_bytes, "x")
    else:
        assert parse_size(text, whole_bytes, "x") >= 0


@given(st.integers(0, 100), st.integers(0, 2**63))
def test_a_share_is_never_more_than_its_part_of_the_whole(percent: int, whole_bytes: int) -> None:
    assert parse_size(f"{percent}%", whole_bytes, "x") == whole_bytes * percent // 100


def test_a_share_is_no_number_of_bytes() -> None:
    assert bytes_of("10%") is None


def test_a_volume_keeps_a_tenth_free_and_never_more_than_twenty_gigabytes() -> None:
    assert free_floor_bytes(50 * GB) == 5 * GB
    assert free_floor_bytes(200 * GB) == 20 * GB
    assert free_floor_bytes(4_000 * GB) == 20 * GB
    assert free_floor_bytes(0) == 0
