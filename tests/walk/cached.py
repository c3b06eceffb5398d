"""What tests of the cache share: models of every kind of cache, and answers held against mlx-lm."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from omlx.node.engine import Engine
from omlx.node.scheduler import Scheduler
from omlx.node.step import SamplingParams
from tests.models.families import build_family
from tests.walk.engines import TIE, request
from tests.walk.engines import _whole as whole_model

TRIMMABLE, SLIDING, RECURRENT = "trimmable", "sliding", "recurrent"
KINDS = {
    "tiny-llama": TRIMMABLE,
    "tiny-deepseek-v3": TRIMMABLE,
    "tiny-gemma3": SLIDING,
    "tiny-gpt-oss": SLIDING,
    "tiny-qwen3-next": RECURRENT,
    "falcon_h1": RECURRENT,
    "jamba": RECURRENT,
}
FEW = ("tiny-llama", "tiny-gemma3", "tiny-qwen3-next")
"""One of each sort."""
WORDS = range(10, 190)
"""Token ids that all of these models know."""
TOP = 20
TOLERANCE = 1e-3
"""Log-probabilities of a prompt computed in other chunks may differ by so much; one token too many in a
state or in a window costs 0.01 and more."""
WINDOW = 32
BLOCK, STRIDE = 32, 64
"""What `Kept` has."""
SHOWING = SamplingParams(temperature=0, top_logprobs=TOP)

Folder = Callable[[str], Path]


@cache
def family(name: str, parent: Path) -> Path:
    """A family of tests/models/families.py, built in a folder of `parent`."""
    folder = parent / name
    folder.mkdir(exist_ok=True)
    return build_family(name, folder)


def words(seed: int, count: int) -> list[int]:
    dice = Random(seed)
    return [dice.choice(WORDS) for _ in range(count)]


@cache
def logprobs(model: Path, tokens: tuple[int, ...]) -> mx.array:
    """What mlx-lm says of every token that may follow each of these: [tokens, vocabulary]."""
    whole, _ = whole_model(model)
    logits = whole(mx.array([tokens]), cache=make_prompt_cache(whole))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def greedy(model: Path, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Each token of the answer is the most likely one, or is level with it."""
    rows = logprobs(model, (*prompt, *answer[:-1]))[len(prompt) - 1 :]
    behind = mx.max(rows, axis=-1) - mx.take_along_axis(rows, mx.array(answer)[:, None], axis=-1)[:, 0]
    assert mx.max(behind).item() < TIE, (len(prompt), behind.tolist())


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached_tokens: int
    top: tuple[tuple[int, float], ...]
    """Of the first token."""


async def ask(opened: Engine, prompt: Sequence[int], max_tokens: int = 20) -> Answer:
    stream = opened.submit(request(prompt, max_tokens, SHOWING))
    tokens = [token async for token in stream]
    return Answer([token.id for token in tokens], stream.cached_tokens, tokens[0].top)


async def ask_right(opened: Engine, model: Path, prompt: Sequence[int], max_tokens: int = 20) -> Answer:
    """The answer, which equals that of a run without a cache."""
    answer = await ask(opened, prompt, max_tokens)
    right(model, prompt, answer)
    return answer


def right(model: Path, prompt: Sequence[int], answer: Answer) -> None:
    greedy(model, prompt, answer.tokens)
    row = logprobs(model, (*prompt, *answer.tokens[:-1]))[len(prompt) - 1].tolist()
    far = max(abs(logprob - row[token]) for token, logprob in answer.top)
    assert far < TOLERANCE, (len(prompt), answer.cached_tokens, far)
    assert len(answer.top) == TOP


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """The engine's task runs in between."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < within_s
        await asyncio.sleep(0)


async def quiet(scheduler: Scheduler) -> None:
    """Nothing is on its way, and everything is written."""
    prefixes = scheduler.prefixes
    await until(lambda: not scheduler.in_flight and not prefixes.busy and not prefixes.index.counts().pinned)
    check(scheduler)


def check(scheduler: Scheduler) -> None:
    scheduler.check()
    scheduler.prefixes.index.check()
