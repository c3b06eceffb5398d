"""A cut model computes bit for bit what mlx-lm's whole one does, family by family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from omlx.errors import BadModel, CannotSplit, OutOfStep
from omlx.ids import SeqId
from omlx.node.loader import load_span
from omlx.node.rows import Rows
from omlx.node.slicing import Cut
from tests.models.tiny import FAMILIES

Tiny = Callable[[str], Path]
PROMPT = [(7 * i + 11) % 700 + 20 for i in range(45)]
CHUNKS = (17, 5, 21, 1, 1)
"""Together past the tiny models' sliding window of 32, and then two steps of decode."""


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def cuts(folder: Path, stages: int) -> list[Cut]:
    """The model in `stages` unequal stages: the first has what the others leave."""
    layers = load_span(folder, 0, None, silent).layers
    starts = [0, *range(layers - stages + 1, layers)]
    return [
        load_span(folder, start, end, silent)
        for start, end in zip(starts, [*starts[1:], layers], strict=True)
    ]


def whole_logits(folder: Path) -> list[mx.array]:
    """mlx-lm's own model over the chunks."""
    model, _ = load_model(folder)
    caches = make_prompt_cache(model)
    found, place = [], 0
    for size in CHUNKS:
        found.append(model(mx.array([PROMPT[place : place + size]]), cache=caches))
        mx.eval(found[-1], [cache.state for cache in caches])
        place += size
    return found


def through(stages: list[Cut], x: mx.array, caches: list[list[Any]]) -> mx.array:
    for cut, own in zip(stages, caches, strict=True):
        x = cut(x, own)
        mx.eval(x, [cache.state for cache in own])
    return x


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", [*FAMILIES, "tiny-llama-4bit", "tiny-llama-tied"])
def test_stages_give_bit_equal_logits_with_the_unsplit_model(name: str, stages: int, tiny: Tiny) -> None:
    folder = tiny(name)
    parts = cuts(folder, stages)
    caches = [cut.make_caches() for cut in parts]
    place = 0
    for size, expected in zip(CHUNKS, whole_logits(folder), strict=True):
        logits = through(parts, mx.array([PROMPT[place : place + size]]), caches)
        assert mx.isfinite(logits).all().item()
        assert mx.array_equal(logits, expected).item()
        place += size


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("members", "leaves"),
    [
        pytest.param([[0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 2], [2], [0]], [1], id="join and leave"),
        pytest.param([[0, 1, 2, 3], [3, 1], [2, 0], [1, 2], [3, 0], [0, 1, 2, 3]], [], id="regroup"),
        pytest.param([[0, 1, 2, 3], [0, 1, 2, 3], [0, 3], [3]], [1, 2], id="leave together"),
    ],
)
def test_rows_in_changing_company_compute_what_they_would_alone(
    name: str, members: list[list[int]], leaves: list[int], tiny: Tiny
) -> None:
    """Rows of unequal length over two stages. Who leaves does so when it is asked for the last time."""
    parts = cuts(tiny(name), 2)
    prompts = {0: PROMPT[:40], 1: PROMPT[:3], 2: PROMPT[5:19], 3: PROMPT[2:35]}
    alone = {seq: [Rows(cut) for cut in parts] for seq in prompts}
    shared = [Rows(cut) for cut in parts]
    for seq in prompts:
        for rows in [*alone[seq], *shared]:
            rows.admit(SeqId(seq))

    def run(rows: list[Rows], seqs: list[int], tokens: list[list[int]]) -> mx.array:
        ids = [SeqId(seq) for seq in seqs]
        return through(parts, mx.array(tokens), [r.together(ids) for r in rows])[:, -1]

    for seq, prompt in prompts.items():
        for rows in (alone[seq], shared):
            run(rows, [seq], [prompt])
    here = set(leaves)
    for step, asked in enumerate(members):
        if here and not any(here & set(later) for later in members[step:]):
            for rows in shared:
                rows.drop(map(SeqId, here))
            here.clear()
        tokens = [[30 + step + 3 * seq] for seq in asked]
        together = run(shared, asked, tokens)
        for row, seq in enumerate(asked):
            single = run(alone[seq], [seq], [tokens[row]])
            assert mx.allclose(together[row], single[0], atol=2e-4, rtol=1e-4).item(), (step, seq)


def test_rows_that_end_in_one_plan_cost_the_others_one_copy(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers that ended together stopped the others for a second on a fast GPU."""
    [cut] = cuts(tiny("tiny-llama"), 1)
    rows, ids = Rows(cut), [SeqId(seq) for seq in range(6)]
    for seq in ids:
        rows.admit(seq)
        through([cut], mx.array([PROMPT[:9]]), [rows.together([seq])])
    rows.together(ids)
    copies: list[int] = []
    copy_rows = BatchKVCache.filter

    def count(cache: BatchKVCache, places: mx.array) -> None:
        copies.append(places.size)
        copy_rows(cache, places)

    monkeypatch.setattr(BatchKVCache, "filter", count)
    rows.drop(ids[1:4])
    assert copies == [3] * cut.layers
    with pytest.raises(OutOfStep):
        rows.drop(ids[1:2])


def test_a_wrong_hidden_state_changes_the_logits(tiny: Tiny) -> None:
    """The control: what the stages hand over does matter."""
    first, second = cuts(tiny("tiny-llama"), 2)
    hidden = first(mx.array([PROMPT[:9]]), first.make_caches())
    right = second(hidden, second.make_caches())
    wrong = second(hidden + 0.5, second.make_caches())
    assert mx.abs(right - wrong).max().item() > 0.1


def test_only_the_spans_parameters_are_left(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")
    sizes: list[int] = []
    load_span(folder, 1, 3, lambda done, total: sizes.append(total))
    load_span(folder, 0, None, lambda done, total: sizes.append(total))
    layer = (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) * 4
    # Both norms and the head's norm count; a middle stage keeps the final norm (64 floats), no more.
    assert sizes[0] == 2 * layer + 64 * 4
    assert sizes[1] == 4 * layer + 64 * 4 + 2 * 768 * 64 * 4


def test_a_family_never_compared_is_refused_by_name_and_served_whole(tiny: Tiny, tmp_path: Path) -> None:
    folder = copied(tiny("tiny-llama"), tmp_path, model_type="helium")
    with pytest.raises(CannotSplit, match="helium"):
        load_span(folder, 0, 2, silent)
    assert load_span(folder, 0, None, silent).layers == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"num_hidden_layers": 5}, "layers.4"),
        ({"hidden_size": 72}, "72"),
    ],
)
def test_a_model_that_mlx_lm_cannot_open_is_refused_before_anything_is_read(
    change: dict[str, Any], message: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = copied(tiny("tiny-llama"), tmp_path, **change)
    with pytest.raises(BadModel, match=message):
        load_span(folder, 0, None, silent)


def test_a_parameter_without_a_tensor_is_an_error_and_never_random(tiny: Tiny, tmp_path: Path) -> None:
    folder = copied(tiny("tiny-llama"), tmp_path)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    del weights["model.layers.2.mlp.up_proj.weight"]
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(BadModel, match=r"layers\.2\.mlp\.up_proj"):
        load_span(folder, 0, 2, silent)


def copied(folder: Path, into: Path, **config: Any) -> Path:
    """The model in another folder, with fields of its config.json changed."""
    import json
    import shutil

    target = into / "model"
    shutil.copytree(folder, target)
    found = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(found | config))
    return target
