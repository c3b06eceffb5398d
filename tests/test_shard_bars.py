"""How a shard map looks in a terminal."""

import io
from dataclasses import replace

from rich.console import Console

from omlx.cluster.shard_map import ModelView, ShardMap
from omlx.shard_bars import BAR_CELLS, bar, colours_of, draw, widths
from omlx.status_command import watched
from tests.control_server import IDLE, MAP, MINI, MODEL, STUDIO, stage, with_lost_stage


def shown(what: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def split(*ends: int) -> ModelView:
    starts = (0, *ends[:-1])
    stages = tuple(stage("studio", STUDIO, start, end) for start, end in zip(starts, ends, strict=True))
    return replace(MODEL, layers=ends[-1], stages=stages)


def test_a_bar_is_as_wide_as_the_spans_are_long_and_names_the_last_layer_included() -> None:
    assert shown(bar(MODEL, colours_of(MAP))).rstrip() == f"  studio 0-15 {'█' * 32} mini 16-23 {'█' * 16}"


def test_every_stage_has_a_block_and_equal_spans_fill_the_bar_exactly() -> None:
    assert widths(split(1, 99, 100)) == [1, BAR_CELLS, 1]
    assert all(sum(widths(split(*range(1, n + 1)))) == BAR_CELLS for n in range(1, BAR_CELLS + 1))
    assert min(widths(split(*range(1, 129)))) == 1


def test_the_map_shows_nodes_models_and_stages() -> None:
    text = shown(draw(MAP))
    for word in (
        "cluster c1",
        "studio (here)",
        "64.00 GB",
        "40.00 GB",
        "16.00 GB",
        "Org/Name",
        "25%",
        "idle",
    ):
        assert word in text
    assert "3 running, 4 waiting, epoch 2, 1 recovery" in text
    assert "busy" not in shown(draw(ShardMap(None, MAP.nodes, (IDLE,)))), "no stages, no table of them"
    assert "in no cluster" in shown(draw(ShardMap(None, (), ())))


def test_a_lost_stage_is_named_and_drawn_otherwise() -> None:
    text = shown(draw(with_lost_stage(MAP)))
    assert "lost: mini 16-23" in text and "░" * 16 in text and "no answer since 5 s" in text


def test_nodes_differ_in_colour_and_names_of_unknown_ones_have_one_too() -> None:
    strange = ShardMap("c1", MAP.nodes, (replace(MODEL, stages=(stage("gone", MINI, 0, 24),)),))
    colours = colours_of(strange)
    assert len(set(colours.values())) == 3
    assert "gone 0-23" in shown(draw(strange))


def test_what_others_called_their_model_is_no_markup() -> None:
    odd = replace(MAP, models=(replace(MODEL, id="[red]x[/]", why="[b]"),))
    assert "[red]x[/]" in shown(draw(odd)) and "[b]" in shown(draw(odd))


def test_a_server_that_went_away_leaves_its_last_map_and_says_since_when() -> None:
    text = shown(watched(MAP, "no server answers at 127.0.0.1:8000", 12.4))
    assert "no answer from the server since 12 s" in text and "mini 16-23" in text
    assert "since 3 s" in shown(watched(None, "it is silent", 3.0))
    assert "no answer" not in shown(watched(MAP, None, 0.0))
