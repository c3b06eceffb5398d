"""Whether a slow node loses layers until no plan is much better, whether it stops then, and what is said."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.cluster.candidate import Candidate
from omlx.cluster.choice import choose
from omlx.cluster.forecast import forecast
from omlx.cluster.measure import Measures
from omlx.cluster.placement import Demand, place
from omlx.cluster.planner import NodeBudget, Span
from omlx.cluster.rates import LayerTimes, LinkRate, Links, NodeRates, layer_kind
from omlx.cluster.rebalance import LEAST_GAIN, MoveCosts, Proposal, propose, worth
from omlx.errors import DoesNotFit, Refused
from omlx.node.kv_bytes import LayerKv
from omlx.node.manifest import LayerBytes, ModelManifest
from tests.cluster.test_measure import Machine, chunk, rows, truth_of
from tests.cluster.test_planner import manifest_of

MB, GB = 10**6, 10**9
FAST = Links(LinkRate(1e-5, 1e12))
MANY = Demand(100, 120, "throughput", step_tokens=64)
"""Sequences that can be dealt evenly into up to six groups, so that the slowest stage alone decides."""
ONE = Demand(100, step_tokens=64)
HEAD = LayerTimes(0.0, 0.0001, 0.0)


def model(weights: Sequence[int], ends: int = 0) -> ModelManifest:
    layers = [LayerBytes(size, LayerKv(0)) for size in weights]
    return manifest_of(layers, embedding_bytes=ends, head_bytes=ends, other_bytes=0)


EVEN = model([GB] * 12)


def node(name: str, slower: float = 1.0, gigabytes: float = 100, manifest: ModelManifest = EVEN) -> Candidate:
    """Rows cost by the weights of their layer, as on a machine that is short of arithmetic."""
    kinds = {
        layer_kind(layer): LayerTimes(1e-6, 0.001 * slower * layer.weights / GB, 0.0005 * slower)
        for layer in manifest.layers
    }
    rates = NodeRates(100e9, 1e12, kinds=tuple(kinds.items()), head=HEAD)
    return Candidate(NodeBudget(name, int(gigabytes * GB)), rates)


def stages_of(proposal: Proposal) -> list[tuple[str, Span]]:
    return [
        (node.name, span)
        for node, span in zip(proposal.placement.used, proposal.placement.plan.spans, strict=True)
    ]


def slowest_s(manifest: ModelManifest, nodes: Sequence[Candidate], edges: Sequence[int], rows: int) -> float:
    """Of a plan over these nodes in this order, from LayerTimes once more; links are too fast to matter."""
    stages = []
    for one, (start, end) in zip(nodes, itertools.pairwise(edges), strict=True):
        found = [one.rates.times(layer_kind(layer)) for layer in manifest.layers[start:end]]
        stages.append(sum(t.step_s + rows * t.row_s for t in found if t is not None))
    return max([*stages[:-1], stages[-1] + rows * HEAD.row_s])


def fits(manifest: ModelManifest, nodes: Sequence[Candidate], edges: Sequence[int], demand: Demand) -> bool:
    """By weights, with a little for logits and a step's rows."""
    little = demand.sequences * manifest.vocab_size * 12 + 64
    return all(
        manifest.span_bytes(start, end) + little <= one.budget.bytes
        for one, (start, end) in zip(nodes, itertools.pairwise(edges), strict=True)
    )


def exhaustive_s(manifest: ModelManifest, nodes: Sequence[Candidate], demand: Demand, rows: int) -> float:
    """The least slowest stage of all contiguous cuts over all nodes in all orders."""
    best = float("inf")
    for size in range(1, len(nodes) + 1):
        for inner in itertools.combinations(range(1, manifest.num_layers), size - 1):
            edges = (0, *inner, manifest.num_layers)
            for order in itertools.permutations(nodes, size):
                if fits(manifest, order, edges, demand):
                    best = min(best, slowest_s(manifest, order, edges, rows))
    return best


def slowed(nodes: Sequence[Candidate], index: int, factor: float, manifest: ModelManifest) -> list[Candidate]:
    """Every other node as it was."""
    return [
        replace(one, rates=_slower(one.rates, factor)) if place == index else one
        for place, one in enumerate(nodes)
    ]


def _slower(rates: NodeRates, factor: float) -> NodeRates:
    kinds = tuple(
        (name, LayerTimes(t.step_s * factor, t.row_s * factor, t.token_s * factor)) for name, t in rates.kinds
    )
    return replace(rates, kinds=kinds)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ModelManifest, list[Candidate]]:
    weights = draw(st.lists(st.sampled_from([GB, GB, 3 * GB]), min_size=4, max_size=12))
    manifest = model(weights)
    count = draw(st.integers(2, 4))
    speeds = draw(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=count, max_size=count))
    whole = sum(weights) / GB
    sizes = draw(st.lists(st.sampled_from([0.4, 0.7, 1.5]), min_size=count, max_size=count))
    nodes = [
        node(f"mac{index}", slower, max(4, share * whole), manifest)
        for index, (slower, share) in enumerate(zip(speeds, sizes, strict=True))
    ]
    return manifest, nodes


@settings(max_examples=40, deadline=None)
@given(cluster=clusters(), index=st.integers(0, 3), factor=st.sampled_from([1.3, 2.0, 4.0]))
def test_after_a_node_became_slower_no_plan_has_a_slowest_stage_a_tenth_faster(
    cluster: tuple[ModelManifest, list[Candidate]], index: int, factor: float
) -> None:
    manifest, nodes = cluster
    try:
        first = place(manifest, nodes, FAST, MANY)
    except DoesNotFit:
        return
    current = [(one.name, span) for one, span in zip(first.used, first.plan.spans, strict=True)]
    now = slowed(nodes, index % len(nodes), factor, manifest)
    proposal = propose(manifest, current, now, FAST, MANY)
    assert all(stage.headroom >= 0 for stage in proposal.placement.plan.stages)
    edges = [0, *(span.end for span in proposal.placement.plan.spans)]
    took_s = slowest_s(manifest, proposal.placement.used, edges, proposal.placement.rows)
    best_s = exhaustive_s(manifest, now, MANY, proposal.placement.rows)
    assert took_s <= 1.1 * best_s
    again = propose(manifest, stages_of(proposal), now, FAST, MANY)
    assert again.moves == () and again.gain == pytest.approx(1.0)
    assert not worth(again)


@settings(max_examples=40, deadline=None)
@given(cluster=clusters(), index=st.integers(0, 3), factor=st.sampled_from([1.3, 2.0, 4.0]))
def test_one_streams_plan_is_nearly_the_best_and_is_left_alone_after_that(
    cluster: tuple[ModelManifest, list[Candidate]], index: int, factor: float
) -> None:
    manifest, nodes = cluster
    try:
        first = place(manifest, nodes, FAST, ONE)
    except DoesNotFit:
        return
    current = [(one.name, span) for one, span in zip(first.used, first.plan.spans, strict=True)]
    now = slowed(nodes, index % len(nodes), factor, manifest)
    proposal = propose(manifest, current, now, FAST, ONE)
    best = forecast(manifest, place(manifest, now, FAST, ONE), FAST, 100)
    assert proposal.expected.single >= best.single / 1.03
    assert propose(manifest, stages_of(proposal), now, FAST, ONE).moves == ()


@settings(max_examples=40, deadline=None)
@given(cluster=clusters(), noise=st.lists(st.floats(0.97, 1.03), min_size=4, max_size=4))
def test_rates_that_are_a_little_off_never_move_a_good_plan(
    cluster: tuple[ModelManifest, list[Candidate]], noise: list[float]
) -> None:
    manifest, nodes = cluster
    try:
        first = place(manifest, nodes, FAST, MANY)
    except DoesNotFit:
        return
    current = [(one.name, span) for one, span in zip(first.used, first.plan.spans, strict=True)]
    good = propose(manifest, current, nodes, FAST, MANY)
    off = [replace(one, rates=_slower(one.rates, by)) for one, by in zip(nodes, noise, strict=False)]
    assert not worth(propose(manifest, stages_of(good), off, FAST, MANY))


def test_a_host_with_a_quarter_of_a_core_is_relieved_by_measurement_once_and_then_all_is_quiet() -> None:
    """Three machines of one kind serve; one becomes slow. Their times come through the real fits."""
    manifest = model([GB] * 12)
    layer, head = LayerTimes(0.0005, 0.001, 0.0005), LayerTimes(0.0005, 0.001, 0.0)
    truth = truth_of(manifest, [layer], head)
    measures = Measures()
    machines = [
        Machine(
            measures,
            manifest,
            Span(4 * index, 4 * index + 4),
            truth,
            name,
            noise=0.05,
            pause_every=400,
            works=[*rows(6, 7) * 20, chunk()],
            random=Random(index),
        )
        for index, name in enumerate(("a", "b", "c"))
    ]
    nominal = [Candidate(NodeBudget(one.name, 9 * GB), NodeRates(60e9, 2e12, "guess")) for one in machines]

    def serve(checks: int) -> list[Proposal]:
        """What was moved. A check every 100 plans."""
        moved = []
        for _ in range(checks):
            fresh = [bool(machine.run(100)) for machine in machines if len(machine.span)]
            nodes = measures.candidates(nominal, manifest.folder)
            current = [(one.name, one.span) for one in machines if len(one.span)]
            proposal = propose(manifest, current, nodes, FAST, MANY)
            # While rates are still on their way, moves would be made for half of the truth.
            if not any(fresh) and worth(proposal):
                moved.append(proposal)
                spans = dict(stages_of(proposal))
                for one in machines:
                    if spans.get(one.name, Span(0, 0)) != one.span:
                        one.move(spans.get(one.name, Span(0, 0)))
        return moved

    assert serve(10) == []
    machines[1].slower = 4.0
    moved = serve(20)
    assert len(moved) == 1
    true_nodes = [
        replace(one, rates=_slower(replace(truth, head=HEAD), machine.slower))
        for one, machine in zip(nominal, machines, strict=True)
    ]
    rows_ = moved[0].placement.rows
    by_name = {one.name: one for one in true_nodes}
    used = [by_name[name] for name, _ in stages_of(moved[0])]
    edges = [0, *(span.end for _, span in stages_of(moved[0]))]
    took_s, best_s = slowest_s(manifest, used, edges, rows_), exhaustive_s(manifest, true_nodes, MANY, rows_)
    assert took_s <= 1.1 * best_s
    assert serve(30) == []


def test_layers_stay_in_the_order_in_which_they_are() -> None:
    nodes = [node("a"), node("b"), node("c")]
    for order in itertools.permutations("abc"):
        current = [(name, Span(4 * place, 4 * place + 4)) for place, name in enumerate(order)]
        assert propose(EVEN, current, nodes, FAST, MANY).moves == ()
        uneven = [(order[0], Span(0, 8)), (order[1], Span(8, 10)), (order[2], Span(10, 12))]
        proposal = propose(EVEN, uneven, nodes, FAST, MANY)
        assert [name for name, _ in stages_of(proposal)] == list(order)
        assert worth(proposal)


def test_only_the_layers_that_a_node_lacks_are_read() -> None:
    manifest = model([GB] * 12, ends=GB // 2)
    current = [("a", Span(0, 8)), ("b", Span(8, 12))]
    proposal = propose(manifest, current, [node("a", 4.0), node("b")], FAST, MANY)
    moves = {move.node: move for move in proposal.moves}
    given, gained = moves["a"], moves["b"]
    assert given.read_bytes == 0 and given.gained == 0 and given.given == gained.gained > 0
    assert gained.read_bytes == gained.gained * GB
    assert gained.after is not None and gained.after.end == 12


def test_a_node_that_becomes_the_first_reads_the_embedding_and_the_last_one_the_head() -> None:
    manifest = model([GB] * 12, ends=GB // 2)
    current = [("a", Span(0, 12))]
    nodes = [node("b", 1.0, 200), replace(node("a", 1.0, 200), budget=NodeBudget("a", 6 * GB))]
    proposal = propose(manifest, current, nodes, FAST, MANY)
    move = next(move for move in proposal.moves if move.node == "b")
    ends = manifest.span_bytes(0, 12) - 12 * GB if len(proposal.moves) == 2 and move.gained == 12 else GB // 2
    assert move.read_bytes == move.gained * GB + ends


def test_a_newcomer_is_put_between_the_others_without_moving_them_more_than_needed() -> None:
    current = [("a", Span(0, 6)), ("b", Span(6, 12))]
    proposal = propose(EVEN, current, [node("c"), node("b"), node("a")], FAST, MANY)
    names = [name for name, _ in stages_of(proposal)]
    assert [name for name in names if name != "c"] == ["a", "b"]
    assert {name: len(span) for name, span in stages_of(proposal)} == {"a": 4, "b": 4, "c": 4}
    assert sum(move.read_bytes for move in proposal.moves) <= 6 * GB


def test_a_node_that_left_gives_its_layers_to_the_others_whatever_is_gained() -> None:
    current = [("a", Span(0, 4)), ("gone", Span(4, 8)), ("b", Span(8, 12))]
    proposal = propose(EVEN, current, [node("a"), node("b")], FAST, MANY)
    assert proposal.needed is not None and "gone is no longer there" in proposal.needed
    assert proposal.now is None and proposal.now_per_s == 0
    assert [name for name, _ in stages_of(proposal)] == ["a", "b"]
    assert any(line.startswith("gone 4-7 -> none (-4 layers") for line in proposal.lines())
    assert json.loads(json.dumps(proposal.as_json()))["gain"] is None
    assert worth(proposal)


def test_a_node_that_has_less_memory_than_its_layers_take_must_give_some_away() -> None:
    current = [("a", Span(0, 6)), ("b", Span(6, 12))]
    nodes = [node("a", 1.0, 4.5), node("b", 1.0, 100)]
    proposal = propose(EVEN, current, nodes, FAST, MANY)
    assert proposal.needed is not None
    assert proposal.needed.startswith("a gives 4.50 GB, its layers take 6.00 GB")
    assert {name: len(span) for name, span in stages_of(proposal)}["a"] <= 4
    assert proposal.now is not None


def test_what_fits_nowhere_is_told_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit, match="have no place"):
        propose(EVEN, [("a", Span(0, 12))], [node("a", 1.0, 3)], FAST, MANY)


@pytest.mark.parametrize(
    "current",
    [
        [],
        [("a", Span(0, 11))],
        [("a", Span(1, 12))],
        [("a", Span(0, 6)), ("b", Span(7, 12))],
        [("a", Span(0, 6)), ("a", Span(6, 12))],
        [("a", Span(0, 12)), ("b", Span(12, 12))],
    ],
)
def test_what_is_no_plan_of_the_model_is_refused(current: list[tuple[str, Span]]) -> None:
    with pytest.raises(Refused, match="no plan for tiny"):
        propose(EVEN, current, [node("a"), node("b")], FAST, MANY)


COSTS = MoveCosts(tokens=64_000, bytes_per_s={"b": 2e9})


def moving() -> Proposal:
    return propose(
        EVEN, [("a", Span(0, 8)), ("b", Span(8, 12))], [node("a", 4.0), node("b")], FAST, MANY, COSTS
    )


def test_the_cost_is_the_slowest_nodes_reading_and_the_tokens_at_stake() -> None:
    proposal = moving()
    gained = next(move for move in proposal.moves if move.node == "b")
    assert proposal.read_s == gained.read_s == pytest.approx(gained.gained * GB / 2e9)
    slowest = max(0.0005 * (4 if name == "a" else 1) * len(span) for name, span in stages_of(proposal))
    assert proposal.recompute_s == pytest.approx(64_000 * slowest, rel=0.01)
    assert proposal.cost_s == proposal.read_s + proposal.recompute_s


def test_it_is_told_in_words_and_as_json() -> None:
    proposal = moving()
    text = "\n".join(proposal.lines())
    (gained,) = (move for move in proposal.moves if move.node == "b")
    assert gained.before == Span(8, 12) and gained.after is not None
    what = f"+{gained.gained} layers, {gained.gained}.00 GB to read"
    assert f"b 8-11 -> {gained.after.start}-11 ({what})" in text
    assert f"tokens/s now, {proposal.expected_per_s:.1f} expected (x{proposal.gain:.2f})" in text
    assert "64000 tokens computed again" in text
    told = json.loads(json.dumps(proposal.as_json()))
    assert told["gain"] == pytest.approx(proposal.gain)
    assert told["worth"] is worth(proposal)
    assert told["stages"][-1]["end"] == 12
    assert {move["node"] for move in told["moves"]} == {"a", "b"}
    still = propose(EVEN, stages_of(proposal), [node("a", 4.0), node("b")], FAST, MANY)
    assert still.cost_s == 0.0
    assert still.lines() == [f"tiny lies well: {still.expected_per_s:.1f} tokens/s, nothing to move"]


@given(
    gain=st.floats(0.5, 50),
    read_s=st.floats(0, 1000),
    recompute_s=st.floats(0, 1000),
    horizon_s=st.floats(1, 1e4),
)
def test_nothing_moves_by_itself_for_less_than_it_costs(
    gain: float, read_s: float, recompute_s: float, horizon_s: float
) -> None:
    proposal = moving()
    faster = replace(proposal.expected, throughput=proposal.now_per_s * gain)
    proposal = replace(proposal, expected=faster, read_s=read_s, recompute_s=recompute_s)
    moves = worth(proposal, horizon_s)
    won_s = horizon_s - horizon_s / proposal.gain
    if proposal.gain < LEAST_GAIN or won_s <= 2 * (read_s + recompute_s):
        assert not moves
    if proposal.gain > 1.2 and won_s > 3 * (read_s + recompute_s):
        assert moves


def test_a_large_cluster_is_looked_at_in_a_moment() -> None:
    manifest = model([GB // 4 + n % 3 for n in range(128)])
    nodes = [node(f"n{n}", 1 + n % 7 / 10, 2 + n % 5, manifest) for n in range(64)]
    current = [(f"n{n}", Span(2 * n, 2 * n + 2)) for n in range(64)]
    began = time.thread_time()
    proposal = propose(manifest, current, nodes, FAST, MANY)
    assert time.thread_time() - began < 5
    best = choose(manifest, nodes, FAST, MANY).expected
    assert proposal.expected.throughput >= best.throughput / 1.02
