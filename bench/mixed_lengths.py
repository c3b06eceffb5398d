"""When do rows go into one padded batch, and when into blocks of their own? SmolLM2, on one core.

One decode step of rows that hold so many tokens, three ways: *_padded, all in one of mlx-lm's batch caches;
*_mixed, blocks in one mixed forward; *_apart, a forward for each block. chunk_*: four rows decode while 128
tokens of a prompt are computed, in one mixed forward or in two.
*_cpu_ms: processor time of a step, which on one core is its time where nothing else runs. *_mb: the caches'
bytes, and the most that MLX takes beside them. *_ratio: padded / mixed (chunk: apart / mixed), round by
round; ratio: that of LONGEST. The caches hold random keys and values. Linux: it pins with taskset.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from bench.alternate import Run, alternate, ratio
from bench.engines import model_folder
from bench.record import Spread, tell
from omlx.cluster.local_actor import compute_environment
from omlx.node.loader import load_span
from omlx.node.mixing import Block, Mixed, make_mixable

MODEL = "smollm2-135m-instruct-f32"
LONGEST = "30k_300_300"
CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    LONGEST: ((30_000,), (300, 300)),
    "6k_300_300": ((6_000,), (300, 300)),
    "1k_300_300": ((1_000,), (300, 300)),
    "600_300_300": ((600,), (300, 300)),
    "4_of_300": ((300,),) * 4,
}
"""The tokens that each row holds, block by block."""
ROWS, CHUNK = 4, 128
ROUNDS, STEPS = 5, 3


@dataclass(frozen=True, slots=True)
class Way:
    """One step of a way, lazy or not, and the caches that it needs."""

    step: Callable[[], mx.array]
    blocks: list[Block]

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(cache.nbytes for block in self.blocks for cache in block.caches)


def filled(mixed: Mixed, lengths: tuple[int, ...]) -> Block:
    """Rows that hold so many tokens and decode the next; several lie in a padded batch."""
    args = mixed.cut.model.args
    shape = (1, args.num_key_value_heads, 1, args.hidden_size // args.num_attention_heads)
    rows = []
    for length in lengths:
        rows.append(mixed.cut.make_caches())
        for cache in rows[-1]:
            cache.keys, cache.values = (mx.random.normal((*shape[:2], length, shape[3])) for _ in range(2))
            cache.offset = length
        mx.eval([(cache.keys, cache.values) for cache in rows[-1]])
    if len(rows) == 1:
        return Block(1, 1, rows[0])
    return Block(len(rows), 1, [slot[0].merge(list(slot)) for slot in zip(*rows, strict=True)])


def tokens(count: int) -> mx.array:
    return mx.arange(10, 10 + count)[None]


def ways_of(mixed: Mixed, blocks: tuple[tuple[int, ...], ...]) -> dict[str, Way]:
    """Mixed and apart share their caches."""
    own = [filled(mixed, lengths) for lengths in blocks]
    padded = [filled(mixed, sum(blocks, ()))]
    rows = padded[0].rows

    def apart() -> mx.array:
        return mx.concatenate(
            [mixed(tokens(block.rows), [block], range(block.rows)) for block in own], axis=1
        )

    return {
        "padded": Way(lambda: mixed(tokens(rows), padded, range(rows)), padded),
        "mixed": Way(lambda: mixed(tokens(rows), own, range(rows)), own),
        "apart": Way(apart, own),
    }


def ways_with_a_chunk(mixed: Mixed) -> dict[str, Way]:
    """Every step computes the same chunk again."""
    rows = filled(mixed, (300,) * ROWS)
    prompt = Block(1, CHUNK, filled(mixed, (300,)).caches)

    def again(logits: mx.array) -> mx.array:
        mx.eval(logits)
        for cache in prompt.caches:
            cache.trim(CHUNK)
        return logits

    def together() -> mx.array:
        return again(mixed(tokens(ROWS + CHUNK), [rows, prompt], range(ROWS)))

    def apart() -> mx.array:
        mixed(tokens(CHUNK), [prompt], [])
        mx.eval([cache.state for cache in prompt.caches])
        return again(mixed(tokens(ROWS), [rows], range(ROWS)))

    return {"mixed": Way(together, [rows, prompt]), "apart": Way(apart, [rows, prompt])}


def timed(way: Way, megabytes: list[float]) -> Run:
    """The median milliseconds of STEPS steps, of processor time."""

    async def run() -> float:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        times = []
        for _ in range(STEPS):
            started = time.process_time()
            mx.eval(way.step())
            times.append((time.process_time() - started) * 1e3)
        megabytes.append((way.held + mx.get_peak_memory() - before) / 1e6)
        return statistics.median(times)

    return run


async def measure(name: str, ways: dict[str, Way], base: str) -> dict[str, list[float]]:
    megabytes: dict[str, list[float]] = {side: [] for side in ways}
    found = await alternate({side: timed(way, megabytes[side]) for side, way in ways.items()}, ROUNDS)
    return (
        {f"{name}_{side}_cpu_ms": times for side, times in found.items()}
        | {f"{name}_{side}_mb": counted[1:] for side, counted in megabytes.items()}
        | {f"{name}_ratio": [a / b for a, b in zip(found[base], found["mixed"], strict=True)]}
    )


async def compare() -> None:
    mixed = make_mixable(load_span(model_folder(MODEL), 0, None, lambda done, total: None))
    assert mixed is not None
    found: dict[str, list[float]] = {}
    for name, blocks in CASES.items():
        found |= await measure(name, ways_of(mixed, blocks), "padded")
        mx.clear_cache()
    found |= await measure("chunk", ways_with_a_chunk(mixed), "apart")
    figures = {name: Spread.of(values) for name, values in found.items()}
    padded, together = (found[f"{LONGEST}_{side}_cpu_ms"] for side in ("padded", "mixed"))
    tell("mixed_lengths", MODEL, ratio(padded, together), figures)


def main() -> int:
    """Runs `compare` in the environment of a stage, on one core."""
    core = str(min(os.sched_getaffinity(0)))
    command = ("taskset", "--cpu-list", core, sys.executable, "-m", "bench.mixed_lengths", "here")
    return subprocess.run(command, env=os.environ | compute_environment(), check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        asyncio.run(compare())
    else:
        sys.exit(main())
