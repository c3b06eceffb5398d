"""Which layers run where: contiguous spans over nodes of unequal memory, in exact bytes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from omlx.cache.budget import bytes_of
from omlx.cluster.partition import LayerSums, best_cuts, even_cuts
from omlx.errors import BadSetting, DoesNotFit, Refused
from omlx.node.manifest import ModelManifest

HEAD_SHARE = 0.25
"""What the head counts for beside layers of as many bytes. Every step of answers reads it, in one go, which
is faster; no prompt does, and prompts skip most of the last layer too."""


@dataclass(frozen=True, slots=True)
class NodeBudget:
    """Memory that a node gives to the model, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [start, end)."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One node's part, in bytes."""

    node: NodeBudget
    span: Span
    weights: int
    kv: int
    scratch: int

    @property
    def used(self) -> int:
        return self.weights + self.kv + self.scratch

    @property
    def headroom(self) -> int:
        """Bytes of the budget that stay free; below zero where it does not fit."""
        return self.node.bytes - self.used

    @property
    def utilisation(self) -> float:
        return self.used / self.node.bytes


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Stages in pipeline order; together their spans are all the layers of the model."""

    stages: tuple[StagePlan, ...]
    context_tokens: int
    sequences: int

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(stage.span for stage in self.stages)

    @property
    def utilisation(self) -> float:
        """The largest over the stages: what the plan makes as small as it can be."""
        return max(stage.utilisation for stage in self.stages)


def plan_shards(
    manifest: ModelManifest,
    nodes: Sequence[NodeBudget],
    *,
    context_tokens: int,
    sequences: int,
    step_tokens: int = 512,
) -> ShardPlan:
    """The layers over `nodes` in the order given, at least one each, by the least largest used/budget.

    Weights and KV (`sequences` of `context_tokens` each) are exact; scratch is an estimate, the sum of
      - step_tokens * (row_bytes + context_tokens * score_bytes): one step in the widest layer;
      - a window's overrun in sliding layers while a chunk of step_tokens is computed, for one sequence;
      - the room of up to 255 tokens that MLX allocates ahead in layers that keep everything;
      - the largest layer's KV once more: old and new stand side by side while it grows;
      - on the last stage, sequences * vocabulary * 12: logits, log-probabilities and their order.

    Raises DoesNotFit with the arithmetic of the best plan when some node would overflow, Refused when
    there are no nodes, more nodes than layers, or a budget or a count below 1.
    """
    _refuse_nonsense(manifest, nodes, context_tokens, sequences, step_tokens)
    load = LayerSums.of(manifest, context_tokens, sequences, step_tokens)
    plan = _cut(load, nodes, best_cuts(load, [node.bytes for node in nodes]), context_tokens, sequences)
    short = sum(max(0, -stage.headroom) for stage in plan.stages)
    if short:
        raise DoesNotFit(_arithmetic(manifest, plan, short), short_bytes=short)
    return plan


def plan_work(
    manifest: ModelManifest,
    nodes: Sequence[NodeBudget],
    *,
    context_tokens: int,
    sequences: int,
    step_tokens: int = 512,
) -> ShardPlan:
    """The layers over equally fast `nodes`, so that the slowest has the least to do; where that does not
    fit into their memory, by memory alone, as `plan_shards`.

    Work is the weights that a step reads: those of the layers, and on the last stage a quarter of norm and
    head (HEAD_SHARE); an embedding is looked up, not read. Raises like `plan_shards`.
    """
    _refuse_nonsense(manifest, nodes, context_tokens, sequences, step_tokens)
    load = LayerSums.of(manifest, context_tokens, sequences, step_tokens)
    head = manifest.head_bytes + manifest.other_bytes + (manifest.embedding_bytes if manifest.tied else 0)
    cuts = even_cuts([layer.weights for layer in manifest.layers], int(head * HEAD_SHARE), len(nodes))
    plan = _cut(load, nodes, cuts, context_tokens, sequences)
    if all(stage.headroom >= 0 for stage in plan.stages):
        return plan
    return plan_shards(
        manifest, nodes, context_tokens=context_tokens, sequences=sequences, step_tokens=step_tokens
    )


def _cut(
    load: LayerSums, nodes: Sequence[NodeBudget], cuts: Sequence[int], context_tokens: int, sequences: int
) -> ShardPlan:
    stages = tuple(
        stage_of(load, node, Span(start, end), last=index == len(nodes) - 1)
        for index, (node, start, end) in enumerate(zip(nodes, cuts, cuts[1:], strict=False))
    )
    return ShardPlan(stages, context_tokens, sequences)


def parse_node(text: str) -> NodeBudget:
    """`name=64GB`, the size as `bytes_of` reads it.

    Raises BadSetting when there is no name, no size, or a size that is not one.
    """
    name, equals, size = text.partition("=")
    name = name.strip()
    amount = bytes_of(size)
    if not equals or not name or amount is None:
        raise BadSetting(f"node {text!r} must read name=SIZE, such as studio=64GB (or MB, TB, GiB, bytes)")
    if amount < 1:
        raise BadSetting(f"node {text!r} gives no memory; its size must be above 0")
    return NodeBudget(name, amount)


def _refuse_nonsense(
    manifest: ModelManifest,
    nodes: Sequence[NodeBudget],
    context_tokens: int,
    sequences: int,
    step_tokens: int,
) -> None:
    if not nodes:
        raise Refused("a plan needs at least one node; give one with --node name=64GB")
    if len(nodes) > manifest.num_layers:
        raise Refused(
            f"{len(nodes)} stages for the {manifest.num_layers} layers of {manifest.folder.name}: "
            "every stage needs one, so use fewer"
        )
    for node in nodes:
        if node.bytes < 1:
            raise Refused(f"node {node.name} gives {node.bytes} bytes; its budget must be above 0")
    for what, count in (("context", context_tokens), ("sequences", sequences), ("step", step_tokens)):
        if count < 1:
            raise Refused(f"a plan for {what} = {count} makes no sense; it must be 1 or more")


def stage_of(load: LayerSums, node: NodeBudget, span: Span, *, last: bool) -> StagePlan:
    """What `span` takes of `node`; `last` where it ends with the model's last layer."""
    weights = load.weights[span.end] - load.weights[span.start] + load.ends(first=span.start == 0, last=last)
    kv = load.kv[span.end] - load.kv[span.start]
    used = load.span(span.start, span.end) + load.fixed(first=span.start == 0, last=last)
    return StagePlan(node=node, span=span, weights=weights, kv=kv, scratch=used - weights - kv)


def _arithmetic(manifest: ModelManifest, plan: ShardPlan, short: int) -> str:
    parts = []
    for stage in plan.stages:
        verdict = f"{gigabytes(-stage.headroom)} short" if stage.headroom < 0 else "fits"
        parts.append(
            f"{stage.node.name} layers {stage.span.start}-{stage.span.end - 1}: "
            f"{gigabytes(stage.weights)} weights + {gigabytes(stage.kv)} KV + "
            f"{gigabytes(stage.scratch)} scratch = {gigabytes(stage.used)} of "
            f"{gigabytes(stage.node.bytes)} ({verdict})"
        )
    return (
        f"{manifest.folder.name} with {plan.sequences} sequences of {plan.context_tokens} tokens does not "
        f"fit, {gigabytes(short)} short: {'; '.join(parts)}; use a shorter context, fewer sequences or "
        "more memory"
    )


def gigabytes(size: int) -> str:
    """Bytes for people: `1.50 GB`, `3.2 MB`, `17 B`; powers of ten."""
    if size >= 10**9:
        return f"{size / 10**9:.2f} GB"
    if size >= 10**6:
        return f"{size / 10**6:.1f} MB"
    return f"{size} B"
