"""`omlx cluster plan` as its user meets it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from omlx.errors import BadSetting, DoesNotFit, ModelNotFound
from omlx.plan_command import plan

Tiny = Callable[[str], Path]
app = typer.Typer()
app.command()(plan)
NODES = ("--node", "studio=64GB@400GBps,headless", "--node", "mini=16GB@m4")


def run(*words: str | Path | int, **environment: str) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"} | environment)


def test_a_table_of_nodes_and_what_they_will_do(tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), *NODES, "--context", 100)
    assert done.exit_code == 0, done
    assert "studio" in done.stdout and "0 to " in done.stdout and "57.60 GB" in done.stdout
    for line in ("one stream", "together", "first token", "what binds", "left out: mini: slower"):
        assert line in done.stdout


def test_explain_says_how_good_it_is_and_by_which_figures(tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), *NODES, "--explain", "--node", "old=8GB")
    assert "no order, choice of nodes or split is better" in done.stdout
    assert "280 GB/s" in done.stdout and "(as told)" in done.stdout
    assert "the least slowest stage instead:" in done.stdout


def test_json_is_one_object_with_bytes_and_seconds(tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), *NODES, "--json", "--sequences", 4, "--link", "thunderbolt")
    said = json.loads(done.stdout)
    assert said["objective"] == "throughput" and said["sequences"] == 4
    assert said["stages"][0]["start"] == 0
    assert all(stage["headroom_bytes"] > 0 for stage in said["stages"])
    assert len(said["stages"]) + len(said["left_out"]) == 2
    assert said["single_tokens_per_s"] > 0 and said["first_token_s"] > 0


def test_without_a_node_it_is_this_machine(tiny: Tiny) -> None:
    said = json.loads(run(tiny("tiny-llama"), "--json").stdout)
    assert len(said["stages"]) == 1 and said["left_out"] == []


def test_a_model_is_found_by_its_id_too(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(tiny("tiny-llama"))
    found = {"OMLX_MODELS": str(tmp_path)}
    assert run("good", *NODES, **found).exit_code == 0
    assert isinstance(run("bad", *NODES, **found).exception, ModelNotFound)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--node", "mini=100kB"), DoesNotFit, "short"),
        (("--node", "mini"), BadSetting, "name=SIZE"),
        (("--node", "mini=1GB@fast"), BadSetting, "@400GBps"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    tiny: Tiny, words: tuple[str, ...], error: type[Exception], says: str
) -> None:
    done = run(tiny("tiny-llama"), *words)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)


def test_a_name_with_markup_is_shown_as_it_is(tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), "--node", "[red]mac[/red]=64GB")
    assert "[red]mac[/red]" in done.stdout
