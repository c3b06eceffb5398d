"""What a model's kept prefixes do and take, in numbers for whoever watches."""

from dataclasses import dataclass

from omlx.node.prefixes import Prefixes


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Counters since the model was loaded, and what is held now; tuples have one number a stage."""

    lookups: int
    hit_tokens: int
    missed_tokens: int
    restored_blocks: int
    fetched_blocks: int
    spilled_blocks: int
    evicted_blocks: int
    dropped_writes: int
    given_up_fetches: int
    hot_blocks: tuple[int, ...]
    hot_bytes: tuple[int, ...]
    cold_blocks: tuple[int, ...]
    cold_bytes: tuple[int, ...]


def cache_figures(prefixes: Prefixes) -> CacheFigures:
    """Of this moment. Where nothing is kept, every number is 0."""
    counters, counts = prefixes.counters, prefixes.index.counts()
    return CacheFigures(
        lookups=counters.lookups,
        hit_tokens=counters.hit_tokens,
        missed_tokens=counters.missed_tokens,
        restored_blocks=counters.restored_blocks,
        fetched_blocks=counters.fetched_blocks,
        spilled_blocks=counters.spilled_blocks,
        evicted_blocks=counters.evicted_blocks,
        dropped_writes=counters.dropped_writes,
        given_up_fetches=counters.given_up_fetches,
        hot_blocks=counts.hot_blocks,
        hot_bytes=counts.hot_bytes,
        cold_blocks=counts.cold_blocks,
        cold_bytes=counts.cold_bytes,
    )
