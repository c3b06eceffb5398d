"""What a placement will do, in tokens per second and seconds. Pure.

Formulas, with t_i(r) the seconds of stage i for a step of r rows, h_i(r) those of the hop behind it, b_i(r)
the part of it that keeps the link busy (source: reference/peers.md section 10, reference/mlx.md section 5):

- one stream: 1 / Sum(t_i(1) + h_i(1)), the way of the drawn token back to the first stage included;
- S streams in M groups of r = S/M rows: S / max(M * max(t_i(r), b_i(r)), Sum(t_i(r) + h_i(r))): either the
  slowest stage is always busy, or a group waits for its own token. The best M up to one more than stages;
- first token of a prompt in chunks: chunk k leaves stage i at e(i, k) = max(e(i-1, k) + hop, e(i, k-1)) + t,
  a flow through machines in a row; then head and way back. Equal chunks give (m + P - 1) * t for P stages.
"""

from dataclasses import dataclass
from itertools import pairwise

from omlx.cluster.layer_costs import ModelWork
from omlx.cluster.placement import Placement
from omlx.cluster.rates import LinkRate, Links
from omlx.node.manifest import ModelManifest


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions for one placement; seconds and tokens per second."""

    stage_s: tuple[float, ...]
    """Of each stage, for one token of one stream."""
    hop_s: float
    """All hops of one token, the way back included."""
    single: float
    """Tokens/s of one stream that has the cluster to itself."""
    throughput: float
    """Tokens/s of all the planned sequences together."""
    groups: int
    """Groups of sequences under way at once that this takes."""
    first_token_s: float
    """For a prompt of `prompt_tokens`, nothing of which is kept."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Way:
    """One placement's stages and links, ready to be timed; all in seconds."""

    work: ModelWork
    placement: Placement
    hops: tuple[LinkRate, ...]
    back_s: float

    @classmethod
    def of(cls, manifest: ModelManifest, placement: Placement, links: Links) -> "Way":
        names = [node.name for node in placement.used]
        hops = tuple(links.between(one, other) for one, other in pairwise(names))
        back = links.between(names[-1], names[0]).latency_s if hops else 0.0
        return cls(ModelWork.of(manifest, placement.demand.context_tokens), placement, hops, back)

    def decode_s(self, rows: int) -> list[float]:
        stages = zip(self.placement.used, self.placement.plan.spans, strict=True)
        seconds = [sum(self.work.decode_s(node.rates, rows)[span.start : span.end]) for node, span in stages]
        seconds[-1] += self.work.head_s(self.placement.used[-1].rates, rows)
        return seconds

    def chunk_s(self, tokens: int) -> list[float]:
        stages = zip(self.placement.used, self.placement.plan.spans, strict=True)
        return [sum(self.work.chunk_s(node.rates, tokens)[span.start : span.end]) for node, span in stages]

    def hop_s(self, rows: int) -> float:
        return sum(link.seconds(rows * self.work.row_bytes) for link in self.hops) + self.back_s

    def busy_s(self, rows: int) -> list[float]:
        return [rows * self.work.row_bytes / link.bytes_per_s for link in self.hops]


def forecast(manifest: ModelManifest, placement: Placement, links: Links, prompt_tokens: int) -> Forecast:
    """By the same rates that the placement was made with."""
    way = Way.of(manifest, placement, links)
    stage_s, hop_s = way.decode_s(1), way.hop_s(1)
    sequences = placement.demand.sequences
    throughput, groups = _best_groups(way, sequences)
    return Forecast(
        stage_s=tuple(stage_s),
        hop_s=hop_s,
        single=1 / (sum(stage_s) + hop_s),
        throughput=throughput,
        groups=groups,
        first_token_s=_first_token_s(way, prompt_tokens, placement.demand.step_tokens),
        prompt_tokens=prompt_tokens,
    )


def _best_groups(way: Way, sequences: int) -> tuple[float, int]:
    """(tokens/s, groups): of equally good ones the fewest groups."""
    best, chosen = 0.0, 1
    for groups in range(1, min(sequences, len(way.hops) + 2) + 1):
        rows = -(-sequences // groups)
        stages = way.decode_s(rows)
        cycle = max(groups * max(stages + way.busy_s(rows)), sum(stages) + way.hop_s(rows))
        if sequences / cycle > best:
            best, chosen = sequences / cycle, groups
    return best, chosen


def _first_token_s(way: Way, prompt_tokens: int, step_tokens: int) -> float:
    """Until the first token is drawn and known at the first stage."""
    whole, rest = divmod(prompt_tokens, step_tokens)
    ends = [0.0] * len(way.placement.used)
    for tokens, times in ((step_tokens, whole), (rest, 1 if rest else 0)):
        if not times:
            continue
        stages, busy = way.chunk_s(tokens), way.busy_s(tokens)
        for _ in range(times):
            arrived = 0.0
            for index, seconds in enumerate(stages):
                ends[index] = max(arrived, ends[index]) + seconds
                if index < len(busy):
                    arrived = ends[index] + way.hops[index].latency_s + busy[index]
    return ends[-1] + way.work.head_s(way.placement.used[-1].rates, 1) + way.back_s


def milliseconds(seconds: float) -> str:
    """For people: `12.3 ms`, `1.20 s`, `45 us`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
