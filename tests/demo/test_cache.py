"""The cache folder, and folders that are whole or absent."""

import threading
from pathlib import Path

import pytest

from omlx.demo.cache import build_whole, default_cache, is_whole
from omlx.errors import BadSetting


def test_each_platform_has_its_place_for_caches() -> None:
    home = Path.home()
    assert default_cache({}, "darwin") == home / "Library/Caches/omlx"
    assert default_cache({}, "linux") == home / ".cache/omlx"
    assert default_cache({"XDG_CACHE_HOME": "/var/c"}, "linux") == Path("/var/c/omlx")
    assert default_cache({"XDG_CACHE_HOME": "/var/c"}, "darwin") == home / "Library/Caches/omlx"


def test_a_relative_xdg_folder_is_ignored_as_its_specification_says() -> None:
    assert default_cache({"XDG_CACHE_HOME": "here"}, "linux") == Path.home() / ".cache/omlx"


def test_omlx_cache_dir_overrides_and_must_be_absolute() -> None:
    assert default_cache({"OMLX_CACHE_DIR": "/data/omlx", "XDG_CACHE_HOME": "/x"}) == Path("/data/omlx")
    assert default_cache({"OMLX_CACHE_DIR": "~/o"}) == Path.home() / "o"
    with pytest.raises(BadSetting, match="OMLX_CACHE_DIR"):
        default_cache({"OMLX_CACHE_DIR": "relative"})


def test_a_folder_built_by_another_recipe_is_built_anew(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_whole(folder, "one", lambda beside: beside.joinpath("old").touch())
    build_whole(folder, "two", lambda beside: beside.joinpath("new").touch())
    assert is_whole(folder, "two")
    assert not is_whole(folder, "one")
    assert not (folder / "old").exists()
    assert (folder / "new").exists()


def test_a_folder_without_its_stamp_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    build_whole(folder, "one", lambda beside: beside.joinpath("config.json").write_text("{}"))
    assert (folder / "config.json").read_text() == "{}"


def test_a_builder_that_fails_leaves_no_folder_and_the_next_one_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def fail(beside: Path) -> None:
        (beside / "half").touch()
        raise ConnectionError("in the middle")

    with pytest.raises(ConnectionError):
        build_whole(folder, "one", fail)
    assert not folder.exists()
    build_whole(folder, "one", lambda beside: beside.joinpath("all").touch())
    assert (folder / "all").exists()
    assert not (folder / "half").exists()


def test_of_several_builders_at_once_one_builds_and_all_get_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    everyone_is_here = threading.Barrier(4)
    built: list[Path] = []
    got: list[Path] = []

    def make(beside: Path) -> None:
        built.append(beside)
        (beside / "weights").write_bytes(b"w" * 100_000)

    def builder() -> None:
        everyone_is_here.wait(10)
        got.append(build_whole(folder, "one", make))

    threads = [threading.Thread(target=builder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [folder] * 4
    assert len(built) == 1
    assert (folder / "weights").stat().st_size == 100_000
