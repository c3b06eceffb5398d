"""The best contiguous split of a model's layers over stages of unequal memory: the search, nothing else.

Numbers in, cut points out; what the numbers mean to a user is the planner's business.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from omlx.node.manifest import LayerBytes, ModelManifest

# MLX grows a cache by this many tokens at a time.
GROWTH_TOKENS = 256
# The last stage holds logits, log-probabilities and their sorted copy, each in float32.
LOGIT_BYTES = 3 * 4


@dataclass(frozen=True, slots=True)
class LayerSums:
    """Bytes of layers, summed from the front: those of [start, end) are sums[end] - sums[start]."""

    weights: tuple[int, ...]
    kv: tuple[int, ...]
    additive: tuple[int, ...]
    """Weights, KV, and the scratch that adds up over layers: the window's overrun and the room ahead."""
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
    def of(
        cls, manifest: ModelManifest, context_tokens: int, sequences: int, step_tokens: int
    ) -> "LayerSums":
        layer_kv = tuple(sequences * layer.kv.bytes_for(context_tokens) for layer in manifest.layers)
        overhead = _sums(
            [_overhead(layer, context_tokens, sequences, step_tokens) for layer in manifest.layers]
        )
        weights = _sums([layer.weights for layer in manifest.layers])
        kv = _sums(layer_kv)
        rows = min(step_tokens, context_tokens * sequences)
        return cls(
            weights=weights,
            kv=kv,
            additive=tuple(map(sum, zip(weights, kv, overhead, strict=True))),
            layer_kv=layer_kv,
            step=rows * (manifest.row_bytes + context_tokens * manifest.score_bytes),
            logits=sequences * manifest.vocab_size * LOGIT_BYTES,
            embedding=manifest.embedding_bytes,
            tail=manifest.tail_bytes(alone=False),
            tail_alone=manifest.tail_bytes(alone=True),
        )

    @property
    def layers(self) -> int:
        return len(self.layer_kv)

    def span(self, start: int, end: int) -> int:
        """Bytes of layers [start, end) on one stage, with the growth of the largest."""
        return self.additive[end] - self.additive[start] + max(self.layer_kv[start:end])

    def fixed(self, *, first: bool, last: bool) -> int:
        """What a stage needs whatever its span."""
        return self.step + self.ends(first=first, last=last) + (self.logits if last else 0)

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


def best_cuts(load: LayerSums, budgets: Sequence[int]) -> list[int]:
    """Where the spans begin, and the end of the last: 0 = cuts[0] < cuts[1] < ... = layers.

    Dynamic programming over (stages, layers placed). A split in proportion to the budgets bounds the
    optimum from above, and entries that cannot beat it, or whose remaining layers cannot, are not filled.
    """
    layers, last = load.layers, len(budgets) - 1
    fixed = [load.fixed(first=index == 0, last=index == last) for index in range(len(budgets))]
    cap = _proportional(load, budgets, fixed)
    room = list(accumulate(budgets))
    ballast = list(accumulate(fixed))
    table = [[0.0] + [inf] * layers]
    for index, budget in enumerate(budgets):
        # One byte of slack: cap is a rounded quotient.
        behind = cap * (room[-1] - room[index]) - (ballast[-1] - ballast[index]) + 1
        ahead = cap * room[index] - ballast[index] + 1
        low = max(index + 1, bisect_left(load.additive, load.additive[-1] - behind))
        high = min(layers - (last - index), bisect_right(load.additive, ahead) - 1)
        ends = range(layers if index == last else low, high + 1)
        table.append(_place(load, budget, fixed[index], ends, table[-1]))
    return _even_cuts(load, budgets, fixed, table)


def even_cuts(work: Sequence[int], tail: int, stages: int) -> list[int]:
    """Where the spans begin, and the end of the last, so that the stage with the most work has the least.

    `work` of each layer, and `tail` on top for the last stage, in any one unit; stages are equally fast.
    Of equally good cuts the one whose first stages have most: the last has the sampling too. Dynamic
    programming over (stages, layers placed), exact.
    """
    sums = _sums(work)
    layers = len(work)
    most = [[0, *[inf] * layers]]
    for stage in range(1, stages + 1):
        extra = tail if stage == stages else 0
        row: list[float] = [inf] * (layers + 1)
        for end in range(stage, layers + 1):
            for start in range(end - 1, stage - 2, -1):
                own = sums[end] - sums[start] + extra
                if own >= row[end]:
                    break  # earlier starts only add layers to this stage
                row[end] = min(row[end], max(own, most[-1][start]))
        most.append(row)
    cuts = [layers]
    for stage in range(stages, 0, -1):
        extra = tail if stage == stages else 0
        end, bound = cuts[-1], most[stages][layers]
        fits = [
            start
            for start in range(stage - 1, end)
            if most[stage - 1][start] <= bound and sums[end] - sums[start] + extra <= bound
        ]
        cuts.append(max(fits))
    return cuts[::-1]


def _even_cuts(
    load: LayerSums, budgets: Sequence[int], fixed: Sequence[int], table: Sequence[Sequence[float]]
) -> list[int]:
    """Of the plans as good as the best, one that loads the other nodes evenly too; cut from the end."""
    most = table[-1][-1]
    cuts = [load.layers]
    for index in range(len(budgets) - 1, -1, -1):
        end, before = cuts[-1], table[index]
        level = _level(load.additive[end], fixed[: index + 1], budgets[: index + 1])
        fair = load.additive[end] + fixed[index] - level * budgets[index]
        chosen, off, widest = end - 1, inf, 0
        for start in range(end - 1, -1, -1):
            widest = max(widest, load.layer_kv[start])
            used = load.additive[end] - load.additive[start] + fixed[index] + widest
            if used / budgets[index] > most:
                break
            if before[start] <= most and abs(load.additive[start] - fair) < off:
                chosen, off = start, abs(load.additive[start] - fair)
        cuts.append(chosen)
    return cuts[::-1]


def _level(size: int, fixed: Sequence[int], budgets: Sequence[int]) -> float:
    """The utilisation of nodes that share `size` bytes like water, on top of what each holds anyway."""
    above = list(zip(fixed, budgets, strict=True))
    while True:
        level = (size + sum(held for held, _ in above)) / sum(budget for _, budget in above)
        wet = [(held, budget) for held, budget in above if held <= level * budget]
        if len(wet) == len(above) or not wet:
            return level
        above = wet


def _proportional(load: LayerSums, budgets: Sequence[int], fixed: Sequence[int]) -> float:
    """The largest utilisation when layers are dealt out by budget: no optimum is above it."""
    room = list(accumulate(budgets))
    cuts = [0]
    for index in range(len(budgets)):
        target = load.additive[-1] * room[index] / room[-1]
        latest = load.layers - (len(budgets) - 1 - index)
        cuts.append(min(latest, max(cuts[-1] + 1, bisect_right(load.additive, target) - 1)))
    cuts[-1] = load.layers
    return max(
        (load.span(start, end) + ballast) / budget
        for budget, ballast, start, end in zip(budgets, fixed, cuts, cuts[1:], strict=False)
    )


def _place(load: LayerSums, budget: int, fixed: int, ends: range, before: Sequence[float]) -> list[float]:
    """One more stage: the least largest utilisation by layers placed, inf where it was not looked for."""
    additive, layer_kv = load.additive, load.layer_kv
    floor = min(before)
    best = [inf] * len(before)
    for end in ends:
        least, widest = inf, 0
        filled = additive[end] + fixed
        for start in range(end - 1, -1, -1):
            if layer_kv[start] > widest:
                widest = layer_kv[start]
            used = (filled - additive[start] + widest) / budget
            # Earlier starts only add layers to this stage.
            if used >= least:
                break
            least = min(least, max(used, before[start]))
            if least <= floor:
                break
        best[end] = least
    return best
