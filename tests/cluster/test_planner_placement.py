"""Which nodes a model goes to: real bytes and rates against brute force, the forecast, and the reasons."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.cluster.candidate import Candidate, budget_of, parse_candidate
from omlx.cluster.choice import Choice, Explained, choose, explain
from omlx.cluster.forecast import forecast
from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.partition import LayerSums
from omlx.cluster.placement import Demand, Placement, place, span_bytes
from omlx.cluster.planner import NodeBudget, Span
from omlx.cluster.rates import (
    LINKS,
    LayerTimes,
    LinkRate,
    Links,
    NodeRates,
    find_chip,
    layer_kind,
    rates_by_bandwidth,
    rates_by_chip,
)
from omlx.cluster.span_search import TICKS_PER_S, ticks_of
from omlx.errors import BadSetting, DoesNotFit, Refused
from omlx.node.kv_bytes import LayerKv
from omlx.node.manifest import LayerBytes, ModelManifest
from tests.cluster.test_planner import even, manifest_of, models, used_by

GB = 10**9
RATES = st.builds(
    NodeRates, bandwidth=st.integers(1000, 9000).map(float), compute=st.integers(1000, 99_000).map(float)
)
LINK_RATES = st.builds(LinkRate, st.integers(0, 3).map(float), st.integers(10, 500).map(float))


def node(name: str, gigabytes: float, bandwidth: float = 400e9) -> Candidate:
    return Candidate(NodeBudget(name, int(gigabytes * GB)), NodeRates(bandwidth, bandwidth * 25))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Candidate], Links]:
    count = draw(st.integers(1, 4))
    rates = draw(st.lists(RATES, min_size=1, max_size=2))
    sizes = draw(st.lists(st.integers(1000, 20_000), min_size=1, max_size=2))
    nodes = [
        Candidate(NodeBudget(f"mac{i}", draw(st.sampled_from(sizes))), draw(st.sampled_from(rates)))
        for i in range(count)
    ]
    known = [
        (one.name, other.name, draw(LINK_RATES))
        for one, other in itertools.combinations(nodes, 2)
        if draw(st.booleans())
    ]
    return nodes, Links.of(known, draw(LINK_RATES))


def cost_of(
    manifest: ModelManifest,
    nodes: list[Candidate],
    spans: list[Span],
    links: Links,
    demand: Demand,
    rows: int,
) -> int | None:
    """Ticks of the objective, from the docstrings once more; None where it does not fit."""
    work = ModelWork.of(manifest, demand.context_tokens)
    stages, hops = [], []
    for one, span in zip(nodes, spans, strict=True):
        used = used_by(manifest, span, demand.context_tokens, demand.sequences, demand.step_tokens)
        if used > one.budget.bytes:
            return None
        stages.append(sum(map(ticks_of, work.decode_s(one.rates, rows)[span.start : span.end])))
    stages[-1] += ticks_of(work.head_s(nodes[-1].rates, rows))
    for one, other in itertools.pairwise(nodes):
        link = links.between(one.name, other.name)
        size = rows * work.row_bytes
        single = demand.objective == "single"
        busy = size * (1 / link.bytes_per_s)
        hops.append(ticks_of(link.latency_s + busy if single else busy))
    if demand.objective == "throughput":
        return max(stages + hops)
    back = ticks_of(links.between(nodes[-1].name, nodes[0].name).latency_s) if hops else 0
    return sum(stages) + sum(hops) + back


@pytest.mark.parametrize("objective", ["single", "throughput"])
@settings(max_examples=60, deadline=None)
@given(manifest=models, cluster=clusters(), sequences=st.integers(1, 4))
def test_no_choice_order_or_split_of_all_there_are_is_better(
    manifest: ModelManifest, cluster: tuple[list[Candidate], Links], sequences: int, objective: str
) -> None:
    nodes, links = cluster
    manifest = replace(manifest, layers=manifest.layers[:6])
    demand = Demand(100, sequences, "single" if objective == "single" else "throughput", step_tokens=64)
    rows = 1 if objective == "single" else -(-sequences // min(sequences, len(nodes)))
    costs = []
    for size in range(1, min(len(nodes), manifest.num_layers) + 1):
        for inner in itertools.combinations(range(1, manifest.num_layers), size - 1):
            edges = (0, *inner, manifest.num_layers)
            spans = [Span(a, b) for a, b in itertools.pairwise(edges)]
            for order in itertools.permutations(nodes, size):
                cost = cost_of(manifest, list(order), spans, links, demand, rows)
                costs += [] if cost is None else [cost]
    try:
        found = place(manifest, nodes, links, demand)
    except DoesNotFit as error:
        assert not costs
        assert error.short_bytes > 0
        return
    assert found.exact
    assert found.rows == rows
    assert round(found.value_s * TICKS_PER_S) == pytest.approx(min(costs), rel=1e-12)
    assert cost_of(manifest, list(found.used), list(found.plan.spans), links, demand, rows) == min(costs)
    assert all(stage.headroom >= 0 for stage in found.plan.stages)
    assert sorted(one.name for one in (*found.used, *found.left_out)) == [one.name for one in nodes]


def reasons(manifest: ModelManifest, placement: Placement, links: Links) -> Explained:
    expected = forecast(manifest, placement, links, 512)
    return explain(manifest, Choice(placement, expected, placement.left_out), links)


@settings(max_examples=60, deadline=None)
@given(manifest=models, context=st.integers(1, 600), sequences=st.integers(1, 4))
def test_the_search_counts_the_same_bytes_as_the_plan(
    manifest: ModelManifest, context: int, sequences: int
) -> None:
    sizes = span_bytes(LayerSums.of(manifest, context, sequences, 64))
    for start, end in itertools.combinations(range(manifest.num_layers + 1), 2):
        assert sizes[start, end] == used_by(manifest, Span(start, end), context, sequences, 64)


LARGE = manifest_of(even(60, GB), embedding_bytes=GB, head_bytes=GB)


def test_one_stream_goes_to_the_fastest_node_that_holds_it_all() -> None:
    nodes = [node("mini", 100, 120e9), node("ultra", 100, 800e9), node("max", 100, 400e9)]
    found = place(LARGE, nodes, Links(), Demand(100))
    assert [one.name for one in found.used] == ["ultra"]
    why = dict(reasons(LARGE, found, Links()).left_out)
    assert set(why) == {"mini", "max"}
    assert all("slower: a token would take" in reason for reason in why.values())


def test_many_streams_give_each_node_layers_by_its_speed() -> None:
    nodes = [node("max", 100, 400e9), node("ultra", 100, 800e9)]
    found = place(LARGE, nodes, Links(), Demand(100, 8, "throughput"))
    parts = {stage.node.name: len(stage.span) for stage in found.plan.stages}
    assert parts["ultra"] == pytest.approx(2 * parts["max"], abs=2)


def test_for_few_streams_fewer_nodes_are_taken_where_more_would_be_slower() -> None:
    nodes = [node("ultra", 100, 800e9), node("mini", 100, 100e9)]
    few, pure = Demand(100, 2, "throughput"), place(LARGE, nodes, Links(), Demand(100, 2, "throughput"))
    assert len(pure.used) == 2
    chosen = choose(LARGE, nodes, Links(), few)
    assert [one.name for one in chosen.placement.used] == ["ultra"]
    assert chosen.expected.throughput > 1.3 * forecast(LARGE, pure, Links(), 512).throughput
    assert "slower: with more nodes 2 sequences would get" in explain(LARGE, chosen, Links()).left_out[0][1]


def test_where_caches_outweigh_weights_many_streams_take_all_nodes() -> None:
    model = manifest_of([LayerBytes(GB // 100, LayerKv(10**7))] * 20, embedding_bytes=0, head_bytes=0)
    nodes = [node("a", 900), node("b", 900)]
    chosen = choose(model, nodes, Links(), Demand(100, 16, "throughput"))
    assert chosen.left_out == () and chosen.passed_over is None
    assert chosen.expected.groups >= 2
    alone = choose(model, nodes[:1], Links(), Demand(100, 16, "throughput"))
    assert chosen.expected.throughput > 1.7 * alone.expected.throughput


@settings(max_examples=40, deadline=None)
@given(manifest=models, cluster=clusters(), sequences=st.integers(1, 4))
def test_what_is_chosen_for_throughput_is_forecast_no_less_than_what_was_passed_over(
    manifest: ModelManifest, cluster: tuple[list[Candidate], Links], sequences: int
) -> None:
    nodes, links = cluster
    demand = Demand(100, sequences, "throughput", step_tokens=64)
    try:
        pure = place(manifest, nodes, links, demand)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            choose(manifest, nodes, links, demand)
        return
    chosen = choose(manifest, nodes, links, demand)
    assert chosen.expected.throughput >= forecast(manifest, pure, links, 1024).throughput
    names = sorted(one.name for one in (*chosen.placement.used, *chosen.left_out))
    assert names == [one.name for one in nodes]
    assert [name for name, _ in explain(manifest, chosen, links).left_out] == [
        one.name for one in chosen.left_out
    ]


def test_a_node_behind_a_slow_link_is_left_out_where_the_link_would_be_the_slowest() -> None:
    nodes = [node("a", 100, 800e9), node("b", 100, 800e9), node("far", 100, 800e9)]
    slow = LinkRate(0.05, 50_000.0)
    links = Links.of([("a", "far", slow), ("b", "far", slow)])
    wide = replace(LARGE, hidden_size=8192)
    found = place(wide, nodes, links, Demand(100, 2, "throughput"))
    assert sorted(one.name for one in found.used) == ["a", "b"]
    assert "slower: the slowest step would take" in reasons(wide, found, links).left_out[0][1]


def test_two_nodes_that_must_share_a_model_share_it_evenly() -> None:
    found = place(LARGE, [node("a", 50), node("b", 50)], Links(), Demand(100))
    assert abs(len(found.plan.spans[0]) - len(found.plan.spans[1])) <= 2
    assert reasons(LARGE, found, Links()).binds.startswith("the speed of")


def test_a_fast_node_with_little_memory_is_what_binds() -> None:
    found = place(LARGE, [node("small", 30, 800e9), node("large", 100)], Links(), Demand(100))
    assert sorted(len(span) for span in found.plan.spans) == [28, 32]
    assert reasons(LARGE, found, Links()).binds.startswith("memory, first of all that of small:")


def test_a_node_too_small_for_any_layer_is_named_as_such() -> None:
    found = place(LARGE, [node("a", 100), node("tiny", 0.5)], Links(), Demand(100))
    assert reasons(LARGE, found, Links()).left_out == (("tiny", "its memory holds none of the layers"),)


def test_where_nothing_fits_each_node_is_told_and_the_shortfall() -> None:
    nodes = [node("mini", 8.1), node("studio", 30.1), node("phone", 0.1)]
    with pytest.raises(DoesNotFit) as caught:
        place(LARGE, nodes, Links(), Demand(100))
    text = str(caught.value)
    assert "studio holds layers 0 to 28: 30.00 GB weights" in text
    assert "mini holds layers 29 to 36" in text
    assert "phone holds none: one layer takes 1.00 GB of 100.0 MB" in text
    assert "layers 37 to 59 have no place, 24.00 GB short" in text
    assert caught.value.short_bytes == pytest.approx(24 * GB, rel=1e-3)


def test_nonsense_is_refused() -> None:
    with pytest.raises(Refused, match="at least one node"):
        place(LARGE, [], Links(), Demand(100))
    with pytest.raises(Refused, match="two nodes are called a"):
        place(LARGE, [node("a", 1), node("a", 2)], Links(), Demand(100))
    with pytest.raises(Refused, match="sequences = 0"):
        place(LARGE, [node("a", 1)], Links(), Demand(100, 0))
    with pytest.raises(Refused, match="a rate of 0"):
        place(LARGE, [node("a", 1, 0.0)], Links(), Demand(100))
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(Refused, match="measure it again"):
            LinkRate(0.001, bad)
    with pytest.raises(Refused, match="measure it again"):
        LayerTimes(0.1, float("nan"), 0.1)


@pytest.mark.parametrize("objective", ["single", "throughput"])
@pytest.mark.parametrize("shape", ["alike", "all different", "all different, all links measured"])
def test_a_large_cluster_is_placed_in_a_blink(shape: str, objective: str) -> None:
    layers = [
        LayerBytes(10**8 * (1 + n % 4), LayerKv(100, n % 3, 512 if n % 2 else None)) for n in range(128)
    ]
    manifest = manifest_of(layers, embedding_bytes=GB, head_bytes=GB)
    nodes = [node(f"n{i}", 3.0, 100e9) for i in range(64)]
    if shape != "alike":
        nodes = [node(f"n{i}", 2 + (i * 7 % 64) / 8, 1e9 * (100 + i * 37 % 64)) for i in range(64)]
    links = Links()
    if "links" in shape:
        names = enumerate(itertools.combinations([one.name for one in nodes], 2))
        links = Links.of((a, b, LinkRate(1e-4 * (1 + n % 9), 1e9 + n)) for n, (a, b) in names)
    demand = Demand(8192, 4, "single" if objective == "single" else "throughput")
    took = []
    for _ in range(20):
        # CPU time of this thread: what else the machine does is no fault of the planner.
        began = time.thread_time()
        found = place(manifest, nodes, links, demand)
        took.append(time.thread_time() - began)
    assert found.plan.spans[-1].end == 128
    assert found.value_s <= 1.1 * found.bound_s
    assert min(took) < 0.05


@pytest.mark.parametrize("objective", ["single", "throughput"])
def test_eight_nodes_that_all_differ_are_searched_to_the_last_plan(objective: str) -> None:
    nodes = [node(f"n{i}", 12 + i, 1e9 * (100 + i * 37 % 64)) for i in range(8)]
    pairs = enumerate(itertools.combinations([one.name for one in nodes], 2))
    links = Links.of((a, b, LinkRate(1e-4 * (1 + n), 1e9 + n)) for n, (a, b) in pairs)
    demand = Demand(100, 4, "single" if objective == "single" else "throughput")
    assert place(LARGE, nodes, links, demand).exact


def test_one_node_is_forecast_by_its_bandwidth_and_many_streams_share_the_weights() -> None:
    alone = place(LARGE, [node("a", 100)], Links(), Demand(100, 8, "throughput"))
    seen = forecast(LARGE, alone, Links(), 512)
    assert seen.single == pytest.approx(400e9 / (61 * GB + 10), rel=1e-3)
    assert seen.throughput == pytest.approx(8 * seen.single, rel=1e-3)
    assert seen.groups == 1 and seen.hop_s == 0.0


def test_a_split_costs_one_stream_its_hops_and_no_more() -> None:
    nodes = [node("a", 40), node("b", 40)]
    found = place(LARGE, nodes, Links(LinkRate(0.01, 1e12)), Demand(100))
    seen = forecast(LARGE, found, Links(LinkRate(0.01, 1e12)), 512)
    assert 1 / seen.single == pytest.approx((61 * GB) / 400e9 + 0.02, rel=1e-3)
    assert sum(seen.stage_s) + seen.hop_s == pytest.approx(found.value_s, rel=1e-9)


def test_chunks_of_a_prompt_flow_through_stages_side_by_side() -> None:
    """With m equal chunks and P equal stages (m + P - 1) of m * P chunk times, and the head after that."""
    model = manifest_of(even(60, GB), embedding_bytes=0, head_bytes=0)
    one = place(model, [node("a", 100)], Links(), Demand(10))
    free = Links(LinkRate(0.0, 1e18))
    two = place(model, [node("a", 35), node("b", 35)], free, Demand(10))
    assert [len(span) for span in two.plan.spans] == [30, 30]
    whole, split = (forecast(model, found, free, 16 * 512).first_token_s for found in (one, two))
    assert whole / split == pytest.approx(2 * 16 / 17, rel=1e-3)


def test_what_was_measured_wins_over_the_table() -> None:
    model = manifest_of(even(4, GB), embedding_bytes=0, head_bytes=0)
    times = LayerTimes(step_s=0.5, row_s=0.25, token_s=0.125)
    rates = NodeRates(1e9, 1e12, kinds=((layer_kind(model.layers[0]), times),))
    work = ModelWork.of(model, 10)
    assert work.decode_s(rates, 2) == [1.0] * 4
    assert work.chunk_s(rates, 8) == [1.5] * 4


def test_a_mixture_reads_the_experts_that_its_rows_are_sent_to() -> None:
    config = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 100}
    experts = 64 * 3 * 8 * 100 * 2
    sparse, dense = LayerBytes(experts + 1000, LayerKv(0)), LayerBytes(5000, LayerKv(0))
    model = replace(manifest_of([dense, sparse]), config=config)
    work = ModelWork.of(model, 10)
    rates = NodeRates(1.0, 1e18)
    assert work.decode_s(rates, 1) == [5000, pytest.approx(1000 + experts * 4 / 64)]
    assert work.decode_s(rates, 1000)[1] == pytest.approx(1000 + experts)


@pytest.mark.parametrize("name", ["Apple M4 Max", "m4-max", "M4Max", "m4_max"])
def test_a_chip_is_known_by_its_name_however_written(name: str) -> None:
    chip = find_chip(name)
    assert chip is not None and chip.bandwidth == 410e9


def test_the_larger_chip_of_one_name_is_told_by_its_memory_and_an_unknown_one_is_a_guess() -> None:
    large = find_chip("Apple M4 Max", 128 * 2**30)
    assert large is not None and large.bandwidth == 546e9
    assert rates_by_chip("Apple M4 Max", 36 * 2**30) == rates_by_chip("m4 max")
    for name in ("Apple M99", "Intel(R) Xeon(R)", "", "m4 giga", "\u0bec"):
        assert rates_by_chip(name).source == "guess"
        assert rates_by_chip(name).bandwidth == rates_by_chip("m1").bandwidth


def test_a_node_is_read_with_speed_and_role() -> None:
    assert parse_candidate("a=64GB").budget == NodeBudget("a", 64 * GB)
    assert parse_candidate("a=64GB").rates.source == "guess"
    for text in ("a=64GB@400GBps", "a = 64GB @ 400 GB/s", "a=64GB@0.4TBps", "a=64GB@400000MB/s"):
        assert parse_candidate(text) == Candidate(NodeBudget("a", 64 * GB), rates_by_bandwidth(400e9))
    read = parse_candidate("a=64GB@m3-ultra,headless")
    assert read == Candidate(NodeBudget("a", int(57.6 * GB)), rates_by_chip("m3 ultra"))
    assert parse_candidate("a=100GB,workstation").budget.bytes == 65 * GB
    assert budget_of(100 * GB, "headless") == 90 * GB
    assert budget_of(100 * GB, "headless", ceiling_bytes=75 * GB) == 75 * GB


@pytest.mark.parametrize(
    "text",
    [
        *("a=64GB@", "a=64GB@400", "a=64GB@400GB", "a=64GB@400Gbps", "a=64GB@fast", "a=64GB@0GBps"),
        *("a=64GB@1Bps", "a=64GB,", "a=64GB,laptop", "a@400GBps", "a=64GB,headless,headless", "=1GB@m4"),
        "a=64GB@" + "9" * 5000 + "GBps",
    ],
)
def test_a_node_that_cannot_be_read_is_a_bad_setting(text: str) -> None:
    with pytest.raises(BadSetting, match="node"):
        parse_candidate(text)


def test_links_have_two_ends_and_no_direction() -> None:
    fast = LINKS["thunderbolt"]
    links = Links.of([("a", "b", fast)])
    assert links.between("b", "a") == fast
    assert links.between("a", "c") == LINKS["ethernet"]
