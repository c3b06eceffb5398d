"""What runs where at this moment, as plain values: for the API to send, and for whoever draws it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

StageState: TypeAlias = Literal["ready", "loading", "lost"]
NodeState: TypeAlias = Literal["up", "away", "joining", "draining"]
"""away: a member that does not answer; draining: it gets no new stages, and those it has move away."""


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage of a loaded model."""

    node: str
    """The name of the machine that it runs on."""
    node_id: str | None
    """None: that machine is in no cluster."""
    start: int
    end: int
    """Its span, half-open."""
    weight_bytes: int
    state: StageState
    rss_bytes: int | None
    """Of its process; None: not known."""
    busy: float | None
    """The share of time that its device computed lately, 0 to 1; None: not known."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model that is served, loaded or not."""

    id: str
    state: str
    """As `omlx.node.health.ModelState`."""
    epoch: int
    recoveries: int
    running: int
    """Requests that have a place."""
    waiting: int
    layers: int
    stages: tuple[StageView, ...]
    """In the order of their spans; none: it is not loaded."""
    why: str | None
    """A sentence where something keeps it from answering."""

    @property
    def lost(self) -> tuple[StageView, ...]:
        return tuple(stage for stage in self.stages if stage.state == "lost")


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine of the cluster, this one among them."""

    name: str
    node_id: str | None
    here: bool
    """The server runs on it."""
    state: NodeState
    why: str | None
    """A sentence where it is not simply up."""
    memory_bytes: int
    budget_bytes: int
    """What models may take of it."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All of a server's nodes and models."""

    cluster_id: str | None
    """None: one machine on its own."""
    nodes: tuple[NodeView, ...]
    models: tuple[ModelView, ...]

    def node(self, node_id: str) -> NodeView | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def held_bytes(self, node: NodeView) -> int:
        """Weights of all stages that run on it."""
        stages = (stage for model in self.models for stage in model.stages)
        return sum(
            stage.weight_bytes for stage in stages if (stage.node_id, stage.node) == (node.node_id, node.name)
        )
