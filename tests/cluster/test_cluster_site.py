"""Where a model goes on after a loss: those that are left keep what they hold."""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from omlx.cluster import cluster_site
from omlx.cluster.cluster_site import ClusterSite
from omlx.cluster.members import Joined
from omlx.cluster.site import Need
from omlx.errors import NodesAway
from omlx.ids import ModelId
from omlx.node.layout import Layout, Part
from tests.cluster.test_control import levers
from tests.cluster.test_offer import MINI, OTHER
from tests.cluster.test_planner import even, manifest_of

LAYERS = 30
MANIFEST = manifest_of(even(LAYERS, 330 * 10**6))
HERE = "head"
Spans = dict[str, tuple[int, int | None]]


class Site(ClusterSite):
    """Every node has all weights."""

    async def furnish(self, need: Need, layout: Layout) -> Layout:
        return layout


def after_the_loss_of(
    lost: Sequence[Joined], rest: Sequence[Joined], spans: Spans, patch: pytest.MonkeyPatch
) -> Spans:
    async def answers(members: object, doubted: Collection[str] = ()) -> frozenset[str]:
        return frozenset(one.id for one in rest)

    patch.setattr(cluster_site, "who_answers", answers)
    members = (*lost, *rest)
    reconciler = levers(*members, alive=frozenset(one.id for one in members)).reconciler
    assert reconciler is not None
    made = reconciler.site
    site = Site(made.settings, made.here, made.rays, made.available_bytes)
    need = Need(ModelId("big"), Path("big"), MANIFEST, 100, 1, taken={}, held={})
    before = Layout(tuple(Part(*span, 0.5, node) for node, span in spans.items()), 100, (0,) * len(spans))
    layout = asyncio.run(site.again(need, before, frozenset(one.id for one in lost)))
    return {part.node: (part.start, part.end) for part in layout.parts}


@pytest.mark.parametrize("first", [HERE, MINI.id])
def test_after_a_loss_layers_stay_where_they_are_and_only_those_that_are_missing_are_read(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts had 0-11, 12 and 13-29; the last was lost, and the first gave all of its layers away."""
    second = MINI.id if first == HERE else HERE
    before: Spans = {first: (0, 7), second: (7, 8), OTHER.id: (8, LAYERS)}
    after = after_the_loss_of([OTHER], [MINI], before, monkeypatch)
    assert list(after) == [first, second]
    assert after[first][0] == 0 and cast(Any, after[first][1]) >= 6
    assert after[second][1] == LAYERS


def test_a_model_that_the_rest_cannot_hold_waits_and_says_who_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NodesAway, match="mini is away"):
        after_the_loss_of([MINI], [], {HERE: (0, 8), MINI.id: (8, LAYERS)}, monkeypatch)


def test_two_that_are_away_are_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    both: Spans = {MINI.id: (0, 4), OTHER.id: (4, LAYERS)}
    with pytest.raises(NodesAway, match="mini and mini-cccc are away, and"):
        after_the_loss_of([MINI, OTHER], [], both, monkeypatch)
