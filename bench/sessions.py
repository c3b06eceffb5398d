"""Do agents' growing contexts get computed once? Four sessions of 20 turns, up to some 8,000 tokens in each.

Each turn asks with all of the turn before it, its answer, and new tokens, of one engine whose hot tier holds
a third of what the sessions have in the end. in_turn: one session after the other, turn by turn, so that each
finds what it needs on the SSD; with_tools: side by side, each with a pause behind its answers; without_rest:
side by side, each answer followed by the next turn at once. computed and needed: prompt tokens; needed are
those behind what this session had computed before. with_answers: their ratio with answers' tokens on both
sides. fetched, evicted: blocks; dropped: writes; given_up: prompts computed instead of read. ratio: computed
/ needed, the worst of the three.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from bench.engines import Kept, answer, model_folder, own_folder, running_engine
from bench.record import Spread, tell
from omlx.node.engine import Engine

MODEL = "tiny-llama"
VOCABULARY = 500
SESSIONS, TURNS = 4, 20
FIRST_TOKENS = 1000
"""Of each session's first prompt: what an agent is told to be."""
NEW_TOKENS = (100, 400)
ANSWER_TOKENS = 100
TOOL_S = 0.3
HOT_BYTES = 11 * 2**20
"""A token takes 1 KiB."""


@dataclass(slots=True)
class Session:
    """What one agent has said and heard."""

    draw: random.Random
    tokens: list[int] = field(default_factory=list)
    needed: int = 0
    """Prompt tokens that had to be computed so far."""

    async def turn(self, engine: Engine) -> None:
        new = self.draw.randint(*NEW_TOKENS) if self.tokens else FIRST_TOKENS
        prompt = [*self.tokens, *(self.draw.randrange(10, VOCABULARY) for _ in range(new))]
        # An answer's last token was drawn, and nothing computed behind it.
        self.needed += len(prompt) - max(0, len(self.tokens) - 1)
        given = await answer(engine, prompt, ANSWER_TOKENS)
        self.tokens = [*prompt, *given.tokens]


Way = Callable[[Engine, Sequence[Session]], Coroutine[None, None, None]]


async def in_turn(engine: Engine, sessions: Sequence[Session]) -> None:
    for _ in range(TURNS):
        for session in sessions:
            await session.turn(engine)


async def with_tools(engine: Engine, sessions: Sequence[Session]) -> None:
    async def agent(session: Session) -> None:
        for _ in range(TURNS):
            await session.turn(engine)
            await asyncio.sleep(TOOL_S)

    await asyncio.gather(*(agent(session) for session in sessions))


async def without_rest(engine: Engine, sessions: Sequence[Session]) -> None:
    await asyncio.gather(*(in_turn(engine, [session]) for session in sessions))


WAYS: tuple[Way, ...] = (in_turn, with_tools, without_rest)


async def measure(way: Way) -> dict[str, float]:
    sessions = [Session(random.Random(seed)) for seed in range(SESSIONS)]
    started = time.perf_counter()
    with own_folder() as cold:
        async with running_engine(model_folder(MODEL), 1, kept=Kept(cold, HOT_BYTES)) as engine:
            await way(engine, sessions)
            figures = engine.figures()
    answers = SESSIONS * TURNS * (ANSWER_TOKENS - 1)
    needed = sum(session.needed for session in sessions)
    return {
        "ratio": figures.prompt_tokens / needed,
        "with_answers": (figures.prompt_tokens + answers) / (needed + answers),
        "computed": figures.prompt_tokens,
        "needed": needed,
        "context_tokens": max(len(session.tokens) for session in sessions),
        "fetched": figures.cache.fetched_blocks,
        "evicted": figures.cache.evicted_blocks,
        "dropped": figures.cache.dropped_writes,
        "given_up": figures.cache.given_up_fetches,
        "hot_mb": sum(figures.cache.hot_bytes) / 1e6,
        "cold_mb": sum(figures.cache.cold_bytes) / 1e6,
        "recoveries": figures.recoveries,
        "wall_s": time.perf_counter() - started,
    }


async def compare_sessions() -> None:
    found = {way.__name__: await measure(way) for way in WAYS}
    figures = {
        f"{way}_{name}": Spread.of([value]) for way, values in found.items() for name, value in values.items()
    }
    tell("cache_sessions", MODEL, max(values["ratio"] for values in found.values()), figures)
