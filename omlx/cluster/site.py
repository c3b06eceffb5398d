"""Where a model may run: what the coordinator asks for, and what it is given. On one machine or on many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omlx.cluster.capacity import capacity_tokens
from omlx.cluster.planner import ShardPlan, Span
from omlx.cluster.shard_map import NodeView
from omlx.ids import ModelId
from omlx.node.client import StageProcess
from omlx.node.layout import Layout, Part
from omlx.node.manifest import ModelManifest

LEAST_CONTEXT_TOKENS = 4096
"""A model is refused where its weights leave less room than one sequence of this (or its own) length."""


@dataclass(frozen=True, slots=True)
class Need:
    """A model that wants to be loaded, or to go on."""

    model: ModelId
    folder: Path
    manifest: ModelManifest
    context_tokens: int
    """Its longest sequence."""
    models: int
    """That may be loaded beside each other, this one included."""
    taken: Mapping[str, int]
    """Bytes that the others have, by node."""
    held: Mapping[str, int]
    """Bytes that it has itself."""

    @property
    def least_tokens(self) -> int:
        """A sequence of so many must fit."""
        return min(self.context_tokens, LEAST_CONTEXT_TOKENS)


def span_of(part: Part, manifest: ModelManifest) -> Span:
    """In numbers, also where a part has all the rest."""
    return Span(part.start, manifest.num_layers if part.end is None else part.end)


class Site(Protocol):
    """One per server."""

    async def place(self, index: int, node: str) -> StageProcess:
        """Start the process of a stage, as `node.client.Placement` says."""

    async def layout(self, need: Need) -> Layout:
        """Where the model is to run. Raises DoesNotFit with the arithmetic, and what else a plan refuses."""

    async def again(self, need: Need, before: Layout, lost: frozenset[str]) -> Layout:
        """Where it goes on after stages on `lost` are gone. Raises NodesAway where that is nowhere."""

    def nodes(self) -> tuple[NodeView, ...]:
        """The machines there are, this one first."""

    def name(self, node: str) -> str:
        """Of the machine with that id, for people."""


def layout_of(
    manifest: ModelManifest,
    plan: ShardPlan,
    *,
    nodes: Sequence[str],
    memory_shares: Sequence[float],
    hot_bytes: Sequence[int],
    places: int,
) -> Layout:
    """A plan in the words of the engine; all sequences are of one number a stage."""
    spans: list[tuple[int, int | None]] = [(span.start, span.end) for span in plan.spans]
    parts = tuple(
        Part(start, end, share, node, bytes=stage.weights + stage.kv)
        for (start, end), share, node, stage in zip(spans, memory_shares, nodes, plan.stages, strict=True)
    )
    return Layout(parts, capacity_tokens(manifest, plan, places), tuple(hot_bytes))
