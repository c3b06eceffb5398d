"""The cache through the real server: what clients are told of it, restarts, other weights, its limit."""

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest

from omlx.cache.block import TOKEN_BYTES
from omlx.cache.shelf import Span
from tests.walk.chats import (
    BLOCK_TOKENS,
    BLOCKS,
    Answer,
    Turn,
    all_spans,
    ask,
    block_bytes,
    check,
    listen,
    record,
)
from tests.walk.servers import Running, serve, wait_until

Tiny = Callable[[str], Path]
CHATS, TURNS = 4, 6
LIMIT_BYTES = 1_000_000
SLACK_BYTES = 8 * 34_000
"""Blocks on their way to the disk while others are given up."""


@pytest.fixture(scope="module")
def chats(tiny: Tiny) -> list[list[Turn]]:
    """Each of some 650 tokens in the end: 20 blocks of 34 kB."""
    model = tiny("tiny-llama")
    with serve(model, "--no-cache") as running:
        return [record(running.url, model.name, seed, TURNS) for seed in range(CHATS)]


def keeping(cold: Path) -> tuple[str, str]:
    return "--paged-ssd-cache-dir", str(cold)


def figure(running: Running, name: str, model: str = "tiny-llama") -> float:
    return running.metrics()[f'{name}{{model="{model}"}}']


def wait_until_written(cold: Path, prompt_tokens: int) -> None:
    """The longest prompt, but for a rest too short to be kept; its end is written last."""

    def end(span: Span) -> int:
        return max((line.start + len(line.tokens) // TOKEN_BYTES for line in span.lines.values()), default=0)

    wait_until(lambda: all(end(span) >= prompt_tokens - 16 for span in all_spans(cold)))


# ------------------------------------------------------------------ usage, and restarts


def all_of(answer: Answer) -> bool:
    """Of the prompt, all but the last token was laid back, or all whole blocks where the rest is short."""
    return answer.prompt_tokens - 16 <= answer.cached_tokens < answer.prompt_tokens


@pytest.mark.parametrize("stages", [1, 2])
def test_cached_tokens_grow_with_a_chat_and_outlive_the_server(
    stages: int, tiny: Tiny, chats: list[list[Turn]], tmp_path: Path
) -> None:
    model, chat = tiny("tiny-llama"), chats[0]
    flags = (*keeping(tmp_path / "blocks"), "--stages", str(stages))
    with serve(model, *flags, settings=BLOCKS) as running:
        first = check(running.url, chat[0])
        assert first.cached_tokens == 0
        again = check(running.url, chat[0])
        assert all_of(again)
        before = first
        for place, turn in enumerate(chat[1:4]):
            found = (listen if place % 2 else ask)(running.url, turn)
            assert found.text == turn.answer
            assert before.prompt_tokens - BLOCK_TOKENS < found.cached_tokens < found.prompt_tokens
            before = found
        assert all_of(listen(running.url, chat[3]))
        assert running.interrupt() < 10
    with serve(model, *flags, settings=BLOCKS) as running:
        assert all_of(check(running.url, chat[3]))
        longest = check(running.url, chat[4])
        assert longest.cached_tokens > before.prompt_tokens - BLOCK_TOKENS
        wait_until_written(tmp_path / "blocks", longest.prompt_tokens)
        running.kill()
    with serve(model, *flags, settings=BLOCKS) as running:
        assert all_of(check(running.url, chat[4]))
        assert check(running.url, chat[5]).cached_tokens > longest.prompt_tokens - BLOCK_TOKENS


def test_a_chat_kept_by_one_stage_is_found_by_two_and_by_one_again(
    tiny: Tiny, chats: list[list[Turn]], tmp_path: Path
) -> None:
    cached = []
    for stages, turn in zip((1, 2, 1), chats[0][2:], strict=False):
        flags = (*keeping(tmp_path / "blocks"), "--stages", str(stages))
        with serve(tiny("tiny-llama"), *flags, settings=BLOCKS) as running:
            cached.append(check(running.url, turn).cached_tokens)
            running.interrupt()
    assert cached[0] == 0
    assert all(after - before > 2 * BLOCK_TOKENS for before, after in pairwise(cached)), cached


def test_ctrl_c_writes_what_was_in_ram_alone(tiny: Tiny, chats: list[list[Turn]], tmp_path: Path) -> None:
    cold = tmp_path / "blocks"
    with serve(tiny("tiny-llama"), *keeping(cold), settings=BLOCKS) as running:
        for chat in chats:
            check(running.url, chat[-1])
        blocks = running.metrics()['kv_blocks{model="tiny-llama",stage="0",tier="hot"}']
        assert running.interrupt() < 10
        assert "not everything was written" not in running.log()
    [span] = all_spans(cold)
    assert len(span.lines) == blocks > 50


# ------------------------------------------------------------------ other weights under the same name (KV-02)


def rewrite(file: Path, text: bytes) -> None:
    """In place, and as old as before: as a tool does that copies files back."""
    facts = file.stat()
    file.write_bytes(text)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def other_weights(folder: Path, tmp_path: Path) -> bytes:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    changed = {name: value * 1.25 if "k_proj" in name else value for name, value in weights.items()}
    beside = tmp_path / "other.safetensors"
    mx.save_safetensors(str(beside), changed, metadata={"format": "mlx"})
    return beside.read_bytes()


@pytest.mark.slow
def test_weights_config_and_template_changed_in_place_never_get_the_former_ones_blocks(
    tiny: Tiny, chats: list[list[Turn]], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("tiny-llama"), tmp_path / "model"))
    weights, config, tokenizer = (
        folder / name for name in ("model.safetensors", "config.json", "tokenizer_config.json")
    )
    base, turn = weights.read_bytes(), chats[0][2].to("model")
    settled, template = config.read_bytes(), tokenizer.read_text()
    seen: dict[str, str] = {}

    def step(name: str) -> int:
        """Cached tokens of a server's first answer, which must be right."""
        if name not in seen:
            with serve(folder, "--no-cache") as running:
                seen[name] = ask(running.url, turn).text
        with serve(folder, *keeping(tmp_path / "blocks"), settings=BLOCKS) as running:
            found = ask(running.url, turn)
            assert found.text == seen[name], name
            return found.cached_tokens

    assert step("base") == 0
    whole = step("base")
    assert whole > 300
    rewrite(weights, other_weights(folder, tmp_path))
    assert step("other weights") == 0
    assert step("other weights") == whole
    rewrite(weights, base)
    assert step("base") == whole
    rewrite(config, json.dumps(json.loads(settled) | {"rope_theta": 20000.0}).encode())
    assert step("other config") == 0
    rewrite(config, settled)
    assert step("base") == whole
    tokenizer.write_text(template.replace("assistant", "helper"))
    # The prompt is another one from the first answer on, and the blocks before are still right.
    assert 0 < step("other template") < whole
    assert len(set(seen.values())) == len(seen)


# ------------------------------------------------------------------ the limit (KV-08)


def two_models(tiny: Tiny, tmp_path: Path) -> Path:
    """The folder of "a" and "b"."""
    models = tmp_path / "models"
    for name in ("a", "b"):
        shutil.copytree(tiny("tiny-llama"), models / name)
    (models / "b" / "model.safetensors").write_bytes(other_weights(models / "b", tmp_path))
    return models


def fill(running: Running, chats: list[list[Turn]], model: str, cold: Path) -> None:
    """More than the limit, which holds all the time, but for moments in which a thread that has to take away
    what another model has waits for a core."""
    for chat in chats:
        for turn in (chat[3], chat[-1]):
            ask(running.url, turn.to(model))
            wait_until(lambda: block_bytes(cold) < LIMIT_BYTES + SLACK_BYTES, 2)
        wait_until_written_or_given_up(running, model)
        wait_until(lambda: block_bytes(cold) < LIMIT_BYTES + SLACK_BYTES, 2)


def wait_until_written_or_given_up(running: Running, model: str) -> None:
    """Each block that was kept in RAM was written, though some are gone from the disk again."""
    hot = f'kv_blocks{{model="{model}",stage="0",tier="hot"}}'
    wait_until(lambda: figure(running, "kv_spilled_blocks_total", model) >= running.metrics()[hot])


@pytest.mark.slow
def test_the_limit_holds_over_two_models_and_the_one_that_is_not_loaded_gives_first(
    tiny: Tiny, chats: list[list[Turn]], tmp_path: Path
) -> None:
    models, cold = two_models(tiny, tmp_path), tmp_path / "blocks"
    flags = (*keeping(cold), "--paged-ssd-cache-max-size", f"{LIMIT_BYTES}")
    with serve(models, *flags, settings=BLOCKS) as running:
        ask(running.url, chats[0][0].to("a"))
        foreign = [cold / "notes.txt", cold / "holiday" / "a.safetensors"]
        foreign += [next(span.folder for span in all_spans(cold)) / "x.safetensors"]
        for file in foreign:
            file.parent.mkdir(exist_ok=True)
            file.write_text("mine")
        fill(running, chats, "a", cold)
        assert block_bytes(cold) > 0.7 * LIMIT_BYTES
        [root_of_a] = [span.folder.parent for span in all_spans(cold)]
    with serve(models, *flags, settings=BLOCKS) as running:
        of_a = block_bytes(root_of_a)
        for turn in (chats[0][-1], chats[1][0]):
            ask(running.url, turn.to("b"))
        wait_until_written_or_given_up(running, "b")
        # Nothing of B was given up while there was something of A.
        told = running.metrics()
        cold_blocks = told['kv_blocks{model="b",stage="0",tier="cold"}']
        assert cold_blocks == told['kv_spilled_blocks_total{model="b"}']
        assert block_bytes(root_of_a) < of_a
        fill(running, chats, "b", cold)
        assert block_bytes(cold) > 0.7 * LIMIT_BYTES
    assert all(file.read_text() == "mine" for file in foreign)


@pytest.mark.slow
def test_a_loaded_model_that_nobody_asks_leaves_the_limit_to_the_one_that_is_asked(
    tiny: Tiny, chats: list[list[Turn]], tmp_path: Path
) -> None:
    models, cold = two_models(tiny, tmp_path), tmp_path / "blocks"
    flags = (*keeping(cold), "--paged-ssd-cache-max-size", f"{LIMIT_BYTES}")
    with serve(models, *flags, settings=BLOCKS) as running:
        fill(running, chats, "a", cold)
        fill(running, chats, "b", cold)
        told = running.metrics()
        of_b = told['kv_bytes{model="b",stage="0",tier="cold"}']
        assert of_b > LIMIT_BYTES / 2, of_b
