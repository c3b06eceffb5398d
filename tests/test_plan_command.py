"""`omlx cluster plan` as its user meets it: it foretells what `omlx serve` does, and what it would do."""

import json
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from omlx.cluster.members import Joined, add_member
from omlx.cluster.offer import Terms
from omlx.cluster.trust import init_trust
from omlx.errors import BadSetting, DoesNotFit, ModelNotFound, Refused
from omlx.plan_command import plan
from tests.cluster.known_speed import know_speed
from tests.cluster.test_control import at, greeting
from tests.cluster.test_offer import MINI, OTHER
from tests.control_server import OFFER, ScriptedControl, in_a_thread
from tests.walk.servers import free_port, serve

Tiny = Callable[[str], Path]
app = typer.Typer()
app.command()(plan)
GB = 10**9
NODES = ("--only", "--node", "studio=64GB@400GBps,headless", "--node", "mini=16GB@m4")
HERE = platform.node().split(".")[0] or "here"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Servers under test log in this process."""
    with capture_logs():
        yield


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a person without a cluster."""
    know_speed(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def run(home: Path) -> Callable[..., Result]:
    """Nobody serves at the port, unless it says another one."""

    def run(*words: str | Path | int, **environment: str) -> Result:
        given = {"COLUMNS": "200", "HOME": str(home), "OMLX_PORT": str(free_port())} | environment
        return CliRunner().invoke(app, list(map(str, words)), env=given)

    return run


Run = Callable[..., Result]


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def budgets(said: dict[str, Any]) -> dict[str, int]:
    return {stage["node"]: stage["budget_bytes"] for stage in said["stages"]}


def left_out(said: dict[str, Any]) -> dict[str, str]:
    return {one["node"]: one["why"] for one in said["left_out"]}


# ------------------------------------------------------------------ what it shows


def test_a_table_of_nodes_and_what_they_will_do(run: Run, tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), *NODES, "--context", 100)
    assert done.exit_code == 0, done
    assert "studio" in done.stdout and "0 to " in done.stdout and "57.60 GB" in done.stdout
    for line in ("one stream", "together", "first token", "what binds", "left out: mini: slower"):
        assert line in done.stdout


def test_explain_says_how_good_it_is_and_by_which_figures(run: Run, tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), *NODES, "--explain", "--node", "old=8GB")
    assert "no order, choice of nodes or split is better" in done.stdout
    assert "280 GB/s" in done.stdout and "(as told)" in done.stdout
    assert "the least slowest stage instead:" in done.stdout


def test_json_is_one_object_with_bytes_and_seconds(run: Run, tiny: Tiny) -> None:
    said = as_json(run(tiny("tiny-llama"), *NODES, "--json", "--sequences", 4, "--link", "thunderbolt"))
    assert said["objective"] == "throughput" and said["sequences"] == 4
    assert said["stages"][0]["start"] == 0
    assert all(stage["headroom_bytes"] > 0 for stage in said["stages"])
    assert len(said["stages"]) + len(said["left_out"]) == 2
    assert said["single_tokens_per_s"] > 0 and said["first_token_s"] > 0
    assert said["by"] == "imagined"


def test_a_name_with_markup_is_shown_as_it_is(run: Run, tiny: Tiny) -> None:
    done = run(tiny("tiny-llama"), "--only", "--node", "[red]mac[/red]=64GB")
    assert "[red]mac[/red]" in done.stdout


def test_a_model_is_found_by_its_id_too(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(tiny("tiny-llama"))
    found = {"OMLX_MODELS": str(tmp_path)}
    assert run("good", *NODES, **found).exit_code == 0
    assert isinstance(run("bad", *NODES, **found).exception, ModelNotFound)
    assert isinstance(run("bad", *NODES, OMLX_MODELS=str(tmp_path / "none")).exception, BadSetting)


def test_the_models_folder_that_nobody_named_is_found_in_the_home(run: Run, tiny: Tiny, home: Path) -> None:
    (home / ".omlx" / "models").mkdir(parents=True)
    (home / ".omlx" / "models" / "good").symlink_to(tiny("tiny-llama"))
    assert as_json(run("good", "--json"))["model"]


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--node", "mini=100kB"), DoesNotFit, "short"),
        (("--node", "mini"), BadSetting, "name=SIZE"),
        (("--node", "mini=1GB@fast"), BadSetting, "@400GBps"),
        ((), Refused, "at least one node"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    run: Run, tiny: Tiny, words: tuple[str, ...], error: type[Exception], says: str
) -> None:
    done = run(tiny("tiny-llama"), "--only", *words)
    assert isinstance(done.exception, error)
    assert says in str(done.exception)


# ------------------------------------------------------------------ without a server


def test_without_a_cluster_it_is_this_machine_and_those_that_are_imagined(run: Run, tiny: Tiny) -> None:
    alone = as_json(run(tiny("tiny-llama"), "--json"))
    assert list(budgets(alone)) == [HERE] and left_out(alone) == {}
    assert (alone["by"], alone["context_tokens"], alone["sequences"]) == ("disk", 4096, 1)
    with_one = as_json(run(tiny("tiny-llama"), "--json", "--node", "studio=64GB@800GBps"))
    assert budgets(with_one).keys() | left_out(with_one).keys() == {HERE, "studio"}


def test_the_settings_of_serve_are_those_of_the_plan(run: Run, tiny: Tiny) -> None:
    many = as_json(run(tiny("tiny-llama"), "--json", OMLX_OBJECTIVE="throughput"))
    assert (many["objective"], many["sequences"], many["context_tokens"]) == ("throughput", 8, 512)
    kept, not_kept = (
        as_json(run(tiny("tiny-llama"), "--json", "--node", f"{HERE}=1GB", **flags))
        for flags in ({"OMLX_HOT_CACHE_MAX_SIZE": "25%"}, {"OMLX_CACHE": "off"})
    )
    assert (budgets(kept)[HERE], budgets(not_kept)[HERE]) == (GB * 3 // 4, GB)
    bits = as_json(run(tiny("tiny-llama"), "--json", OMLX_KV_BITS="8"))
    assert bits["stages"][0]["kv_bytes"] < not_kept["stages"][0]["kv_bytes"]


@pytest.fixture
def members(home: Path) -> Callable[..., None]:
    """`members(MINI)` joined the cluster that this machine has made."""

    def join(*nodes: Joined) -> None:
        trust = init_trust(home / ".omlx" / "cluster", "head", ["localhost"], ["127.0.0.1"])
        for node in nodes:
            add_member(trust.folder, node)

    return join


def test_members_give_what_serve_would_take_and_those_that_do_not_answer_are_left_out(
    run: Run, tiny: Tiny, members: Callable[..., None]
) -> None:
    gifts = {"OMLX_NODES": json.dumps({HERE: "100kB", "mini.local": "6GB"}), "OMLX_CACHE": "off"}
    with greeting() as port:
        members(at(MINI, port), at(OTHER, free_port()))
        said = as_json(run(tiny("tiny-llama"), "--json", **(gifts | {"OMLX_NODES": '{"mini": "6GB"}'})))
        small = as_json(
            run(tiny("tiny-llama"), "--json", "--node", f"{HERE}=100kB", "--node", "mini=5GB", **gifts)
        )
        alone = as_json(run(tiny("tiny-llama"), "--json", OMLX_CLUSTER="off", **gifts))
    assert left_out(said)["mini-cccc"] == "it does not answer" and said["by"] == "disk"
    assert budgets(said).keys() | left_out(said).keys() == {HERE, "mini", "mini-cccc"}
    assert budgets(small) == {"mini": 5 * GB}
    assert list(budgets(alone)) == [HERE]


# ------------------------------------------------------------------ beside a server


def test_a_running_server_is_asked_what_it_has_measured(run: Run, tiny: Tiny) -> None:
    control = ScriptedControl(offered=replace(OFFER, terms=Terms(objective="throughput", places=4)))
    with in_a_thread(control) as port:
        said = as_json(run(tiny("tiny-llama"), "--json", "--port", port))
        text = run(tiny("tiny-llama"), "--explain", "--port", port).stdout
    assert control.asked[0] == ("offer", str(tiny("tiny-llama").resolve()))
    assert (said["by"], said["objective"], said["sequences"]) == ("server", "throughput", 4)
    assert budgets(said).keys() | left_out(said).keys() == {"studio", "mini"}
    assert {stage["rates_from"] for stage in said["stages"]} == {"measured"}
    assert f"the server at 127.0.0.1:{port}" in text and "(measured)" in text


def test_a_model_that_only_the_server_knows_is_read_from_its_folder(run: Run, tiny: Tiny) -> None:
    control = ScriptedControl(offered=replace(OFFER, folder=str(tiny("tiny-llama"))))
    with in_a_thread(control) as port:
        said = as_json(run("Org/Name", "--json", "--port", port))
    assert said["model"] == tiny("tiny-llama").name and control.asked == [("offer", "Org/Name")]


def test_what_is_imagined_comes_on_top_of_what_the_server_says(run: Run, tiny: Tiny) -> None:
    with in_a_thread(ScriptedControl()) as port:
        words = ("--node", "studio=100kB", "--node", "mini=3GB", "--node", "air=8GB@10GBps")
        said = as_json(run(tiny("tiny-llama"), "--json", "--port", port, *words))
    assert budgets(said) == {"mini": 3 * GB} and left_out(said).keys() == {"studio", "air"}


@pytest.mark.parametrize("control", [None, ScriptedControl()])
def test_beside_a_server_of_another_kind_it_is_planned_without_and_that_is_told(
    run: Run, tiny: Tiny, control: ScriptedControl | None
) -> None:
    with in_a_thread(control, api_key="correct-horse" if control else None) as port:
        result = run(tiny("tiny-llama"), "--json", "--port", port)
    assert as_json(result)["by"] == "disk"
    assert ("OMLX_API_KEY" if control else "no omlx server") in result.stderr


def test_a_real_server_puts_a_model_where_the_plan_says(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("tiny-llama"), folder)
    before = as_json(run(folder, "--json"))
    with serve(folder) as server:
        port = server.url.rpartition(":")[2]
        by_folder, by_id = (as_json(run(word, "--json", "--port", port)) for word in (folder, "model"))
    assert (before["by"], by_folder["by"], by_id["by"]) == ("disk", "server", "server")
    spans = [[(one["node"], one["start"], one["end"]) for one in said["stages"]] for said in (before, by_id)]
    assert spans[0] == spans[1] and budgets(by_folder).keys() == {HERE}
