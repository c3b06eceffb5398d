"""What machines give to one model now, how fast they are, and what a plan of it is for: plain values. Pure.

A server plans with one and shows it at /omlx/v1/offer; without a server `omlx cluster plan` makes its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omlx.cache.budget import parse_size
from omlx.cluster.candidate import Candidate
from omlx.cluster.fleet import Fleet, Machine
from omlx.cluster.planner import NodeBudget
from omlx.cluster.rates import LINKS, LinkRate, Links, NodeRates
from omlx.cluster.site import LEAST_CONTEXT_TOKENS
from omlx.settings import Settings

# It needs numpy, and whoever sends or reads an offer does without.
if TYPE_CHECKING:
    from omlx.cluster.measure import Measures


SILENT = "it does not answer"


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings that a plan depends on."""

    objective: Literal["single", "throughput"] = "single"
    places: int = 8
    """Requests that run at once."""
    step_tokens: int = 512
    context_tokens: int | None = None
    """The longest sequence, where that is shorter than the model's own."""
    kv_bits: int | None = None
    hot: str = "0"
    """RAM for what is kept, of what a machine gives: as in the settings."""

    @classmethod
    def of(cls, settings: Settings) -> "Terms":
        return cls(
            settings.objective,
            settings.max_concurrent_requests,
            settings.step_tokens,
            settings.context_tokens,
            settings.kv_bits,
            settings.hot_cache_max_size if settings.cache else "0",
        )

    def least_tokens(self, own: int | None) -> int:
        """A sequence of so many must fit; `own`: the model's context, None where it names none."""
        limits = (own, self.context_tokens, LEAST_CONTEXT_TOKENS)
        return min(limit for limit in limits if limit is not None)

    def hot_bytes(self, given_bytes: int, models: int) -> int:
        """One model's part of the hot tier of a machine that gives so much, where so many can be loaded."""
        return parse_size(self.hot, given_bytes, "hot_cache_max_size") // max(1, models)


@dataclass(frozen=True, slots=True)
class Offered:
    """One machine, whether the model can have something of it or not."""

    machine: Machine
    rates: NodeRates
    """As measured, or as the table says of its chip and the measured ones suggest."""
    taken_bytes: int = 0
    """By other models."""
    free_bytes: int | None = None
    """Of its memory, with what the model itself holds; None: what it gives is there."""
    why_not: str | None = None
    """Why it gets no layers at the moment, in a clause; None: it may."""
    imagined: bool = False
    """It is not there; what it gives is the model's alone."""


@dataclass(frozen=True, slots=True)
class Offer:
    """All that a plan of one model is made of, besides the model."""

    machines: tuple[Offered, ...]
    """The server's own first."""
    pairs: tuple[tuple[str, str, LinkRate], ...]
    """Links that were measured, by the machines' names."""
    terms: Terms
    models: int = 1
    """That may be loaded beside each other."""
    folder: str | None = None
    """Of the model, where the server has it loaded."""

    def hot_bytes(self) -> dict[str, int]:
        """By node id: what is set aside for what is kept."""
        return {one.machine.node_id: self._hot(one) for one in self.machines}

    def candidates(self, *, with_hot: bool = True) -> list[Candidate]:
        """Those that may get layers, with what others leave of them."""
        return [
            Candidate(NodeBudget(one.machine.name, bytes), one.rates)
            for one in self.machines
            if one.why_not is None and (bytes := self._left(one, with_hot=with_hot)) > 0
        ]

    def idle(self, *, with_hot: bool = True) -> list[tuple[str, str]]:
        """(name, why) of those that are no candidates."""
        full = "other models have all that it gives"
        return [
            (one.machine.name, one.why_not or full)
            for one in self.machines
            if one.why_not is not None or self._left(one, with_hot=with_hot) <= 0
        ]

    def links(self, default: LinkRate = LINKS["ethernet"]) -> Links:
        return Links.of(self.pairs, default)

    def _left(self, one: Offered, *, with_hot: bool) -> int:
        left = one.machine.budget_bytes - one.taken_bytes - (self._hot(one) if with_hot else 0)
        # With nothing free it stays a candidate, too small for a layer: the plan says so in bytes.
        return left if one.free_bytes is None else min(left, max(1, one.free_bytes))

    def _hot(self, one: Offered) -> int:
        return 0 if one.imagined else self.terms.hot_bytes(one.machine.budget_bytes, self.models)


def offer_of(  # noqa: PLR0913 (what there is, what is known of it, who else has some of it)
    fleet: Fleet,
    terms: Terms,
    measures: "Measures | None" = None,
    *,
    folder: Path | None = None,
    models: int = 1,
    taken: Mapping[str, int] | None = None,
    free_bytes: Mapping[str, int] | None = None,
    idle: Mapping[str, str] | None = None,
) -> Offer:
    """`measures`: None where nothing was measured; `folder`: the model's, by which it was. By node id `taken`
    by other models, `free_bytes` where that is known, and `idle`: why it gets no layers."""
    taken, free_bytes, idle = taken or {}, free_bytes or {}, idle or {}
    nominal = [Candidate(NodeBudget(one.name, one.budget_bytes), one.rates) for one in fleet.machines]
    seen = nominal if measures is None else measures.candidates(nominal, folder)
    machines = tuple(
        Offered(
            one,
            node.rates,
            taken.get(one.node_id, 0),
            free_bytes.get(one.node_id),
            idle.get(one.node_id),
        )
        for one, node in zip(fleet.machines, seen, strict=True)
    )
    links = fleet.links() if measures is None else measures.links(fleet.links())
    pairs = [pair for pair in sorted(links.known, key=sorted) if len(pair) == 2]
    known = tuple((min(pair), max(pair), links.known[pair]) for pair in pairs)
    return Offer(machines, known, terms, models)
