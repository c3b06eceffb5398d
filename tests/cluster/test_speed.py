"""A machine whose chip is in no table: timed once, by the real small model, and known from then on."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from omlx.cluster import fleet, speed
from omlx.cluster.fleet import fleet_of, this_machine
from omlx.cluster.measure import presumed
from omlx.cluster.rates import NodeRates, rates_by_chip
from omlx.cluster.speed import Speed, kept_speed, own_speed
from tests.cluster.test_offer import HERE, MINI
from tests.cluster.test_offer import joined as joined_as

GB = 10**9


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine that nobody has heard of."""
    monkeypatch.setattr(speed, "chip", lambda: "Apple M99")
    return tmp_path / ".omlx" / "speed.json"


def gauge_says(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(speed, "GAUGE", ("-c", script))


def test_an_unknown_chip_is_timed_and_what_came_of_it_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kept_speed(file) is None
    measured = own_speed(file)
    # Any machine that can run this reads more than 100 MB/s, and none of today's reads 100 TB/s.
    assert measured is not None and 1e8 < measured.bandwidth < 1e14 and 1e8 < measured.compute < 1e17
    gauge_says(monkeypatch, "raise SystemExit('it was measured again')")
    assert own_speed(file) == kept_speed(file) == measured
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["chip", "mlx"])
def test_what_was_kept_of_another_chip_or_mlx_is_measured_again(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge_says(monkeypatch, """print('{"bandwidth": 1e9, "compute": 1e10}')""")
    assert own_speed(file) == Speed(1e9, 1e10)
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: "another"}))
    gauge_says(monkeypatch, """print('{"bandwidth": 2e9, "compute": 1e10}')""")
    assert kept_speed(file) is None
    assert own_speed(file) == Speed(2e9, 1e10)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("raise SystemExit('no GPU')", "no GPU"),
        ("print('much')", "JSON"),
        ("""print('{"bandwidth": 0, "compute": 1}')""", "bandwidth"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_a_machine_that_cannot_be_measured_is_no_crash_and_the_log_says_why(
    script: str, why: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge_says(monkeypatch, script)
    monkeypatch.setattr(speed, "GAUGE_WITHIN_S", 1.0 if "sleep" in script else 20.0)
    with capture_logs() as logs:
        assert own_speed(file) is None
    *_, told = logs
    assert told["log_level"] == "warning" and why in told["why"]
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"chip": "Apple M99", "mlx": "1", "speed": 3}'])
def test_a_broken_file_is_none(text: str, file: Path) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert kept_speed(file) is None


def test_this_machine_is_as_fast_as_it_was_measured_and_is_not_measured_while_it_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "chip", lambda: "Apple M99")
    monkeypatch.setattr(fleet, "own_speed", lambda: Speed(5e9, 6e10))
    monkeypatch.setattr(fleet, "kept_speed", lambda: None)
    assert this_machine("a" * 32, GB).rates == NodeRates(5e9, 6e10, "gauged")
    assert this_machine("a" * 32, GB, busy=True).rates.source == "guess"
    monkeypatch.setattr(fleet, "chip", lambda: "Apple M4 Max")
    assert this_machine("a" * 32, GB).rates.source == "table"


def test_a_member_is_as_fast_as_it_was_when_it_joined_unless_the_table_knows_its_chip() -> None:
    unknown = joined_as("d", "lab", chip="Apple M99", speed=(9e11, 5e13))
    known = joined_as("e", "old", chip="Apple M4", speed=(9e11, 5e13))
    machines = {one.name: one.rates for one in fleet_of(HERE, [MINI, unknown, known], {}).machines}
    assert machines["lab"] == NodeRates(9e11, 5e13, "gauged")
    assert machines["old"] == machines["mini"] == rates_by_chip("Apple M4")


def test_what_was_gauged_is_no_promise_that_others_break() -> None:
    """Where the table promises ten times what nodes do, one that was timed does what it did."""
    promised, seen = NodeRates(1e11, 1e12, "table"), NodeRates(1e10, 1e11)
    timed = NodeRates(2e10, 3e11, "gauged")
    assert presumed(timed, [(promised, seen)]) == timed
    assert presumed(promised, [(promised, seen)]).bandwidth == pytest.approx(1e10)
