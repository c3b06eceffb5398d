"""Which ids a folder of models has, and what the library refuses to look at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.errors import BadSetting, ModelNotFound
from omlx.node.library import Library, scan
from tests.builders import model_folder


def ids(library: Library) -> list[str]:
    return [entry.id for entry in library.entries]


def hub_model(
    root: Path, name: str, *, ref: str | None = "aaa", snapshots: tuple[str, ...] = ("aaa",)
) -> Path:
    repository = root / name
    for snapshot in snapshots:
        model_folder(repository / "snapshots" / snapshot)
    if ref is not None:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(ref)
    return repository


def test_a_model_folder_is_a_library_of_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "Tiny-Llama")
    library = scan(folder)
    assert ids(library) == ["Tiny-Llama"]
    assert library.find("Tiny-Llama").folder == folder
    assert library.find("Tiny-Llama").problem is None


def test_models_are_found_one_and_two_levels_down_and_no_deeper(tmp_path: Path) -> None:
    for place in ("b", "Org/a", "Org/c", "deep/er/still", ".hidden/x", "Org/.cache"):
        model_folder(tmp_path / place)
    (tmp_path / "notes.txt").write_text("no model")
    assert ids(scan(tmp_path)) == ["Org/a", "Org/c", "b"]


def test_an_empty_folder_has_no_models_and_a_missing_one_is_a_bad_setting(tmp_path: Path) -> None:
    assert scan(tmp_path).entries == ()
    with pytest.raises(BadSetting, match="does not exist"):
        scan(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match="is not a folder"):
        scan(tmp_path / "file")


def test_refs_main_decides_among_the_snapshots_of_a_hub_cache(tmp_path: Path) -> None:
    hub_model(tmp_path, "models--Org--Name", ref="bbb\n", snapshots=("aaa", "bbb"))
    hub_model(tmp_path, "models--gpt2")
    hub_model(tmp_path, "datasets--Org--Data")
    library = scan(tmp_path)
    assert ids(library) == ["Org/Name", "gpt2"]
    assert library.find("Org/Name").folder == tmp_path / "models--Org--Name" / "snapshots" / "bbb"
    assert library.find("Org/Name").problem is None


@pytest.mark.parametrize("ref", [None, "gone", "", "../../outside", "/etc", "..", "a\x00b"])
def test_a_hub_model_without_a_usable_ref_has_a_problem(ref: str | None, tmp_path: Path) -> None:
    model_folder(tmp_path / "outside")
    root = tmp_path / "root"
    hub_model(root, "models--Org--Name", ref=ref)
    (entry,) = scan(root).entries
    assert entry.id == "Org/Name"
    assert entry.problem is not None
    assert "refs/main" in entry.problem


def test_a_hub_model_given_by_its_own_folder_or_snapshot_keeps_its_name(tmp_path: Path) -> None:
    repository = hub_model(tmp_path, "models--Org--Name")
    assert ids(scan(repository)) == ["Org/Name"]
    assert ids(scan(repository / "snapshots" / "aaa")) == ["Org/Name"]


def test_an_incomplete_model_is_listed_with_its_problem(tmp_path: Path) -> None:
    model_folder(tmp_path / "good")
    (model_folder(tmp_path / "config-only") / "model.safetensors").unlink()
    (model_folder(tmp_path / "weights-only") / "config.json").unlink()
    problems = {entry.id: entry.problem for entry in scan(tmp_path).entries}
    assert problems["good"] is None
    assert "no model*.safetensors" in str(problems["config-only"])
    assert "config.json is missing" in str(problems["weights-only"])


def test_equal_leaf_names_have_different_ids(tmp_path: Path) -> None:
    for place in ("Q", "org/Q", "q"):
        model_folder(tmp_path / place)
    library = scan(tmp_path)
    assert ids(library) == ["Q", "org/Q", "q"]
    assert {entry.folder for entry in library.entries} == {
        tmp_path / "Q",
        tmp_path / "org" / "Q",
        tmp_path / "q",
    }


def test_an_id_that_stands_twice_is_served_from_the_first_place_and_says_so(tmp_path: Path) -> None:
    model_folder(tmp_path / "Org" / "Name")
    hub_model(tmp_path, "models--Org--Name")
    library = scan(tmp_path)
    assert ids(library) == ["Org/Name", "Org/Name"]
    assert library.find("Org/Name").folder == tmp_path / "Org" / "Name"
    assert [entry.problem is None for entry in library.entries] == [True, False]
    assert str(tmp_path / "Org" / "Name") in str(library.entries[1].problem)


def test_a_link_in_the_root_leads_to_its_model(tmp_path: Path) -> None:
    outside = model_folder(tmp_path / "elsewhere" / "big-model")
    root = tmp_path / "root"
    root.mkdir()
    (root / "mine").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "dead").symlink_to(tmp_path / "nowhere")
    library = scan(root)
    assert ids(library) == ["loop/mine", "mine"]
    assert library.find("mine").problem is None


def test_a_folder_that_may_not_be_read_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "good")
    (tmp_path / "locked").mkdir()
    listed = Path.iterdir

    def guarded(self: Path) -> Iterator[Path]:
        if self.name == "locked":
            raise PermissionError(13, "Permission denied", str(self))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", guarded)
    problems = {entry.id: entry.problem for entry in scan(tmp_path).entries}
    assert problems["good"] is None
    assert "Permission denied" in str(problems["locked"])


def test_an_unknown_id_names_at_most_ten_known_ones(tmp_path: Path) -> None:
    for number in range(12):
        model_folder(tmp_path / f"m{number:02d}")
    with pytest.raises(ModelNotFound) as caught:
        scan(tmp_path).find("no-such")
    message = str(caught.value)
    assert "'no-such'" in message
    assert "m00" in message
    assert "m09 and 2 more" in message
    assert "m10" not in message


@pytest.mark.parametrize(
    "asked",
    [
        *("../../etc", "/etc", "..\\..\\x", "%2e%2e%2fx", "a/../../b", "a\x00b", ".", "", "x" * 10_000),
        *("TINY", "tiny/", "./tiny", "sub/../tiny"),
    ],
)
def test_a_clients_string_is_never_taken_for_a_path(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "tiny")
    library = scan(tmp_path)

    def touched(self: Path, *_: object, **__: object) -> object:
        raise AssertionError(f"looked at {self}")

    for act in ("stat", "open", "exists", "is_dir", "iterdir", "resolve", "glob"):
        monkeypatch.setattr(Path, act, touched)
    with pytest.raises(ModelNotFound) as caught:
        library.find(asked)
    assert len(str(caught.value)) < 1000
    assert library.find("tiny").id == "tiny"
