"""Does a stage's memory stay within its bound while blocks come and go? SmolLM2 for ten minutes.

    python -m bench.cache_soak [MINUTES]

Four clients of `omlx serve` tell growing talks, and begin new ones, so that the hot tier of 100 MB is full
after a minute and stays so. rss_mb: the stage's resident memory, every half second; bound_mb: weights, keys
and values of what runs, the hot tier, and 300 MB. ratio: the most that was seen / the bound. Linux.
"""

import asyncio
import random
import sys
import time

import psutil

from bench.engines import model_folder
from bench.record import Spread, tell
from bench.servers import Server, running_server
from bench.start_up import serve

MODEL = "smollm2-135m-instruct-f32"
WEIGHT_BYTES = 538_100_000
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Keys and values of one token."""
HOT_BYTES = 100_000_000
SPARE_BYTES = 300_000_000
CLIENTS, TURNS, WORDS, ANSWER_TOKENS = 4, 6, 150, 24
LOOK_EVERY_S = 0.5


async def talk(server: Server, seed: int, end: float) -> list[int]:
    """Talks of some turns, one after the other; returns the prompts' tokens."""
    draw = random.Random(seed)
    words = [f"{a}{b}" for a in ("ba", "ko", "lu", "mi", "ra", "te") for b in ("da", "fo", "ne", "si", "vu")]
    prompts: list[int] = []
    while time.monotonic() < end:
        text = str(draw.random())
        for _ in range(TURNS):
            text += " " + " ".join(draw.choices(words, k=WORDS))
            given = await server.client.ask(server.launch.model, text, ANSWER_TOKENS)
            prompts.append(given.prompt_tokens or 0)
            if time.monotonic() > end:
                break
    return prompts


async def watch(stage: psutil.Process, seen: list[float]) -> None:
    while True:
        seen.append(stage.memory_info().rss / 1e6)
        await asyncio.sleep(LOOK_EVERY_S)


async def main(minutes: float) -> None:
    launch = serve(model_folder(MODEL), "--hot-cache-max-size", str(HOT_BYTES))
    async with running_server(launch) as server:
        await server.first_answer("Hello")
        _, stage, *_ = server.tree()
        seen: list[float] = []
        watching = asyncio.create_task(watch(stage, seen))
        end = time.monotonic() + 60 * minutes
        prompts = await asyncio.gather(*(talk(server, seed, end) for seed in range(CLIENTS)))
        watching.cancel()
    running = sum(max(own) + ANSWER_TOKENS for own in prompts) * TOKEN_BYTES
    bound = (WEIGHT_BYTES + running + HOT_BYTES + SPARE_BYTES) / 1e6
    last = seen[-len(seen) // 4 :]
    figures = {
        "rss_mb": Spread.of(seen),
        "rss_last_quarter_mb": Spread.of(last),
        "running_mb": Spread.of([running / 1e6]),
        "bound_mb": Spread.of([bound]),
        "prompt_tokens": Spread.of(tokens for own in prompts for tokens in own),
    }
    tell("cache_soak", MODEL, max(seen) / bound, figures)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0))
