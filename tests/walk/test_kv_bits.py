"""--kv-bits: answers are those of mlx-lm's own quantised caches, computed or laid back, and nobody else's."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from omlx.cache.folder import usage
from omlx.errors import BadSetting
from omlx.node.engine import Engine
from omlx.node.sequence import Token
from omlx.node.step import SamplingParams
from omlx.settings import load_settings
from tests.models.families import build_family
from tests.models.tiny import GPT_OSS, TINY, Tiny, build_tiny
from tests.walk.chats import BLOCK_TOKENS, BLOCKS, WORDS, block_bytes
from tests.walk.engines import LIMITS, Kept, engine, request
from tests.walk.servers import Running, free_port, omlx, serve

GROUPS = {"tiny-qwen3-wide": 64, "tiny-qwen3-next": 32, "llama sliding": 32}
"""Plain layers alone; recurrent ones and windows between them, which stay as they are."""
SHOWING = SamplingParams(temperature=0, top_logprobs=20)
BITS = (8, 4)
FAR = {8: 0.01, 4: 0.1}
"""Log-probabilities of a prompt that is computed in other chunks may differ by so much: float32 sums in
another order let a number in some ten thousand be rounded to the other side. With 4 bits those of plain
caches differ by more."""
LENGTHS = (3, 40, 150, 300)
KEPT_PROMPT = 158
QUESTION = " ".join(Random(12).choices(WORDS, k=60))
"""To which the answer's first tokens are far from ties, in 4 bits, in 8 and in all."""
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a model of GROUPS."""

    @cache
    def family(name: str) -> Path:
        return build_family(name, tmp_path_factory.mktemp("model"), head_dim=32)

    return lambda name: tiny(name) if name.startswith("tiny") else family(name)


def words(seed: int, count: int) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(10, 190) for _ in range(count)]


@cache
def whole_model(folder: Path) -> Any:
    return load_model(folder)[0]


def logprobs(folder: Path, tokens: Sequence[int], group: int, bits: int | None) -> mx.array:
    """What mlx-lm says of every token that may follow each of these: [tokens, vocabulary]."""
    caches = make_prompt_cache(whole_model(folder))
    if bits is not None:
        caches = [QuantizedKVCache(group, bits) if type(one) is KVCache else one for one in caches]
    logits = whole_model(folder)(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[Token]
    cached_tokens: int

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def far(self, folder: Path, group: int, bits: int | None) -> float:
        """The largest difference of a log-probability from mlx-lm's; each token must be its most likely one,
        or as good as that."""
        rows = logprobs(folder, [*self.prompt, *self.ids[:-1]], group, bits)[len(self.prompt) - 1 :].tolist()
        for row, token in zip(rows, self.tokens, strict=True):
            assert bits is None or max(row) - row[token.id] < FAR[bits]
        pairs = zip(rows, self.tokens, strict=True)
        return max(abs(logprob - row[id]) for row, token in pairs for id, logprob in token.top)


async def ask(opened: Engine, prompt: list[int], max_tokens: int = 20) -> Answer:
    stream = opened.submit(request(prompt, max_tokens, SHOWING))
    tokens = [token async for token in stream]
    return Answer(prompt, tokens, stream.cached_tokens)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("stages", [1, 2])
def test_answers_alone_and_together_are_those_of_mlx_lms_quantised_caches(
    folder: Folder, name: str, bits: int, stages: int
) -> None:
    model, group = folder(name), GROUPS[name]
    prompts = [words(seed, count) for seed, count in enumerate(LENGTHS)]

    async def walk() -> list[Answer]:
        async with engine(model, stages, kv_bits=bits) as (opened, scheduler):
            assert scheduler.limits.mixes and scheduler.limits.places == LIMITS.places
            alone = [await ask(opened, prompt) for prompt in prompts]
            together = await asyncio.gather(*(ask(opened, prompt) for prompt in [*prompts, *prompts]))
            assert opened.recoveries == 0
            return [*alone, *together]

    answers = asyncio.run(walk())
    assert max(answer.far(model, group, bits) for answer in answers) < FAR[bits]
    assert bits == 8 or max(answer.far(model, group, None) for answer in answers) > FAR[bits]


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_laid_back_hot_cold_or_on_other_stages_is_quantised_as_it_was(
    folder: Folder, name: str, bits: int, tmp_path: Path
) -> None:
    model, kept = folder(name), Kept(tmp_path)
    prompt = words(7, KEPT_PROMPT)
    answers: list[Answer] = []

    async def walk(stages: int) -> None:
        async with engine(model, stages, kept=kept, kv_bits=bits) as (opened, scheduler):
            for _ in range(2):
                answers.append(await ask(opened, prompt))
            if not scheduler.prefixes.counters.fetched_blocks:
                answers.append(await ask(opened, [*prompt, *answers[0].ids, 5]))
            assert opened.recoveries == 0
            scheduler.prefixes.index.check()

    for stages in (1, 1, 2, 3):
        asyncio.run(walk(stages))
    first, again, longer, *cold = answers
    assert first.cached_tokens == 0
    assert longer.cached_tokens >= KEPT_PROMPT // 64 * 64
    assert len(cold) == 6 and {one.cached_tokens for one in (again, *cold)} == {again.cached_tokens}
    assert again.cached_tokens >= (KEPT_PROMPT - 1) // 64 * 64
    # What was laid back is the same to the last bit, wherever it lay.
    assert all(one.tokens == again.tokens for one in cold)
    assert max(one.far(model, GROUPS[name], bits) for one in (first, again, longer)) < FAR[bits]


@pytest.mark.slow
def test_off_four_eight_and_off_again_find_each_their_own_blocks_in_one_folder(
    tiny: Folder, tmp_path: Path
) -> None:
    """KV-07."""
    model, cold = tiny("tiny-qwen3-wide"), tmp_path / "blocks"
    found: dict[tuple[str, ...], Said] = {}
    size: dict[tuple[str, ...], int] = {}
    for flags in ((), ("--kv-bits", "4"), ("--kv-bits", "8"), ()):
        before = block_bytes(cold)
        with serve(model, "--paged-ssd-cache-dir", str(cold), *flags, settings=BLOCKS) as running:
            first, again = say(running), say(running)
            right = found.setdefault(flags, first)
            assert (first.cached_tokens > BLOCK_TOKENS) is (first is not right), flags
            assert again.cached_tokens > BLOCK_TOKENS
            assert first.far(right) < FAR[8] and again.far(right) < FAR[8]
            running.interrupt()
            assert "Traceback" not in running.log() and "warning" not in running.log()
        size.setdefault(flags, block_bytes(cold) - before)
    assert found["--kv-bits", "4"].far(found[()]) > FAR[8]
    assert len(usage(cold)) == 3
    assert 0 < size["--kv-bits", "4"] < 0.7 * size["--kv-bits", "8"] < 0.3 * size[()]


@dataclass(frozen=True)
class Said:
    text: str
    cached_tokens: int
    logprobs: list[float]
    """Of the two most likely tokens in each place."""

    def far(self, other: "Said") -> float:
        """The texts must be the same."""
        assert self.text == other.text
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


def say(running: Running) -> Said:
    answered = running.client().chat.completions.create(
        model="tiny-qwen3-wide",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    [choice], usage = answered.choices, answered.usage
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tops = [top.logprob for token in choice.logprobs.content for top in token.top_logprobs]
    assert usage is not None and usage.prompt_tokens_details is not None
    return Said(choice.message.content or "", usage.prompt_tokens_details.cached_tokens or 0, tops)


@pytest.mark.parametrize("stages", ["1", "2"])
def test_a_family_that_cannot_is_refused_in_one_line(
    stages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TINY, "wide-gpt-oss", Tiny(GPT_OSS | {"head_dim": 32}))
    where = ("--no-cache", "--port", str(free_port()), "--stages", stages)
    ended = omlx("serve", str(build_tiny("wide-gpt-oss", tmp_path)), "--kv-bits", "8", *where)
    assert ended.returncode == 2
    why = "Quantized SDPA does not support attention sinks"
    said = f"omlx: gpt_oss cannot run with --kv-bits 8 ({why}); leave it out"
    assert ended.stdout.strip() == said


def test_the_flag_and_the_variable_take_eight_or_four(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"--kv-bits +8\|4 ", omlx("serve", "--help").stdout)
    ended = omlx("serve", "--kv-bits", "5")
    assert ended.returncode == 2
    assert ended.stdout == "omlx: setting kv_bits = 5: Input should be 4 or 8\n"
    assert load_settings().kv_bits is None
    monkeypatch.setenv("OMLX_KV_BITS", "4")
    assert load_settings().kv_bits == 4
    assert load_settings(kv_bits=8).kv_bits == 8
    monkeypatch.setenv("OMLX_KV_BITS", "eight")
    with pytest.raises(BadSetting, match="kv_bits = 'eight': Input should be 4 or 8"):
        load_settings()
