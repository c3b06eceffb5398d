"""Is what was computed once laid back fast enough, and does keeping it cost little? Four lines.

cache_first_token: seconds to the first token of a 4,096-token prompt, asked of `omlx serve` over HTTP: cold,
never seen; hot, the same again; ssd, after a clean restart; ssd_after_kill, after all of the server's
processes were killed some seconds after the answer. Restarts find the page cache empty of blocks, and a
server that has answered a greeting. cached: prompt tokens that the server says it found. ratio: cold / hot.
cache_restore: gigabytes/s of blocks from files into the hot tier, as a stage does it, and of a plain read of
the same files into one buffer; without the page cache, and warm with it. ratio: restore / plain, without.
cache_decode: tokens/s of answers with the cache on and off, one at a time and four at once; written: blocks
that went to the SSD meanwhile. ratio: the worse of the two, on / off.
cache_sessions: in sessions.py. Linux.
"""

import asyncio
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from statistics import median

import mlx.core as mx

from bench.alternate import Run, alternate, ratio
from bench.engines import Kept, model_folder, own_folder, prompts, running_engine, together
from bench.record import Spread, tell
from bench.servers import CACHE_FOLDER, Launch, Server, running_server
from bench.sessions import compare_sessions
from bench.start_up import serve
from omlx.cache.block import name, pack, root_of
from omlx.cache.block_file import Label
from omlx.cache.shelf import Shelf
from omlx.ids import BlockId
from omlx.node.engine import Engine
from omlx.node.slab import Part, Piece, Slab, from_tensors, to_tensors
from omlx.settings import Settings

MODEL = "smollm2-135m-instruct-f32"
BLOCK_TOKENS = Settings.model_fields["cache_block_tokens"].default

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "point", "home"),
    *("water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book"),
)
"""Each is one token of SmolLM2's."""
LINES = 404
LEAST_TOKENS, MOST_TOKENS = 4064, 4096
"""Of the prompt, template included."""
HELLO = "Hello"
SAID_TOKENS = 8
HOTS, RESTARTS = 5, 3
"""For each of the two cold prompts."""
KILLED_AFTER_S = 5.0

BLOCKS = 24
PLACES = range(30)
SHAPE = (1, 3, BLOCK_TOKENS, 64)
"""SmolLM2's layers, and keys or values of one."""
READ_ROUNDS = 7

DECODE_ROUNDS = 3
AT_ONCE = (1, 4)
SHORT = 32
"""Tokens of a prompt."""
DECODED, WARM_UP = 300, 40
"""Tokens of an answer; of one in the round that is not counted."""
SETTLE_S = 3.0
"""The last blocks are written before the other side's turn."""


def forget(folder: Path) -> None:
    """Blocks below it leave the page cache; their files were synced."""
    for path in folder.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# ------------------------------------------------------------------ the first token of a long prompt


def long_text(seed: int) -> str:
    """With a question that the model has an answer to: an answer without text has no first piece to time."""
    draw = random.Random(seed)
    lines = (
        f"- {' '.join(draw.choices(WORDS, k=4))}: {' '.join(draw.choices(WORDS, k=3))}" for _ in range(LINES)
    )
    return "\n".join(("Here are notes.", *lines, "", "Question: What is the capital of France?"))


@asynccontextmanager
async def greeted(launch: Launch) -> AsyncIterator[Server]:
    async with running_server(launch) as server:
        await server.first_answer(HELLO)
        yield server


@dataclass(frozen=True, slots=True)
class Firsts:
    """First tokens, by what they came from."""

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cached: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def take(self, source: str, server: Server, prompt: str) -> None:
        given = await server.ask(prompt, SAID_TOKENS)
        if given.ttft_s is None or given.prompt_tokens is None:
            raise SystemExit(f"bench: {server.launch.name} said nothing, or not how long the prompt was")
        if not LEAST_TOKENS <= given.prompt_tokens <= MOST_TOKENS:
            raise SystemExit(f"bench: the prompt has {given.prompt_tokens} tokens; change LINES")
        self.seconds[source].append(given.ttft_s)
        self.cached[source].append(given.cached_tokens or 0)

    def over(self, source: str) -> float:
        """Cold / this."""
        return median(self.seconds["cold"]) / median(self.seconds[source])


async def never_stopped(server: Server) -> None:
    """It ends by itself, and writes what is left to write."""


async def killed(server: Server) -> None:
    await asyncio.sleep(KILLED_AFTER_S)
    await server.kill()


async def compare_first_tokens() -> None:
    firsts = Firsts()
    for seed, (source, leave) in enumerate({"ssd": never_stopped, "ssd_after_kill": killed}.items()):
        with own_folder() as kept:
            launch = replace(serve(model_folder(MODEL)), environment={CACHE_FOLDER: str(kept)})
            prompt = long_text(seed)
            async with greeted(launch) as server:
                await firsts.take("cold", server, prompt)
                for _ in range(HOTS):
                    await firsts.take("hot", server, prompt)
                await leave(server)
            for _ in range(RESTARTS):
                async with greeted(launch) as server:
                    forget(kept)
                    await firsts.take(source, server, prompt)
                    await leave(server)
    found = {f"{source}_s": values for source, values in firsts.seconds.items()}
    found |= {f"{source}_cached_tokens": values for source, values in firsts.cached.items()}
    found |= {f"cold_over_{source}": [firsts.over(source)] for source in ("hot", "ssd", "ssd_after_kill")}
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("cache_first_token", MODEL, firsts.over("hot"), figures)


# ------------------------------------------------------------------ from the SSD into the hot tier


def write_blocks(shelf: Shelf, root: BlockId) -> list[BlockId]:
    """Of noise, as a stage writes them."""
    ids: list[BlockId] = []
    for number in range(BLOCKS):
        tokens = pack([number] * BLOCK_TOKENS)
        parent = ids[-1] if ids else root
        id = name(parent, tokens)
        arrays = [[mx.random.normal(SHAPE) for _ in "kv"] for _ in PLACES]
        mx.eval(arrays)
        pieces = [
            Piece(place, (Part("k", "F32", keys), Part("v", "F32", values)))
            for place, (keys, values) in zip(PLACES, arrays, strict=True)
        ]
        start = number * BLOCK_TOKENS
        label = Label(id=id, parent=parent, tokens=tokens, start=start, restorable=True)
        shelf.store(label, to_tensors(pieces))
        ids.append(id)
    return ids


def restore(shelf: Shelf, ids: Sequence[BlockId]) -> None:
    """All of them are hot in the end."""
    hot: dict[BlockId, Slab] = {}
    for id in ids:
        hot[id] = Slab(from_tensors(shelf.gather(id, PLACES)), restorable=True)


def read(files: Sequence[Path], buffer: bytearray) -> None:
    for path in files:
        file = os.open(path, os.O_RDONLY)
        while os.readv(file, [buffer]):
            pass
        os.close(file)


async def compare_reads() -> None:
    with own_folder() as folder:
        root = root_of({"weights": "none"})
        shelf = Shelf.open(folder, root, PLACES.start, PLACES.stop)
        ids = write_blocks(shelf, root)
        files = list(folder.rglob("*.safetensors"))
        sizes = [path.stat().st_size for path in files]
        buffer = bytearray(max(sizes))

        def timed(work: Callable[[], None], *, warm: bool) -> Run:
            async def run() -> float:
                if not warm:
                    forget(folder)
                started = time.perf_counter()
                work()
                return sum(sizes) / 1e9 / (time.perf_counter() - started)

            return run

        sides = {"restore": partial(restore, shelf, ids), "plain": partial(read, files, buffer)}
        # Those without the page cache leave it warm behind them.
        runs = {f"{side}_gbs": timed(work, warm=False) for side, work in sides.items()}
        runs |= {f"{side}_warm_gbs": timed(work, warm=True) for side, work in sides.items()}
        found = await alternate(runs, READ_ROUNDS)
    found["ratio_warm"] = [
        a / b for a, b in zip(found["restore_warm_gbs"], found["plain_warm_gbs"], strict=True)
    ]
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("cache_restore", f"blocks of {MODEL}", ratio(found["restore_gbs"], found["plain_gbs"]), figures)


# ------------------------------------------------------------------ what keeping costs


def decoding(engine: Engine, at_once: int) -> Run:
    """Tokens/s; prompts that this engine has not seen, the same in both."""
    lengths, seeds = chain((WARM_UP,), repeat(DECODED)), count(100 * at_once)

    async def run() -> float:
        asked = prompts(at_once, SHORT, 40_000, seed=next(seeds))
        rate = await together(engine, asked, next(lengths))
        await asyncio.sleep(SETTLE_S)
        return rate

    return run


async def compare_decoding() -> None:
    folder = model_folder(MODEL)
    found: dict[str, list[float]] = {}
    ratios = []
    with own_folder() as cold:
        async with running_engine(folder, 1) as off, running_engine(folder, 1, kept=Kept(cold)) as on:
            for at_once in AT_ONCE:
                before = on.figures().cache.spilled_blocks
                sides = {"on": decoding(on, at_once), "off": decoding(off, at_once)}
                rates = await alternate(sides, DECODE_ROUNDS)
                found |= {f"{side}_{at_once}_tps": values for side, values in rates.items()}
                found[f"written_{at_once}"] = [on.figures().cache.spilled_blocks - before]
                shares = [a / b for a, b in zip(rates["on"], rates["off"], strict=True)]
                found[f"ratio_{at_once}"] = shares
                ratios.append(median(shares))
            found["dropped_writes"] = [on.figures().cache.dropped_writes]
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("cache_decode", MODEL, min(ratios), figures)


PARTS = {
    "first_token": compare_first_tokens,
    "restore": compare_reads,
    "decode": compare_decoding,
    "sessions": compare_sessions,
}


async def main() -> None:
    """All lines, or those of the parts named."""
    parts = sys.argv[1:] or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"bench: cache has no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    for part in parts:
        await PARTS[part]()


if __name__ == "__main__":
    asyncio.run(main())
