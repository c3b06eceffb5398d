"""The search for nodes, order and spans against brute force, its own bound, and the clock."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.cluster.order_search import bound, in_order, search_orders
from omlx.cluster.placement import Objective, solve
from omlx.cluster.span_search import NEVER, SLOWEST, SUM, Found, Measure, Problem, search
from tests.cluster.planning import large


@st.composite
def problems(draw: st.DrawFn, most_nodes: int = 5, most_layers: int = 8) -> Problem:
    """Up to five nodes in classes, unequal layers, memories, speeds of each layer, ends, and links."""
    layers = draw(st.integers(1, most_layers))
    counts = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=most_nodes).filter(lambda c: sum(c) <= most_nodes)
    )
    classes = len(counts)
    weights = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    spans = np.full((classes, layers + 1, layers + 1), NEVER, np.int64)
    for index in range(classes):
        costs = draw(st.lists(st.integers(1, 30), min_size=layers, max_size=layers))
        room, head, ends = draw(st.integers(5, 60)), draw(st.integers(0, 20)), draw(st.integers(0, 9))
        for a, b in itertools.combinations(range(layers + 1), 2):
            if sum(weights[a:b]) + ends * ((a == 0) + (b == layers)) <= room:
                spans[index, a, b] = sum(costs[a:b]) + (head if b == layers else 0)
    uneven = draw(st.booleans())

    def links() -> np.ndarray:
        if not uneven:
            return np.full((classes, classes), draw(st.integers(1, 20)), np.int64)
        size = classes * classes
        values = draw(st.lists(st.integers(1, 40), min_size=size, max_size=size))
        return np.array(values, np.int64).reshape(classes, classes)

    return Problem(tuple(counts), spans, links(), links(), links())


def every_plan(problem: Problem) -> list[Found]:
    """All plans of all subsets in all orders that memory allows."""
    nodes = [index for index, count in enumerate(problem.counts) for _ in range(count)]
    plans = []
    for size in range(1, min(len(nodes), problem.layers) + 1):
        for order in sorted(set(itertools.permutations(nodes, size))):
            for inner in itertools.combinations(range(1, problem.layers), size - 1):
                edges = itertools.pairwise((0, *inner, problem.layers))
                stages = tuple((node, a, b) for node, (a, b) in zip(order, edges, strict=True))
                if all(problem.spans[stage] < NEVER for stage in stages):
                    plans.append(Found(stages))
    return plans


@pytest.mark.parametrize("measure", [SUM, SLOWEST], ids=["single", "throughput"])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_no_plan_of_all_there_are_is_better(measure: Measure, problem: Problem) -> None:
    plans = every_plan(problem)
    found = search(problem, measure)
    if found is None:
        assert not plans
        return
    assert found in plans
    least = min(measure.of(problem, plan) for plan in plans)
    assert measure.of(problem, found) == least
    assert len(found.stages) == min(len(p.stages) for p in plans if measure.of(problem, p) == least)


@settings(max_examples=60, deadline=None)
@given(problem=problems(4, 7))
def test_among_equals_the_other_measure_decides(problem: Problem) -> None:
    plans = every_plan(problem)
    fast = solve(problem, "throughput")
    assert (fast is None) == (not plans)
    if fast is None:
        return
    assert fast.value == fast.bound
    key = (fast.value, SUM.of(problem, fast.found))
    assert key == min((SLOWEST.of(problem, plan), SUM.of(problem, plan)) for plan in plans)
    one = solve(problem, "single")
    assert one is not None and SUM.of(problem, one.found) == one.value
    assert one.value == min(SUM.of(problem, plan) for plan in plans)


@pytest.mark.parametrize("measure", [SUM, SLOWEST], ids=["single", "throughput"])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_nothing_beats_the_bound_and_orders_give_real_plans(measure: Measure, problem: Problem) -> None:
    plans = every_plan(problem)
    least = bound(problem, measure)
    tried = search_orders(problem, measure)
    if plans:
        assert least is not None
        assert least <= min(measure.of(problem, plan) for plan in plans)
    if tried is not None:
        assert tried in plans


@settings(max_examples=60, deadline=None)
@given(problem=problems(4, 7), data=st.data())
def test_in_a_given_order_no_spans_are_better(problem: Problem, data: st.DataObject) -> None:
    nodes = [index for index, count in enumerate(problem.counts) for _ in range(count)]
    order = data.draw(st.permutations(nodes))
    plans = [p for p in every_plan(problem) if [stage[0] for stage in p.stages] == order]
    # The way back is the same for all plans of one order.
    for measure in (SLOWEST, SUM):
        found = in_order(problem, order, measure, all_of_them=True)
        assert (found is None) == (not plans)
        if found is not None:
            assert measure.of(problem, found) == min(measure.of(problem, plan) for plan in plans)


def test_the_same_question_has_the_same_answer() -> None:
    spans = np.full((2, 5, 5), NEVER, np.int64)
    for a, b in itertools.combinations(range(5), 2):
        spans[:, a, b] = 10 * (b - a)
    ones = np.ones((2, 2), np.int64)
    problem = Problem((2, 2), spans, ones, ones, ones)
    first = solve(problem, "throughput")
    assert all(solve(problem, "throughput") == first for _ in range(3))
    assert first is not None and {b - a for _, a, b in first.found.stages} == {1}
    one = solve(problem, "single")
    assert one is not None and one.found == Found(((0, 0, 4),))


@pytest.mark.parametrize("objective", ["throughput", "single"])
@pytest.mark.parametrize("shape", ["alike", "two classes", "seven classes", "all different"])
def test_sixty_four_nodes_are_planned_in_a_blink_and_near_the_bound(shape: str, objective: Objective) -> None:
    problem = large(shape)
    measure = SLOWEST if objective == "throughput" else SUM
    took = []
    for _ in range(5):
        # CPU time of this thread: what else the machine does is no fault of the planner.
        began = time.thread_time()
        solution = solve(problem, objective)
        took.append(time.thread_time() - began)
    assert solution is not None
    assert solution.value == measure.of(problem, solution.found)
    # With two layers a node, the bound's fractions of a layer make up the rest.
    assert solution.value <= 1.15 * solution.bound
    assert min(took) < 0.05
