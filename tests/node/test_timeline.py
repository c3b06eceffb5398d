"""The timeline: what Perfetto is given, from the meters' calls and from real stages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from omlx.cluster.local_actor import place_local
from omlx.ids import Epoch, ModelId, PlanId, SeqId
from omlx.node import timeline as timeline_module
from omlx.node.engine import Engine
from omlx.node.layout import here
from omlx.node.manifest import read_manifest
from omlx.node.meters import Meters
from omlx.node.pipeline import Pipeline, PipelineSpec
from omlx.node.scheduler import Scheduler
from omlx.node.step import Slice, StepPlan
from omlx.node.timeline import DEVICE, HEAD, PROCESS, Timeline
from omlx.node.wire import PlanTimes
from tests.walk.engines import LIMITS, answers, request, uneven

Event = dict[str, Any]
STAGES = 3
FULL = Path("/dev/full")
"""Opens, and takes nothing."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def plan(number: int, *sizes: int) -> StepPlan:
    """A plan of so many tokens for each of its sequences; a single one is drawn from."""
    slices = [Slice(SeqId(seq), tuple(range(size)), 10, sample=size == 1) for seq, size in enumerate(sizes)]
    return StepPlan(PlanId(number), Epoch(0), (), (), tuple(slices))


def times(number: int, taken: float) -> PlanTimes:
    """Waits 1 ms, builds for 2, computes until 8 ms after `taken`, gives for 1."""
    moments = (taken + after / 1000 for after in (0, 1, 3, 8, 9))
    return PlanTimes(PlanId(number), 0.007, *moments)


def read(file: Path) -> list[Event]:
    """As Chrome's reader does, to whom the closing bracket is free."""
    events: list[Event] = json.loads(file.read_text(encoding="utf-8").rstrip(",\n") + "]")
    return events


def spans(events: Sequence[Event], pid: int, plan: int) -> dict[str, tuple[float, float]]:
    """By name, when each began and ended, in microseconds."""
    return {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["pid"] == pid and event["args"]["plan"] == plan
    }


def test_each_event_stands_on_a_line_and_is_one_that_chrome_knows(tmp_path: Path) -> None:
    meters = Meters(Timeline(tmp_path / "model.json"))
    meters.begin(1, mixes=True)
    meters.sent(plan(0, 1, 1, 64))
    meters.in_flight(1)
    meters.measured(0, (times(0, taken=5.0),))
    meters.close()
    bracket, *lines = (tmp_path / "model.json").read_text().splitlines()
    assert bracket == "["
    events = [json.loads(line.removesuffix(",")) for line in lines]
    assert events == read(tmp_path / "model.json")
    for event in events:
        assert event["ph"] in {"X", "i", "C", "M"}
        assert event["name"] and isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] > 0
    (count,) = (event["args"] for event in events if event["ph"] == "C")
    assert count == {"plans": 1}


def test_a_plans_spans_stand_where_the_stage_says_they_were(tmp_path: Path) -> None:
    meters = Meters(Timeline(tmp_path / "model.json"))
    meters.begin(1, mixes=True)
    meters.sent(plan(7, 1, 1, 64))
    meters.measured(0, (times(7, taken=5.0),))
    meters.close()
    events = [event for event in read(tmp_path / "model.json") if event["ph"] == "X"]
    ms = {(event["tid"], event["name"]): (event["ts"] / 1e3, event["dur"] / 1e3) for event in events}
    assert ms == {
        (PROCESS, "wait for input"): (5000.0, 1.0),
        (PROCESS, "build"): (5001.0, 2.0),
        (DEVICE, "7: 2 rows + 64 prompt tokens"): (5001.0, 7.0),
        (PROCESS, "give"): (5008.0, 1.0),
    }
    assert events[0]["args"] == {"plan": 7, "rows": 2, "chunk tokens": 64, "pairs": 64 * (10 + 32)}


def test_every_stage_is_named_once(tmp_path: Path) -> None:
    meters = Meters(Timeline(tmp_path / "model.json"))
    meters.begin(STAGES, mixes=True)
    for number in range(3):
        meters.sent(plan(number, 1))
        for stage in range(STAGES):
            meters.measured(stage, (times(number, taken=5.0 + number),))
    meters.close()
    names = [event for event in read(tmp_path / "model.json") if event["ph"] == "M"]
    processes = [event["args"]["name"] for event in names if event["name"] == "process_name"]
    threads = [event["args"]["name"] for event in names if event["name"] == "thread_name"]
    assert processes == ["head", "stage 0", "stage 1", "stage 2"]
    assert threads == ["plans in flight", *["process", "device"] * STAGES]


def test_times_of_a_plan_that_nobody_sent_are_left_out(tmp_path: Path) -> None:
    """They come from an epoch that is over."""
    meters = Meters(Timeline(tmp_path / "model.json"))
    meters.begin(1, mixes=True)
    meters.measured(0, (times(3, taken=5.0),))
    meters.close()
    assert not [event for event in read(tmp_path / "model.json") if event["ph"] == "X"]


def test_it_stops_at_its_bound_and_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "LARGEST_BYTES", 2000)
    timeline = Timeline(tmp_path / "model.json")
    for number in range(100):
        timeline.sent(plan(number, 1), at=float(number))
    timeline.close()
    size = (tmp_path / "model.json").stat().st_size
    assert 2000 < size < 2200
    assert read(tmp_path / "model.json")


def test_its_lines_are_whole_while_it_is_written(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "model.json")
    for number in range(200):
        timeline.sent(plan(number, 1), at=float(number))
    names = [event["name"] for event in read(tmp_path / "model.json") if event["ph"] == "i"]
    timeline.close()
    assert names == [f"{number}: 1 rows" for number in range(200)]


def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "model.json")
    timeline.close()
    timeline.close()
    assert {event["ph"] for event in read(tmp_path / "model.json")} == {"M"}


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Timeline(tmp_path / "file" / "model.json")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_ends_it_with_one_warning_and_nothing_else() -> None:
    with capture_logs() as logged:
        timeline = Timeline(FULL)
        for number in range(1000):
            timeline.sent(plan(number, 1), at=float(number))
        timeline.close()
    assert [entry["event"] for entry in logged] == ["timeline ends"]


@pytest.mark.anyio
async def test_real_stages_show_every_plan_in_the_order_of_its_work(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny("tiny-llama")
    layers = read_manifest(folder).num_layers
    spec = PipelineSpec(folder, here(uneven(layers, STAGES)), load_timeout_s=120, step_timeout_s=120)
    scheduler = Scheduler(replace(LIMITS, stages=STAGES))
    engine = Engine(
        ModelId("tiny"), scheduler, Pipeline(spec, place_local), Timeline(tmp_path / "model.json")
    )
    await engine.open(lambda done, total: None)
    try:
        await answers(engine, [request(range(10, 40), max_tokens=60), request(range(50, 60), max_tokens=60)])
    finally:
        await engine.close()
    events = read(tmp_path / "model.json")
    sent = [event["name"] for event in events if event["ph"] == "i"]
    assert sent == list(dict.fromkeys(sent))
    shown = {event["args"]["plan"] for event in events if event["ph"] == "X" and event["pid"] == HEAD + 1}
    assert shown == set(range(len(shown)))
    for stage in range(STAGES):
        for number in range(10):
            ms = spans(events, stage + 1, number)
            (device,) = (value for name, value in ms.items() if name.startswith(f"{number}: "))
            wait, build, give = ms["wait for input"], ms["build"], ms["give"]
            assert wait[1] == pytest.approx(build[0], abs=1)
            assert build[0] <= device[0] + 1
            assert build[1] <= device[1] + 1
            assert device[1] == pytest.approx(give[0], abs=1)
    for number in range(10):  # a stage has its input once its neighbour has given it
        gives = [spans(events, stage + 1, number)["give"] for stage in range(STAGES)]
        begins = [spans(events, stage + 1, number)["build"] for stage in range(STAGES)]
        for before, behind in zip(gives, begins[1:], strict=False):
            assert before[0] <= behind[0]
