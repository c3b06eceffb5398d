"""Which layers run where: contiguous spans over nodes of unequal memory, in exact bytes. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from omlx.errors import BadSetting, DoesNotFit, Refused
from omlx.node.manifest import LayerBytes, ModelManifest

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"(?P<number>\d{1,18}(\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)

# MLX grows a cache by this many tokens at a time.
GROWTH_TOKENS = 256
# The last stage holds logits, log-probabilities and their sorted copy, each in float32.
LOGIT_BYTES = 3 * 4
# Caps on the utilisation that are tried one after the other, as multiples of what cannot be beaten.
FIRST_SLACK = 0.05


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
    step_tokens: int

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
    load = _Load.of(manifest, context_tokens, sequences, step_tokens)
    cuts = _best_cuts(load, nodes)
    stages = tuple(
        _stage(load, node, Span(start, end), last=index == len(nodes) - 1)
        for index, (node, start, end) in enumerate(zip(nodes, cuts, cuts[1:], strict=False))
    )
    plan = ShardPlan(stages, context_tokens, sequences, step_tokens)
    short = sum(max(0, -stage.headroom) for stage in stages)
    if short:
        raise DoesNotFit(_arithmetic(manifest, plan, short), short_bytes=short)
    return plan


def parse_node(text: str) -> NodeBudget:
    """`name=64GB`: GB is 10^9, GiB 2^30; also B, kB, MB, TB, KiB, MiB, TiB and plain bytes.

    Raises BadSetting when there is no name, no size, or a size that is not one.
    """
    name, equals, size = text.partition("=")
    name = name.strip()
    match = SIZE.fullmatch(size.strip())
    if not equals or not name or match is None or match["unit"].upper() not in UNITS:
        raise BadSetting(f"node {text!r} must read name=SIZE, such as studio=64GB (or MB, TB, GiB, bytes)")
    amount = int(Decimal(match["number"]) * UNITS[match["unit"].upper()])
    if amount < 1:
        raise BadSetting(f"node {text!r} gives no memory; its size must be above 0")
    return NodeBudget(name, amount)


@dataclass(frozen=True, slots=True)
class _Load:
    """Bytes of layers, summed from the front: those of [start, end) are sums[end] - sums[start]."""

    weights: tuple[int, ...]
    kv: tuple[int, ...]
    overhead: tuple[int, ...]
    """Scratch that adds up over layers: the window's overrun and the room ahead."""
    layer_kv: tuple[int, ...]
    """KV of each layer alone, for all sequences."""
    step: int
    """Scratch of any stage, whatever its span."""
    logits: int
    embedding: int
    tail: int
    """Weights of the last stage besides its layers, when it is not the only one."""
    tail_alone: int

    @classmethod
    def of(cls, manifest: ModelManifest, context_tokens: int, sequences: int, step_tokens: int) -> "_Load":
        layer_kv = tuple(sequences * layer.kv.bytes_for(context_tokens) for layer in manifest.layers)
        overhead = [_overhead(layer, context_tokens, sequences, step_tokens) for layer in manifest.layers]
        rows = min(step_tokens, context_tokens * sequences)
        return cls(
            weights=_sums([layer.weights for layer in manifest.layers]),
            kv=_sums(layer_kv),
            overhead=_sums(overhead),
            layer_kv=layer_kv,
            step=rows * (manifest.row_bytes + context_tokens * manifest.score_bytes),
            logits=sequences * manifest.vocab_size * LOGIT_BYTES,
            embedding=manifest.embedding_bytes,
            tail=manifest.tail_bytes(alone=False),
            tail_alone=manifest.tail_bytes(alone=True),
        )

    def ends(self, *, first: bool, last: bool) -> int:
        """Weights that a stage holds besides its layers."""
        tail = (self.tail_alone if first else self.tail) if last else 0
        return tail + (self.embedding if first else 0)


def _overhead(layer: LayerBytes, context_tokens: int, sequences: int, step_tokens: int) -> int:
    if layer.kv.window_tokens is None:
        return sequences * layer.kv.per_token * (-context_tokens % GROWTH_TOKENS)
    beyond = context_tokens - layer.kv.window_tokens
    return layer.kv.per_token * max(0, min(step_tokens - 1, beyond))


def _sums(sizes: Sequence[int]) -> tuple[int, ...]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return tuple(sums)


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


def _best_cuts(load: _Load, nodes: Sequence[NodeBudget]) -> list[int]:
    """Where the spans begin, and the end of the last: 0 = cuts[0] < cuts[1] < ... = layers.

    Dynamic programming over (stages, layers placed). Most of its table is hopeless, so it is filled
    only up to a cap on the utilisation, close above a bound that no plan can beat; without a plan below
    the cap, the cap is raised. What is found below a cap is the best there is.
    """
    total = load.weights[-1] + load.kv[-1] + load.overhead[-1]
    total += load.ends(first=True, last=len(nodes) == 1) + (load.tail if len(nodes) > 1 else 0)
    total += load.logits + load.step * len(nodes)
    bound = total / sum(node.bytes for node in nodes)
    slack = FIRST_SLACK
    while (cuts := _cuts_below(load, nodes, bound * (1 + slack))) is None:
        slack *= 4
    return cuts


def _cuts_below(load: _Load, nodes: Sequence[NodeBudget], cap: float) -> list[int] | None:
    layers, last = len(load.layer_kv), len(nodes) - 1
    best = {0: 0.0}
    starts: list[dict[int, int]] = []
    for index, node in enumerate(nodes):
        fixed = load.step + load.ends(first=index == 0, last=index == last)
        fixed += load.logits if index == last else 0
        room = layers - (last - index)
        ends = range(layers, layers + 1) if index == last else range(index + 1, room + 1)
        best, came_from = _place(load, node.bytes, fixed, ends, best, cap)
        if not best:
            return None
        starts.append(came_from)
    cuts = [layers]
    for came_from in reversed(starts):
        cuts.append(came_from[cuts[-1]])
    return cuts[::-1]


def _place(
    load: _Load, budget: int, fixed: int, ends: range, before: dict[int, float], cap: float
) -> tuple[dict[int, float], dict[int, int]]:
    """One more stage: {layers placed: least largest utilisation} and {layers placed: its start}."""
    additive = [w + k + o for w, k, o in zip(load.weights, load.kv, load.overhead, strict=True)]
    best: dict[int, float] = {}
    came_from: dict[int, int] = {}
    for start, so_far in before.items():
        base, widest = additive[start] - fixed, 0
        for end in range(start + 1, ends.stop):
            widest = max(widest, load.layer_kv[end - 1])
            used = (additive[end] - base + widest) / budget
            if used > cap:
                break
            if end < ends.start:
                continue
            worst = max(used, so_far)
            if end not in best or worst < best[end]:
                best[end], came_from[end] = worst, start
    return best, came_from


def _stage(load: _Load, node: NodeBudget, span: Span, *, last: bool) -> StagePlan:
    start, end = span.start, span.end
    scratch = load.step + load.overhead[end] - load.overhead[start] + max(load.layer_kv[start:end])
    return StagePlan(
        node=node,
        span=span,
        weights=load.weights[end] - load.weights[start] + load.ends(first=start == 0, last=last),
        kv=load.kv[end] - load.kv[start],
        scratch=scratch + (load.logits if last else 0),
    )


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
