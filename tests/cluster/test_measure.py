"""Whether rates fitted to stages' times give these times back, and hold still while nothing changes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.cluster.candidate import Candidate
from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.measure import (
    CHUNK_TOKENS,
    LEAST,
    SPACING,
    LinkSample,
    Measures,
    StageTimes,
    line_of,
    measured_link,
)
from omlx.cluster.planner import NodeBudget, Span
from omlx.cluster.rates import LayerTimes, LinkRate, Links, NodeRates, layer_kind, rates_by_chip
from omlx.node.costs import StageCost, StageMeter
from omlx.node.kv_bytes import LayerKv
from omlx.node.manifest import LayerBytes, ModelManifest
from omlx.node.step import Work
from tests.cluster.test_planner import even, manifest_of

MB, GB = 10**6, 10**9
PLAIN = manifest_of(even(12, 100 * MB), embedding_bytes=50 * MB, head_bytes=50 * MB)
DENSE, SPARSE = LayerBytes(300 * MB, LayerKv(2)), LayerBytes(100 * MB, LayerKv(1, 5))
MIXED = manifest_of([DENSE] * 6 + [SPARSE] * 6, embedding_bytes=50 * MB, head_bytes=50 * MB)
NOMINAL = NodeRates(100e9, 3e12, "table")


def truth_of(manifest: ModelManifest, times: Sequence[LayerTimes], head: LayerTimes) -> NodeRates:
    """A node whose layers take exactly so long, by kind in the order of the model."""
    kinds = list(dict.fromkeys(layer_kind(layer) for layer in manifest.layers))
    return NodeRates(1.0, 1.0, kinds=tuple(zip(kinds, times, strict=True)), head=head)


def stage_s(manifest: ModelManifest, span: Span, rates: NodeRates, work: Work) -> float:
    """Seconds of a stage by the planner's model."""
    model = ModelWork.of(manifest, 1)
    if work.tokens:
        return sum(model.chunk_s(rates, work.tokens)[span.start : span.end])
    head_s = model.head_s(rates, work.rows) if span.end == manifest.num_layers else 0.0
    return sum(model.decode_s(rates, work.rows)[span.start : span.end]) + head_s


def chunk(tokens: int = CHUNK_TOKENS) -> Work:
    return Work(0, tokens, tokens**2 / 2)


def rows(*sizes: int) -> list[Work]:
    return [Work(size, 0, 0.0) for size in sizes]


@dataclass
class Machine:
    """One node that runs one stage, in pretend time: noise on every plan, and pauses of a second."""

    measures: Measures
    manifest: ModelManifest
    span: Span
    truth: NodeRates
    name: str = "mac"
    noise: float = 0.03
    slower: float = 1.0
    pause_every: int = 0
    works: Sequence[Work] = field(default_factory=lambda: [*rows(1, 2, 4, 8) * 4, chunk()])
    meter: StageMeter = field(default_factory=lambda: StageMeter(mixes=False))
    random: Random = field(default_factory=lambda: Random(7))
    plans: int = 0
    _next: Iterator[Work] | None = None
    _known: dict[tuple[Span, Work], float] = field(default_factory=dict)

    def seconds(self, work: Work) -> float:
        key = self.span, work
        if key not in self._known:
            self._known[key] = stage_s(self.manifest, self.span, self.truth, work)
        return self._known[key] * self.slower

    def run(self, plans: int) -> list[int]:
        """After which of these plans other rates were told."""
        self._next = self._next or cycle(self.works)
        told = []
        for number in range(plans):
            work = next(self._next)
            self.add(work, self.seconds(work) * max(0.1, self.random.gauss(1.0, self.noise)))
            if self.tell():
                told.append(number)
        return told

    def add(self, work: Work, seconds: float) -> None:
        self.plans += 1
        paused = self.pause_every and self.plans % self.pause_every == 0
        self.meter.add(work, seconds + (1.0 if paused else 0.0))

    def tell(self) -> bool:
        cost = self.meter.cost()
        assert cost is not None
        return self.measures.add(self.name, StageTimes(self.manifest, self.span, cost, self.plans))

    def move(self, span: Span) -> None:
        """Another span: its engine measures from the start."""
        self.span, self.meter = span, StageMeter(mixes=False)

    @property
    def rates(self) -> NodeRates:
        found = self.measures.rates(self.name, self.manifest.folder)
        assert found is not None
        return found


LAYER = LayerTimes(step_s=0.002, row_s=0.0002, token_s=0.00005)
HEAD = LayerTimes(step_s=0.004, row_s=0.0003, token_s=0.0)


def plain(**changes: object) -> Machine:
    machine = Machine(Measures(), PLAIN, Span(0, 6), truth_of(PLAIN, [LAYER], HEAD))
    return replace(machine, **changes)  # type: ignore[arg-type]


times = st.builds(
    LayerTimes,
    step_s=st.floats(0.0005, 0.05),
    row_s=st.floats(0.00001, 0.002),
    token_s=st.floats(0.00001, 0.0005),
)


@settings(max_examples=12, deadline=None)
@given(
    dense=times,
    sparse=times,
    head=times,
    cut=st.integers(0, 9),
    size=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_rates_give_a_stages_times_back_under_noise_and_pauses(
    dense: LayerTimes, sparse: LayerTimes, head: LayerTimes, cut: int, size: int, seed: int
) -> None:
    span, truth = Span(cut, min(12, cut + size)), truth_of(MIXED, [dense, sparse], head)
    machine = Machine(Measures(), MIXED, span, truth, pause_every=150, random=Random(seed))
    machine.run(600)
    for work in (*rows(1, 2, 4, 8), chunk()):
        expected = stage_s(MIXED, span, truth, work)
        # Of the few chunks one may have met a pause, which counts for as much as is expected of it.
        close = 0.2 if work.tokens else 0.05
        assert stage_s(MIXED, span, machine.rates, work) == pytest.approx(expected, rel=close)
    assert machine.rates.source == "measured"


def test_a_whole_plan_is_timed_by_what_was_measured_not_by_the_table() -> None:
    machine = plain(noise=0.0)
    machine.run(200)
    for span in (Span(0, 3), Span(2, 11)):
        expected = stage_s(PLAIN, span, machine.truth, Work(4, 0, 0.0))
        assert stage_s(PLAIN, span, machine.rates, Work(4, 0, 0.0)) == pytest.approx(expected, rel=0.03)


def test_too_few_plans_are_no_measurement() -> None:
    machine = plain()
    machine.run(LEAST * SPACING - SPACING - 1)
    assert machine.measures.rates("mac") is None
    machine.run(60)
    assert machine.measures.rates("mac") is not None


def test_asking_an_idle_stage_again_and_again_is_no_measurement() -> None:
    machine = plain()
    machine.run(20)
    assert not any(machine.tell() for _ in range(100))
    assert machine.measures.rates("mac") is None


def test_a_stage_that_has_decoded_nothing_yet_is_not_measured() -> None:
    meter = StageMeter(mixes=False)
    for _ in range(50):
        meter.add(chunk(), 0.1)
    cost = meter.cost()
    assert cost is not None and line_of(cost) is None
    assert line_of(StageCost(0.0, 0.0, 0.0, 0.0, 0.0, False, ((1, 0.0),))) is None


def test_a_node_slowed_to_a_quarter_is_noticed_within_a_hundred_plans_and_known_within_three() -> None:
    machine = plain(works=[*rows(6, 7) * 20, chunk()])
    machine.run(300)
    before = machine.rates
    machine.slower = 4.0
    told = machine.run(300)
    assert told[0] < 100
    for work in rows(6, 7):
        slow, fast = (stage_s(PLAIN, machine.span, rates, work) for rates in (machine.rates, before))
        assert slow / fast == pytest.approx(4.0, rel=0.12)
    assert before.bandwidth / machine.rates.bandwidth > 3


def test_noise_of_a_twentieth_tells_nothing_new_for_thousands_of_plans() -> None:
    machine = plain(noise=0.05)
    machine.run(300)
    assert machine.run(4000) == []


def test_a_node_that_pauses_for_a_second_now_and_then_is_not_taken_for_a_slow_one() -> None:
    machine = plain()
    machine.run(300)
    for _ in range(3):
        machine.add(Work(4, 0, 0.0), 1.0)
        assert not machine.tell()
    assert machine.run(300) == []


@pytest.mark.parametrize(("slower", "tells"), [(1.05, False), (1.3, True), (0.7, True)])
def test_only_a_change_of_a_tenth_is_told(slower: float, tells: bool) -> None:
    machine = plain(noise=0.01)
    machine.run(300)
    machine.slower = slower
    assert bool(machine.run(1000)) == tells


def test_when_one_nodes_rates_change_all_are_told_anew() -> None:
    measures = Measures()
    one, other = (plain(measures=measures, name=name, meter=StageMeter(mixes=False)) for name in ("a", "b"))
    for machine in (one, other):
        machine.run(400)
    before = other.rates
    other.slower = 1.06
    assert other.run(1000) == []
    assert other.rates == before
    one.slower = 2.0
    assert one.run(400)
    assert before.bandwidth / other.rates.bandwidth == pytest.approx(1.06, abs=0.04)


def test_kinds_are_told_apart_once_a_node_has_run_two_mixtures_of_them() -> None:
    """By bytes a sparse layer would take a third of a dense one; here it takes just as long."""
    truth = truth_of(MIXED, [LAYER, LAYER], HEAD)
    machine = Machine(Measures(), MIXED, Span(0, 6), truth, noise=0.01)
    machine.run(400)
    work = Work(4, 0, 0.0)
    sparse = Span(6, 11)
    expected = stage_s(MIXED, sparse, truth, work)
    assert stage_s(MIXED, sparse, machine.rates, work) < 0.5 * expected
    machine.move(Span(3, 9))
    machine.run(400)
    assert stage_s(MIXED, sparse, machine.rates, work) == pytest.approx(expected, rel=0.12)
    own = stage_s(MIXED, machine.span, truth, work)
    assert stage_s(MIXED, machine.span, machine.rates, work) == pytest.approx(own, rel=0.05)


def test_other_spans_times_are_forgotten_when_the_node_itself_becomes_slower() -> None:
    """Otherwise the layers that it ran when it was fast would be taken for a faster kind."""
    truth = truth_of(MIXED, [LayerTimes(0.003, 0.0003, 0.0001), LayerTimes(0.001, 0.0001, 0.00003)], HEAD)
    machine = Machine(Measures(), MIXED, Span(0, 6), truth, noise=0.01)
    machine.run(400)
    machine.move(Span(3, 9))
    machine.run(400)
    machine.slower = 3.0
    machine.run(1500)
    work = Work(4, 0, 0.0)
    for span in (Span(0, 6), Span(6, 11), Span(3, 9)):
        expected = 3 * stage_s(MIXED, span, truth, work)
        assert stage_s(MIXED, span, machine.rates, work) == pytest.approx(expected, rel=0.1)


def test_a_measured_node_is_as_much_slower_for_every_other_model() -> None:
    machine = plain(noise=0.0)
    machine.run(300)
    rates = machine.measures.rates("mac", Path("another"))
    assert rates is not None and rates.kinds == () and rates.source == "measured"
    step_s = stage_s(PLAIN, machine.span, machine.truth, Work(1, 0, 0.0))
    assert rates.bandwidth == pytest.approx(6 * 100 * MB / step_s, rel=0.03)
    chunk_s = stage_s(PLAIN, machine.span, machine.truth, chunk())
    assert rates.compute == pytest.approx(CHUNK_TOKENS * 6 * 100 * MB / chunk_s, rel=0.03)


def test_a_node_that_nobody_has_tried_is_not_better_than_its_like_that_was_measured() -> None:
    machine = plain()
    machine.run(300)
    same, twice = (Candidate(NodeBudget(name, GB), NOMINAL) for name in ("mac", "other"))
    fast = Candidate(NodeBudget("fast", GB), NodeRates(200e9, 6e12, "table"))
    assert machine.measures.candidates([twice]) == [twice]
    measured, unknown, faster = machine.measures.candidates([same, twice, fast], PLAIN.folder)
    assert measured.rates == machine.rates
    for work in (*rows(1, 4, 8), chunk()):
        times = [stage_s(PLAIN, Span(0, 12), one.rates, work) for one in (measured, unknown, faster)]
        assert times[1] == pytest.approx(times[0], rel=1e-6)
        assert times[2] == pytest.approx(times[0] / 2, rel=1e-6)
    assert unknown.rates.source == "table"


def test_a_node_measured_by_another_model_is_timed_by_that() -> None:
    measures = Measures()
    other = replace(PLAIN, folder=Path("other"))
    plain(measures=measures, name="a").run(300)
    plain(measures=measures, name="b", manifest=other, slower=2.0, meter=StageMeter(mixes=False)).run(300)
    own, guessed = (measures.rates(name, PLAIN.folder) for name in ("a", "b"))
    assert own is not None and guessed is not None
    work = Work(4, 0, 0.0)
    ratio = stage_s(PLAIN, Span(0, 12), guessed, work) / stage_s(PLAIN, Span(0, 12), own, work)
    assert ratio == pytest.approx(2.0, rel=0.06)


def test_a_model_is_the_same_however_its_folder_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "model").mkdir()
    measures = Measures()
    plain(measures=measures, name="a", manifest=replace(PLAIN, folder=tmp_path / "link")).run(300)
    seen = [measures.rates("a", folder) for folder in (tmp_path / "link", tmp_path / "model")]
    assert seen[0] is not None and seen[0].kinds and seen[0] == seen[1]


def test_a_chip_that_is_not_in_the_table_is_known_once_it_was_measured() -> None:
    machine = plain()
    machine.run(300)
    unknown = Candidate(NodeBudget("mac", GB), rates_by_chip("Apple M99"))
    assert unknown.rates.source == "guess"
    assert machine.measures.candidates([unknown], PLAIN.folder)[0].rates.source == "measured"


def test_a_link_is_the_middle_of_its_samples() -> None:
    samples = [LinkSample(0.001 * (1 + n % 3), 1e9) for n in range(9)]
    samples[4] = LinkSample(1.0, 1e6)
    rate = measured_link(samples)
    assert rate == LinkRate(0.001, 1e9, "measured")
    assert measured_link(samples[: LEAST - 1]) is None


def test_a_link_is_told_again_only_when_it_has_changed() -> None:
    measures, links = Measures(), Links(known={frozenset(("a", "c")): LinkRate(0.5, 1e6)})
    random = Random(3)

    def probe(count: int, seconds: Callable[[], float]) -> int:
        return sum(measures.add_link("b", "a", LinkSample(seconds(), 1e9)) for _ in range(count))

    assert probe(LEAST - 1, lambda: 0.001) == 0
    assert measures.links(links).between("a", "b") == links.default
    assert probe(1, lambda: 0.001) == 1
    assert probe(200, lambda: random.gauss(0.001, 0.00005)) == 0
    assert measures.links(links).between("a", "b").latency_s == pytest.approx(0.0005)
    assert probe(20, lambda: 0.010) > 0
    assert measures.links(links).between("a", "b").latency_s == pytest.approx(0.005)
    assert measures.links(links).between("a", "c") == LinkRate(0.5, 1e6)
