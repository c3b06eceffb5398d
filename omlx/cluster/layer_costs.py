"""What layers cost in seconds: bytes read and arithmetic done, by the rates of a node. Pure.

A roofline for each layer: a step takes as long as reading its bytes or as its arithmetic, whichever is
longer. Every step reads all weights once, however many rows it has (in a mixture of experts only those that
some row is sent to), and each row's cache. Attention's own arithmetic is not counted: beyond some ten
thousand tokens a prompt takes longer than this says. Source: reference/peers.md section 10.4.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omlx.cluster.rates import LayerTimes, NodeRates, layer_kind
from omlx.node.manifest import ModelManifest

SCALE_BITS = 32
"""A quantised group has a scale and a bias of 16 bits each."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one layer, or the head, asks of whoever runs it."""

    kind: str
    shared: int
    """Bytes that every step reads."""
    experts: int
    """Bytes of all its experts; a step reads those that its rows are sent to."""
    kv: int
    """Bytes of one sequence's cache at the planned context."""
    flop: float
    """Operations for one token."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The layers, the head, and what goes from stage to stage."""

    kinds: tuple[LayerWork, ...]
    """The different layers: models have few kinds."""
    which: tuple[int, ...]
    """For each layer in order, its index in `kinds`."""
    head: LayerWork
    active: float
    """The share of experts that one token is sent to; 1 where there are none."""
    row_bytes: int
    """One token's hidden state."""

    @classmethod
    def of(cls, manifest: ModelManifest, context_tokens: int) -> "ModelWork":
        """Experts are counted by the sizes in config.json: the manifest knows only the sums of layers."""
        experts, active = _experts(manifest)
        item = _weight_bytes(manifest)

        def work(kind: str, weights: int, kv: int) -> LayerWork:
            # In such a model layers without experts (DeepSeek's first ones) weigh a fraction of the others.
            own = min(experts, weights) if experts <= 1.25 * weights else 0
            used = weights - own + own * active
            return LayerWork(kind, weights - own, own, kv, 2 * used / item)

        layers = tuple(
            work(layer_kind(layer), layer.weights, layer.kv.bytes_for(context_tokens))
            for layer in manifest.layers
        )
        size = manifest.head_bytes + manifest.other_bytes
        size += manifest.embedding_bytes if manifest.tied else 0
        head = LayerWork("head", size, 0, 0, 2 * size / item)
        kinds = tuple(dict.fromkeys(layers))
        places = {work: index for index, work in enumerate(kinds)}
        return cls(
            kinds,
            tuple(places[work] for work in layers),
            head,
            active,
            manifest.hidden_size * manifest.item_bytes,
        )

    @property
    def layers(self) -> tuple[LayerWork, ...]:
        return tuple(self.kinds[index] for index in self.which)

    def decode_s(self, rates: NodeRates, rows: int) -> list[float]:
        """Seconds of each layer in a step that decodes one token of each of `rows` sequences."""
        each = self.kinds_decode_s(rates, rows)
        return [each[index] for index in self.which]

    def kinds_decode_s(self, rates: NodeRates, rows: int) -> list[float]:
        """The same for each of `kinds`."""
        return [self._decode(rates, work, rates.times(work.kind), rows) for work in self.kinds]

    def head_s(self, rates: NodeRates, rows: int) -> float:
        return self._decode(rates, self.head, rates.head, rows)

    def chunk_s(self, rates: NodeRates, tokens: int) -> list[float]:
        """Seconds of each layer for `tokens` tokens of one prompt, computed together."""
        each = [self._chunk(rates, work, rates.times(work.kind), tokens) for work in self.kinds]
        return [each[index] for index in self.which]

    def _decode(self, rates: NodeRates, work: LayerWork, times: LayerTimes | None, rows: int) -> float:
        if times is not None:
            return times.step_s + rows * times.row_s
        return max(
            (self._read(work, rows) + rows * work.kv) / rates.bandwidth, rows * work.flop / rates.compute
        )

    def _chunk(self, rates: NodeRates, work: LayerWork, times: LayerTimes | None, tokens: int) -> float:
        if times is not None:
            return times.step_s + tokens * times.token_s
        return max((self._read(work, tokens) + work.kv) / rates.bandwidth, tokens * work.flop / rates.compute)

    def _read(self, work: LayerWork, rows: int) -> float:
        """Rows choose their experts independently: the expected share that at least one of them chose."""
        return work.shared + work.experts * (1 - (1 - self.active) ** rows)


def _experts(manifest: ModelManifest) -> tuple[int, float]:
    """Bytes of all experts of one layer, and the share of them that a token uses; (0, 1.0) without any."""
    config = manifest.config.get("text_config") or manifest.config
    if not isinstance(config, Mapping):
        return 0, 1.0
    total = _count(config, "num_experts", "num_local_experts", "n_routed_experts")
    used = _count(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token")
    width = _count(config, "moe_intermediate_size", "intermediate_size")
    if not total or not used or not width or used >= total:
        return 0, 1.0
    return int(total * 3 * manifest.hidden_size * width * _weight_bytes(manifest)), used / total


def _count(config: Mapping[str, object], *names: str) -> int:
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _weight_bytes(manifest: ModelManifest) -> float:
    """Bytes of one weight, with its part of scales and biases."""
    packing = manifest.quantization
    if packing is None or packing.bits is None:
        return manifest.item_bytes
    return (packing.bits + SCALE_BITS / (packing.group_size or 64)) / 8
