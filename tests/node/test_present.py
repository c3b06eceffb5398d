"""Which bytes a span reads, and that nothing is ever computed with a hole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from omlx.errors import BadModel
from omlx.node.loader import load_span
from omlx.node.manifest import read_manifest
from omlx.node.present import (
    PRESENT,
    Layout,
    Present,
    PresentFile,
    Range,
    Stretch,
    is_read,
    joined,
    layout_of,
    refuse_absent,
    wanted_ranges,
    without,
)
from omlx.node.weight_files import read_weight_files
from tests.builders import llama_tensors, model_folder, write_safetensors
from tests.models.families import FAMILIES, LAYERS, build_family
from tests.models.tiny import TINY

Tiny = Callable[[str], Path]
RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda ends: (min(ends), max(ends))))


def layout(folder: Path) -> Layout:
    return layout_of(read_weight_files(folder))


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def holed(folder: Path, to: Path, start: int, end: int) -> Path:
    """A copy for layers [start, end), with bytes in its holes that make NaN of floats."""
    to.mkdir(parents=True)
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    noted = {"config.json": [(0, (to / "config.json").stat().st_size)]}
    for name, ranges in wanted_ranges(layout(folder), read_manifest(folder), start, end).items():
        data = (folder / name).read_bytes()
        copy = bytearray(b"\xff" * len(data))
        for first, last in ranges:
            copy[first:last] = data[first:last]
        (to / name).write_bytes(copy)
        noted[name] = list(ranges)
    note(to, noted)
    return to


def note(folder: Path, ranges: dict[str, list[Range]]) -> None:
    files = {
        name: PresentFile((), tuple(Stretch(first, last, "") for first, last in each))
        for name, each in ranges.items()
    }
    (folder / PRESENT).write_bytes(msgspec.json.encode(Present(files)))


def parameters(folder: Path, start: int, end: int) -> dict[str, mx.array]:
    flat: Any = tree_flatten(load_span(folder, start, end, silent).model.parameters())
    return dict(flat)


def assert_same_from_a_copy(folder: Path, tmp_path: Path, start: int, end: int) -> None:
    whole = parameters(folder, start, end)
    copied = parameters(holed(folder, tmp_path / f"{start}-{end}", start, end), start, end)
    assert whole.keys() == copied.keys()
    for name, array in whole.items():
        assert mx.array_equal(array, copied[name]).item(), name


# ------------------------------------------------------------------ what a span reads


@pytest.mark.parametrize("name", TINY)
def test_a_span_reads_the_bytes_that_the_planner_counts(name: str, tiny: Tiny) -> None:
    folder = tiny(name)
    manifest, files = read_manifest(folder), layout(folder)
    layers = manifest.num_layers
    for start, end in ((0, layers), (0, 1), (1, 2), (1, layers), (layers - 1, layers)):
        read = sum(
            last - first
            for tensor, (_, (first, last)) in files.tensors.items()
            if is_read(tensor, manifest, start, end)
        )
        behind = manifest.other_bytes if end < layers else 0
        assert read == manifest.span_bytes(start, end) + behind, (start, end)
        ranges = wanted_ranges(files, manifest, start, end)
        in_all = sum(last - first for each in ranges.values() for first, last in each)
        assert in_all == read + sum(files.headers.values())


@pytest.mark.parametrize("name", TINY)
def test_a_span_loads_the_same_weights_from_a_copy_with_holes(name: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny(name)
    layers = read_manifest(folder).num_layers
    for start, end in ((0, 1), (1, layers - 1), (layers - 1, layers)):
        assert_same_from_a_copy(folder, tmp_path, start, end)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_reads_a_hole(name: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    folder = build_family(name, tmp_path / "whole")
    for start, end in ((0, 2), (2, 5), (5, LAYERS)):
        assert_same_from_a_copy(folder, tmp_path, start, end)


def test_a_tied_embedding_is_read_on_both_ends_and_a_head_on_the_last_stage_alone(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = model_folder(tmp_path / str(tied), tie_word_embeddings=tied)
        manifest = read_manifest(folder)

        def ends(name: str, manifest: Any = manifest) -> list[bool]:
            return [is_read(name, manifest, start, start + 1) for start in range(3)]

        assert ends("model.embed_tokens.weight") == [True, False, tied]
        assert ends("lm_head.weight") == [False, False, not tied]
        assert ends("model.norm.weight") == [True, True, True]


def test_scales_of_fp8_are_read_with_their_layer_and_layers_beyond_the_config_never(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    scales = {"model.layers.1.mlp.up_proj.weight_scale_inv": ("F32", (1, 1))}
    packed = {"model.layers.1.mlp.up_proj.weight": ("F8_E4M3", (16, 8))}
    write_safetensors(folder / "model.safetensors", {**llama_tensors(4), **packed, **scales})
    manifest = read_manifest(folder)
    assert is_read(next(iter(scales)), manifest, 1, 2)
    assert not is_read(next(iter(scales)), manifest, 0, 1)
    assert not is_read("model.layers.3.mlp.up_proj.weight", manifest, 0, 3)
    assert not is_read("vision_tower.layers.1.mlp.up_proj.weight", manifest, 0, 3)


# ------------------------------------------------------------------ what is not there


def test_a_span_that_was_not_copied_is_refused_in_one_line_that_names_a_tensor(
    tiny: Tiny, tmp_path: Path
) -> None:
    copy = holed(tiny("tiny-llama"), tmp_path / "copy", 1, 3)
    for start, end, missed in ((0, 3, r"layers\.0\.|embed_tokens"), (1, None, r"layers\.3\.|lm_head")):
        with pytest.raises(BadModel, match=missed) as refused:
            load_span(copy, start, end, silent)
        assert "was not copied to this machine" in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_one_byte_that_is_not_there_is_enough(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tiny-llama")
    copy = holed(folder, tmp_path / "copy", 1, 3)
    manifest = read_manifest(folder)
    ((name, ranges),) = wanted_ranges(layout(folder), manifest, 1, 3).items()
    refuse_absent(copy, 1, 3)
    config = [(0, 10)]
    for lost in (ranges[0][1] - 1, ranges[-1][0], ranges[-1][1] - 1):
        note(copy, {"config.json": config, name: without(ranges, [(lost, lost + 1)])})
        with pytest.raises(BadModel, match="was not copied"):
            refuse_absent(copy, 1, 3)


def test_a_copy_that_has_only_begun_is_refused_as_such(tiny: Tiny, tmp_path: Path) -> None:
    copy = holed(tiny("tiny-llama"), tmp_path / "copy", 0, 4)
    (copy / "config.json").write_bytes(bytes(100))
    note(copy, {})
    with pytest.raises(BadModel, match=r"config\.json was not copied"):
        load_span(copy, 0, 4, silent)
    note(copy, {"config.json": [(0, 100)]})
    with pytest.raises(BadModel, match=r"model\.safetensors was not copied"):
        load_span(copy, 0, 4, silent)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"files": {"a": 1}}', b"\xff"])
def test_a_damaged_list_of_what_is_there_is_refused_by_name(text: bytes, tiny: Tiny, tmp_path: Path) -> None:
    copy = holed(tiny("tiny-llama"), tmp_path / "copy", 0, 4)
    (copy / PRESENT).write_bytes(text)
    with pytest.raises(BadModel, match=PRESENT):
        load_span(copy, 0, 4, silent)


# ------------------------------------------------------------------ ranges


def bytes_of(ranges: list[Range]) -> set[int]:
    return {place for start, end in ranges for place in range(start, end)}


@given(RANGES, RANGES)
def test_what_is_left_of_ranges_is_every_byte_that_is_not_there(
    wanted: list[Range], there: list[Range]
) -> None:
    left = without(wanted, there)
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(there)
    assert left == sorted(left) and all(start < end for start, end in left)
    assert bytes_of(joined(wanted)) == bytes_of(wanted)
    assert all(one[1] < other[0] for one, other in zip(joined(wanted), joined(wanted)[1:], strict=False))
