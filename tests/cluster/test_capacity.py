"""Never more tokens than the memory that the plan leaves can hold."""

from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.cluster.capacity import capacity_tokens
from omlx.cluster.planner import NodeBudget, plan_shards
from omlx.node.manifest import read_manifest
from tests.models.tiny import FAMILIES

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_admitted_fits_on_every_stage(name: str, stages: int, tiny: Tiny) -> None:
    manifest = read_manifest(tiny(name))
    nodes = [NodeBudget(f"n{i}", 200_000_000) for i in range(stages)]
    plan = plan_shards(manifest, nodes, context_tokens=512, sequences=1, step_tokens=64)
    places = 4
    capacity = capacity_tokens(manifest, plan, places)
    assert capacity > 512
    share = min(capacity // places, 10**6)
    for stage in plan.stages:
        kv = places * manifest.kv_bytes(share, stage.span.start, stage.span.end)
        one = manifest.kv_bytes(min(capacity, 10**6), stage.span.start, stage.span.end)
        assert stage.weights + stage.scratch + max(kv, one) <= stage.node.bytes


def test_twice_the_memory_holds_about_twice_the_tokens(tiny: Tiny) -> None:
    manifest = read_manifest(tiny("tiny-llama"))
    found = []
    for size in (100_000_000, 200_000_000):
        plan = plan_shards(manifest, [NodeBudget("n", size)], context_tokens=512, sequences=1)
        found.append(capacity_tokens(manifest, plan, 8))
    assert found[1] - found[0] == pytest.approx(100_000_000 / (4 * 2 * 2 * 16 * 4), rel=0.01)
