"""A server under load is killed again and again: what it then finds on its SSD makes no answer wrong."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from omlx.node.engine import Engine
from tests.walk.chats import BLOCKS, Turn, all_spans, block_bytes, check, record
from tests.walk.engines import Kept, answer, engine, request
from tests.walk.servers import Running, omlx, serve, start, wait_until, wait_until_up

Tiny = Callable[[str], Path]
KILLS = 50
CLIENTS, CHATS, TURNS = 4, 6, 6
FIXED = (5, 3, 5, 1)
"""Turns of the first chats that are asked after every restart."""
LOAD_S, START_S = 0.4, 0.8
"""A server is killed after so long under load at most, or after so long from its start on."""
VERIFY_EVERY = 10
COLD_BYTES = 2_000_000
SMALL = ("--hot-cache-max-size", "800kB", "--paged-ssd-cache-max-size", str(COLD_BYTES))
"""All chats together take twice that."""
SLACK_BYTES = 400_000
"""Blocks on their way, and what servers that were killed at once have left."""


@dataclass(slots=True)
class Load:
    """Clients whose chats grow until the server is gone; wrong answers are kept in `wrong`."""

    url: str
    chats: list[list[Turn]]
    seed: int
    wrong: list[AssertionError] = field(default_factory=list)
    answered: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def live(self, client: int) -> None:
        draw = random.Random(self.seed * CLIENTS + client)
        while not self.over.is_set():
            for turn in draw.choice(self.chats):
                try:
                    check(self.url, turn)
                except httpx.HTTPError:
                    return  # killed
                except AssertionError as wrong:
                    self.wrong.append(wrong)
                    return
                self.answered += 1
                if self.over.is_set():
                    return


@dataclass(slots=True)
class Crashes:
    """One folder, and what its servers' lives came to."""

    model: Path
    cold: Path
    chats: list[list[Turn]]
    draw: random.Random
    cached_tokens: int = 0
    evicted: float = 0
    answered: int = 0

    def fixed(self, running: Running) -> None:
        """The same prompts after every restart."""
        turns = [chat[place] for chat, place in zip(self.chats, FIXED, strict=False)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(lambda turn: check(running.url, turn), turns))
        self.cached_tokens += sum(answer.cached_tokens for answer in found)

    def life(self, number: int) -> None:
        """Start, right answers, load, SIGKILL; some servers are killed before they are up."""
        stages = self.draw.choice((1, 1, 2))
        flags = ("--paged-ssd-cache-dir", str(self.cold), *SMALL, "--stages", str(stages))
        with start(self.model, *flags, settings=BLOCKS) as running:
            if number % 5 == 2:
                time.sleep(self.draw.uniform(0, START_S))
                running.kill()
            else:
                wait_until_up(running)
                self.fixed(running)
                self.load(running, number)

    def load(self, running: Running, number: int) -> None:
        """Clients at work see the server go."""
        load = Load(running.url, self.chats, number)
        with ThreadPoolExecutor(CLIENTS) as pool:
            lives = [pool.submit(load.live, client) for client in range(CLIENTS)]
            time.sleep(self.draw.uniform(0, LOAD_S))
            on_its_own = number % 5 != 4
            if not on_its_own:
                self.draw.choice(running.stages()).kill()
                self.fixed(running)
            if number % 5 == 3:
                self.evicted += running.metrics()[f'kv_evicted_blocks_total{{model="{self.model.name}"}}']
            assert "stage lost" not in running.log() or not on_its_own, running.log()
            load.over.set()
            running.kill()
            for life in lives:
                life.result()
        assert not load.wrong
        self.answered += load.answered

    def verify(self) -> None:
        told = omlx("cache", "verify", "--paged-ssd-cache-dir", str(self.cold))
        assert told.returncode == 0, told.stdout
        assert " 0 bad" in told.stdout.replace("\n", " "), told.stdout


@pytest.mark.slow
def test_after_each_of_fifty_kills_answers_are_right_and_every_block_is_good(
    tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny("tiny-llama")
    with serve(model, "--no-cache") as running:
        chats = [record(running.url, model.name, seed, TURNS) for seed in range(CHATS)]
    crashes = Crashes(model, tmp_path / "blocks", chats, random.Random(4))
    for number in range(KILLS):
        crashes.life(number)
        assert block_bytes(crashes.cold) < COLD_BYTES + SLACK_BYTES, number
        if (number + 1) % VERIFY_EVERY == 0:
            crashes.verify()
    assert crashes.cached_tokens > KILLS * 200
    assert crashes.evicted > 0
    assert crashes.answered > KILLS


def test_a_killed_server_has_written_no_block_before_the_one_that_it_goes_on_from(
    tiny: Tiny, tmp_path: Path
) -> None:
    """RAM was full, so the ends of chats were written first; after a kill there was no way to them."""
    model, cold = tiny("tiny-llama"), tmp_path / "blocks"
    with serve(model, "--paged-ssd-cache-dir", str(cold), *SMALL, settings=BLOCKS) as running:
        for seed in range(2):
            record(running.url, model.name, seed, turns=1, words=600)
        wait_until(lambda: running.metrics()[f'kv_spilled_blocks_total{{model="{model.name}"}}'] > 0)
        running.kill()
    [span] = all_spans(cold)
    orphans = [line.start for line in span.lines.values() if line.start and line.parent not in span.lines]
    assert span.lines and not orphans


@pytest.mark.parametrize("stages", [1, 2])
def test_a_block_fetched_again_while_a_plan_evicts_it_is_not_missing_when_it_is_laid_back(
    stages: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage said that it had the block, and then came to the plan that evicted it: three such losses, and
    the model had failed."""
    monkeypatch.setattr("omlx.node.prefixes.IDLE_S", 0.02)
    draw = random.Random(3)
    prompts = [[draw.randrange(10, 700) for _ in range(600)] for _ in range(6)]
    kept = Kept(tmp_path, hot_bytes=1_000_000)

    async def live(opened: Engine, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            await answer(
                opened, request(choose.choice(prompts)[: choose.choice((200, 400, 600))], max_tokens=4)
            )

    async def walk() -> None:
        async with engine(tiny("tiny-llama"), stages, kept=kept) as (opened, scheduler):
            await asyncio.gather(*(live(opened, seed) for seed in range(CLIENTS)))
            assert opened.recoveries == 0
            assert scheduler.prefixes.counters.fetched_blocks > 0
            scheduler.prefixes.index.check()

    asyncio.run(walk())
