"""Fetching a model from a hub on loopback, through the library and the process that runs it."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.errors import ModelNotFound, Refused
from omlx.node.hub import HubName, fetch, find_here, parse_name
from omlx.node.library import scan
from tests.hub_server import Hub, hub_server

CHUNK = 10 << 20
"""What the library takes from a connection before it writes."""
CONFIG = b'{"model_type": "llama"}'
BIG = os.urandom(2 * CHUNK + 4096)
SMALL = {
    "config.json": CONFIG,
    "model.safetensors": b"weights",
    "tokenizer.model": b"",
    "chat_template.jinja": b"{{ messages }}",
}
NAME = HubName("org/name")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server(tmp_path, monkeypatch) as hub:
        hub.add("org/name", dict(SMALL))
        yield hub


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def silent(what: str, done: int, total: int) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("org/name", HubName("org/name", "main")),
        ("mlx-community/Qwen3-0.6B-4bit", HubName("mlx-community/Qwen3-0.6B-4bit", "main")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
    ],
)
def test_a_name_of_the_hub(word: str, name: HubName) -> None:
    assert parse_name(word) == name


@pytest.mark.parametrize(
    "word",
    [
        "name",
        "./name",
        "../name",
        "/tmp/name",
        "~/name",
        "org/name/more",
        "org/name@",
        "org/name@../../etc",
        "org/name@/etc",
        "org/..",
        "org/na--me",
        "org/name.git",
        "org /name",
        "org/name\n",
        "org/" + "x" * 100,
    ],
)
def test_what_is_no_name_of_the_hub(word: str) -> None:
    assert parse_name(word) is None


def test_a_fetched_model_has_what_is_served_and_nothing_else(hub: Hub, models: Path) -> None:
    more = ("README.md", "consolidated.safetensors", "pytorch_model.bin", ".gitattributes", ".json")
    hub.add("org/name", SMALL | dict.fromkeys(more, b"x"))
    told: list[tuple[int, int]] = []
    folder = fetch(NAME, models, lambda what, done, total: told.append((done, total)))
    assert contents(folder) == SMALL
    assert told[-1] == (sum(map(len, SMALL.values())),) * 2
    assert find_here(NAME, models) == folder
    assert [entry.id for entry in scan(models).entries] == ["org/name"]
    assert [entry.id for entry in scan(folder).entries] == ["org/name"]


def test_what_is_here_is_found_without_a_request(hub: Hub, models: Path) -> None:
    folder = fetch(HubName("org/name", "v1"), models, silent)
    asked = len(hub.asked)
    assert find_here(HubName("org/name", "v1"), models) == folder
    assert find_here(HubName("org/name", hub.commit("org/name")), models) == folder
    assert find_here(NAME, models) is None, "what main is was never asked"
    assert find_here(HubName("org/other"), models) is None
    assert len(hub.asked) == asked


def test_another_name_for_the_same_commit_costs_one_request(hub: Hub, models: Path) -> None:
    folder = fetch(HubName("org/name", "v1"), models, silent)
    asked = len(hub.asked)
    assert fetch(NAME, models, silent) == folder
    assert len(hub.asked) == asked + 1
    assert find_here(NAME, models) == folder


def test_a_model_put_into_the_models_folder_by_hand_is_found(models: Path) -> None:
    folder = models / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    assert find_here(NAME, models) == folder
    assert find_here(HubName("org/name", "v1"), models) is None


@pytest.mark.parametrize("text", ["../../../etc", "", "a" * 39, "A" * 40, "\xe9"])
def test_a_ref_that_names_no_commit_leads_nowhere(text: str, models: Path) -> None:
    kept = models / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "snapshots").mkdir()
    (kept / "refs" / "main").write_text(text, encoding="utf-8")
    assert find_here(NAME, models) is None


def test_a_connection_that_breaks_off_is_gone_on_with(hub: Hub, models: Path) -> None:
    hub.add("org/name", SMALL | {"model.safetensors": BIG})
    hub.cut_after = CHUNK + 1000
    folder = fetch(NAME, models, silent)
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert hub.ranges("model.safetensors") == [None, f"bytes={CHUNK}-", f"bytes={2 * CHUNK}-"]


def test_a_hub_that_fails_halfway_leaves_nothing_that_looks_whole(hub: Hub, models: Path) -> None:
    """And what had arrived is not asked for again."""
    hub.refusals["/cdn/org/name/model.safetensors"] = (500, None)
    with pytest.raises(Refused, match=r"answers with 500.*goes on from there"):
        fetch(NAME, models, silent)
    assert find_here(NAME, models) is None
    assert not (models / "models--org--name" / "snapshots").exists()
    arrived = contents(models / "models--org--name" / "arriving" / hub.commit("org/name"))
    hub.refusals.clear()
    hub.asked.clear()
    assert contents(fetch(NAME, models, silent)) == SMALL
    assert hub.ranges("model.safetensors") == [None]
    assert all(hub.ranges(name) == [] for name in arrived if not name.endswith(".part"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_bytes_than_the_hub_promised_are_deleted(hub: Hub, models: Path, name: str) -> None:
    hub.spoiled = {name}
    with pytest.raises(Refused, match=rf"{name} came with other bytes"):
        fetch(NAME, models, silent)
    assert not list(models.rglob(f"{name}*"))
    hub.spoiled.clear()
    assert contents(fetch(NAME, models, silent)) == SMALL


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (404, "RepoNotFound", ModelNotFound, "no folder here, and http.* shows no such model"),
        (401, "RepoNotFound", ModelNotFound, "a private one needs HF_TOKEN"),
        (404, "RevisionNotFound", ModelNotFound, "no revision 'v9': name a branch"),
        (401, "GatedRepo", Refused, "gated: accept its terms at http.*/org/name, and set HF_TOKEN"),
        (403, "GatedRepo", Refused, "gated: accept its terms"),
        (401, None, Refused, "does not accept the token"),
        (403, None, Refused, "may not read it"),
        (429, None, Refused, "asks for patience"),
        (500, None, Refused, "answers with 500"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(
    hub: Hub, models: Path, status: int, code: str | None, kind: type[Refused], says: str
) -> None:
    hub.refusals["/api/models/org/name"] = (status, code)
    with pytest.raises(kind, match=says) as raised:
        fetch(HubName("org/name", "v9"), models, silent)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value) and str(raised.value).startswith(
        "org/name@v9 is no folder here, and "
    )
    assert not models.exists()


def test_no_network_and_a_wish_for_none_are_one_line(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Refused, match=r"http://127\.0\.0\.1:9 cannot be reached.*check the network"):
        fetch(NAME, models, silent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refused, match="HF_HUB_OFFLINE is set"):
        fetch(NAME, models, silent)


def test_a_repository_without_weights_for_us_is_not_fetched(hub: Hub, models: Path) -> None:
    hub.add("org/name", {"config.json": CONFIG, "model.gguf": b"weights"})
    with pytest.raises(Refused, match=r"/org/name has no model\*\.safetensors: only models as mlx-lm saves"):
        fetch(NAME, models, silent)
    assert not models.exists() and len(hub.asked) == 1


def test_a_model_larger_than_the_disk_is_refused_at_once(hub: Hub, models: Path) -> None:
    hub.claims["model.safetensors"] = 10**18
    with pytest.raises(Refused, match=r"needs 1,000,000,000\.0 GB more where .* GB are free.*OMLX_MODELS"):
        fetch(NAME, models, silent)
    assert len(hub.asked) == 1


def test_two_do_not_write_into_the_same_files(hub: Hub, models: Path) -> None:
    kept = models / "models--org--name"
    kept.mkdir(parents=True)
    with (kept / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="another omlx is fetching it now"):
            fetch(NAME, models, silent)
    assert contents(fetch(NAME, models, silent)) == SMALL


def test_a_folder_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=f"{tmp_path}/file.* cannot be written"):
        fetch(NAME, tmp_path / "file" / "models", silent)


def test_the_token_of_the_environment_is_shown_to_the_hub(
    hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(HubName("org/name", "v1"), models / "without", silent)
    assert hub.tokens == {None}
    hub.tokens.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(NAME, models, silent)
    assert hub.tokens == {"Bearer hf_secret"}
