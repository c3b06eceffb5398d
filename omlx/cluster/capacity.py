"""How many tokens the memory that a plan leaves can hold: what the scheduler may spend. Pure."""

from omlx.cluster.planner import ShardPlan, StagePlan
from omlx.node.manifest import ModelManifest


def capacity_tokens(manifest: ModelManifest, plan: ShardPlan, places: int) -> int:
    """Tokens over all of `places` running sequences whose keys and values fit on every stage.

    Never too many: a sliding layer is counted either as if it kept every token, or as `places` full
    windows, whichever leaves more.
    """
    return min(_stage_tokens(manifest, stage, places) for stage in plan.stages)


def _stage_tokens(manifest: ModelManifest, stage: StagePlan, places: int) -> int:
    layers = [layer.kv for layer in manifest.layers[stage.span.start : stage.span.end]]
    left = stage.node.bytes - stage.weights - stage.scratch - places * sum(kv.fixed for kv in layers)
    windows = places * sum(kv.per_token * kv.window_tokens for kv in layers if kv.window_tokens is not None)
    growing = sum(kv.per_token for kv in layers if kv.window_tokens is None)
    all_tokens = sum(kv.per_token for kv in layers)
    if growing == 0:
        return max(left // max(1, all_tokens), 2**31 if left >= windows else 0)
    return max(0, left // all_tokens, (left - windows) // growing)
