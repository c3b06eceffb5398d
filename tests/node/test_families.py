"""Every family of CUTTABLE, with random weights: cut anywhere, it computes what mlx-lm's whole model does."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from omlx.errors import CannotSplit
from omlx.ids import SeqId
from omlx.node.loader import load_span
from omlx.node.rows import Rows
from omlx.node.slicing import CUTTABLE, Cut, cut_model, refuse_uncuttable
from tests.models.families import FAMILIES, LAYERS, VOCAB, WINDOW, build_family, config_of
from tests.models.tiny import TINY

pytestmark = pytest.mark.usefixtures("quick")

PROMPT = [(7 * i + 11) % VOCAB for i in range(25)]
CHUNKS = (17, 5, 1, 1, 1)
"""Two chunks of prefill, the first already past every window, and three steps of decode."""
BORDERS = {2: (2,), 3: (2, 5), 4: (1, 2, 5)}
"""Unequal stages with spans in common, since loading takes the time; three of four have one kind of layer."""
SHIFTED = {"minimax_m3_vl"}
"""mlx-lm cuts the blocks of its sparse attention over the padded batch: a row depends on others."""
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
"""float32 sums in another order; logits have a standard deviation of 0.1 to 5."""


@dataclass(frozen=True, eq=False)
class Built:
    name: str
    folder: Path
    whole: nn.Module

    @cache  # noqa: B019 (emptied by the fixture)
    def span(self, start: int, end: int) -> Cut:
        return load_span(self.folder, start, end, lambda done, total: None)

    def stages(self, count: int) -> list[Cut]:
        return [self.span(start, end) for start, end in pairwise([0, *BORDERS[count], LAYERS])]


@pytest.fixture(scope="module", params=FAMILIES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = build_family(request.param, tmp_path_factory.mktemp("family"))
    yield Built(request.param, folder, load_model(folder)[0])
    Built.span.cache_clear()


def chunks() -> Iterator[mx.array]:
    place = 0
    for size in CHUNKS:
        yield mx.array([PROMPT[place : place + size]])
        place += size


def through(stages: list[Cut], x: mx.array, caches: list[list[Any]]) -> mx.array:
    for cut, own in zip(stages, caches, strict=True):
        x = cut(x, own)
    return x


def test_two_three_and_four_stages_give_bit_equal_logits(built: Built) -> None:
    whole = make_prompt_cache(built.whole)
    expected = [built.whole(x, cache=whole) for x in chunks()]
    assert expected[-1].std().item() > 0.1
    for count in BORDERS:
        stages = built.stages(count)
        caches = [cut.make_caches() for cut in stages]
        found = [through(stages, x, caches) for x in chunks()]
        mx.eval(found)
        for step, (logits, right) in enumerate(zip(found, expected, strict=True)):
            assert mx.isfinite(logits).all().item(), (count, step)
            assert mx.array_equal(logits, right).item(), (count, step)


def test_two_rows_of_unequal_length_decode_together_as_they_would_alone(built: Built) -> None:
    """The prompts are past the window, and of lengths that the batch must pad."""
    prompts = {SeqId(0): PROMPT[:19], SeqId(1): PROMPT[4:18]}
    assert all(len(prompt) > WINDOW for prompt in prompts.values())
    whole = [cut_model(built.whole, 0, LAYERS)]
    one, four = ((stages, [Rows(cut) for cut in stages]) for stages in (whole, built.stages(4)))

    def run(pipeline: tuple[list[Cut], list[Rows]], tokens: dict[SeqId, list[int]]) -> mx.array:
        stages, rows = pipeline
        return through(stages, mx.array([*tokens.values()]), [r.together([*tokens]) for r in rows])[:, -1]

    alone = {}
    for seq, prompt in prompts.items():
        for rows in one[1] + four[1]:
            rows.admit(seq)
        assert mx.array_equal(run(one, {seq: prompt}), run(four, {seq: prompt})).item()
        alone[seq] = make_prompt_cache(built.whole)
        mx.eval(built.whole(mx.array([prompt]), cache=alone[seq]))
    for step in range(2):
        tokens = {seq: [30 + step + 50 * seq] for seq in prompts}
        together = run(four, tokens)
        assert mx.array_equal(together, run(one, tokens)).item(), step
        for row, (seq, caches) in zip(together, alone.items(), strict=True):
            single = built.whole(mx.array([tokens[seq]]), cache=caches)[0, -1]
            assert built.name in SHIFTED or mx.allclose(row, single, **CLOSE).item(), (step, seq)


def test_a_wrong_hidden_state_changes_the_logits(built: Built) -> None:
    """The control: what the stages hand over does matter."""
    first, second = built.stages(2)
    hidden = first(mx.array([PROMPT]), first.make_caches())
    right = second(hidden, second.make_caches())
    noise = mx.random.normal(hidden.shape, key=mx.random.key(1)) * hidden.std()
    wrong = second(hidden + noise, second.make_caches())
    assert mx.abs(right - wrong).max().item() > right.std().item()


def test_only_the_ends_hold_the_vocabulary(built: Built) -> None:
    """A middle stage keeps neither embedding nor head, the ends no more than they use."""

    def tables(cut: Cut) -> int:
        arrays: Any = tree_flatten(cut.model.parameters())
        return sum(array.ndim == 2 and VOCAB in array.shape for _, array in arrays)

    assert [tables(cut) for cut in built.stages(4)] == [1, 0, 0, 1]


def test_the_table_names_exactly_the_families_that_are_compared() -> None:
    compared = {config_of(name)["model_type"] for name in FAMILIES}
    assert compared | {tiny.config["model_type"] for tiny in TINY.values()} == CUTTABLE


SHARES = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
EMBEDS = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gemma3n", {"text_config": SHARES}),
        ("gemma3n", {"text_config": {}}),
        ("gemma4", {"text_config": SHARES}),
        ("gemma4", {"text_config": EMBEDS}),
        ("gemma4_text", SHARES),
        ("gemma4_text", EMBEDS),
        # mlx-lm's defaults share.
        ("gemma4", {"text_config": {}}),
        ("gemma4_text", {}),
        ("hunyuan", {"use_cla": True}),
    ],
)
def test_layers_that_read_more_than_the_hidden_state_are_refused_by_name(
    model_type: str, config: dict[str, Any]
) -> None:
    with pytest.raises(CannotSplit, match=f"{model_type}: its layers share .*--stages 1"):
        refuse_uncuttable(model_type, config)


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "llama4", "mamba2", "no_such_family"])
def test_a_family_outside_the_table_is_refused_when_split(model_type: str) -> None:
    with pytest.raises(CannotSplit, match=f"{model_type}: splitting this family was never checked"):
        refuse_uncuttable(model_type, {})


def test_a_gemma4_with_shared_keys_is_refused_when_split_and_served_whole(tmp_path: Path) -> None:
    folder = build_family("gemma4_text", tmp_path, **SHARES)
    with pytest.raises(CannotSplit, match="gemma4_text"):
        load_span(folder, 0, 3, lambda done, total: None)
    assert load_span(folder, 0, None, lambda done, total: None).last
