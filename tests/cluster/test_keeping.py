"""What all models of a server share: the cache folder, its budget, RAM's part."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omlx.cache.block import root_of
from omlx.cache.folder import Folder, usage
from omlx.cache.shelf import Shelf
from omlx.cluster import keeping as keeping_module
from omlx.cluster.keeping import Keeping, keeping
from omlx.cluster.local_site import share_out
from omlx.cluster.planner import NodeBudget, ShardPlan, Span, StagePlan
from omlx.errors import BadSetting
from omlx.ids import BlockId, ModelId
from omlx.settings import Settings
from tests.cache.block_samples import layers, new_chain

CEILING = 10**9


def settings(folder: Path, **given: object) -> Settings:
    return Settings.model_validate({"paged_ssd_cache_dir": folder, **given})


@contextmanager
def opened(folder: Path, **given: object) -> Iterator[Keeping]:
    with keeping(settings(folder, **given), CEILING) as kept:
        yield kept


def plan(*kv: int) -> ShardPlan:
    node = NodeBudget("here", CEILING)
    stages = tuple(StagePlan(node, Span(i, i + 1), 100, bytes, 0) for i, bytes in enumerate(kv))
    return ShardPlan(stages, 4096, 1)


def fill(folder: Path, root: BlockId, blocks: int, size: int = 2000) -> int:
    """The bytes that a model has then."""
    shelf = Shelf.open(folder, root, 0, 2)
    for label in new_chain(blocks):
        shelf.store(label, layers(0, 2, size))
    return next(model.bytes for model in usage(folder) if model.root == root)


def bytes_of(folder: Path, root: BlockId) -> int:
    return sum(model.bytes for model in usage(folder) if model.root == root)


def until(done: object, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def test_with_no_cache_nothing_is_kept_and_no_folder_is_made(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", cache=False) as kept:
        assert not kept.on and kept.folder is None
        assert kept.identify(ModelId("one"), tmp_path / "no-such-model") is None
        kept.loaded(root_of({"model": "one"}), lambda: 10**12)
        assert kept.over() == 0
    assert not (tmp_path / "cache").exists()


def test_without_an_ssd_blocks_are_kept_in_memory_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", paged_ssd_cache_max_size="0") as kept:
        assert kept.on and kept.folder is None
        assert kept.hold((100,)).cold is False
        assert kept.over() == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("share", ["0.5%", "0.01%"])
def test_a_small_share_of_the_volume_is_not_nothing(tmp_path: Path, share: str) -> None:
    """Of a volume of 4 TB half a per cent is 20 GB; it was taken for 0."""
    volume = os.statvfs(tmp_path)
    with opened(tmp_path / "cache", paged_ssd_cache_max_size=share) as kept:
        assert kept.folder is not None
        assert 0 < kept.cold_bytes <= volume.f_blocks * volume.f_frsize // 200


def test_memory_is_dealt_to_stages_by_their_keys_and_values(tmp_path: Path) -> None:
    with opened(tmp_path, cache_block_tokens=64, cache_snapshot_tokens=128) as kept:
        hold = kept.hold(share_out(4 * 10**8, plan(100, 300)))
        assert hold.hot_bytes == (10**8, 3 * 10**8)
        assert (hold.block_tokens, hold.snapshot_tokens) == (64, 128)
        assert hold.cold


def test_a_stage_without_keys_and_values_is_never_full() -> None:
    """It counts a byte for each block, and with a budget of 0 all stages gave up everything at once."""
    assert share_out(10**8, plan(0, 300)) == (2**20, 10**8)
    assert share_out(0, plan(0, 300)) == (0, 0)
    assert share_out(10**8, plan(0)) == (2**20,)


def test_a_folder_is_one_servers_at_a_time_and_free_again_afterwards(tmp_path: Path) -> None:
    with (
        opened(tmp_path),
        pytest.raises(BadSetting, match=f"in use by process {os.getpid()}"),
        opened(tmp_path),
    ):
        pass
    with opened(tmp_path):
        pass


def test_a_folder_that_is_too_full_is_brought_under_its_budget_at_the_start(tmp_path: Path) -> None:
    Folder.open(tmp_path).close()
    root = root_of({"model": "old"})
    whole = fill(tmp_path, root, 20)
    with opened(tmp_path, paged_ssd_cache_max_size=str(whole // 2)):
        assert 0 < bytes_of(tmp_path, root) <= whole // 2


def test_loaded_models_give_up_what_is_over_the_budget_of_all(tmp_path: Path) -> None:
    with opened(tmp_path, paged_ssd_cache_max_size="1000000") as kept:
        used = {"one": 600_000, "two": 300_000}
        for model in used:
            kept.loaded(root_of({"model": model}), lambda model=model: used[model])  # type: ignore[misc]
        assert kept.over() == 0
        used["two"] = 500_000
        assert kept.over() == 100_000
        used["one"] = 0
        assert kept.over() == 0


def test_models_that_are_not_loaded_give_theirs_first(tmp_path: Path) -> None:
    Folder.open(tmp_path).close()
    loaded, other = root_of({"model": "loaded"}), root_of({"model": "other"})
    with opened(tmp_path) as kept:
        others, own = fill(tmp_path, other, 20), fill(tmp_path, loaded, 20)
        kept.loaded(loaded, lambda: own)
        kept.cold_bytes = own + others // 2
        assert kept.over() == 0, "the others have enough to give"
        until(lambda: bytes_of(tmp_path, other) <= others // 2 and not kept._trimming.locked())
        assert bytes_of(tmp_path, other) > 0 and bytes_of(tmp_path, loaded) == own
        assert kept.over() == 0


def test_what_others_cannot_give_is_asked_of_the_loaded_once(tmp_path: Path) -> None:
    """Their files went behind their backs as well: twice as much as was over the budget."""
    Folder.open(tmp_path).close()
    loaded, other = root_of({"model": "loaded"}), root_of({"model": "other"})
    with opened(tmp_path) as kept:
        others, own = fill(tmp_path, other, 2), fill(tmp_path, loaded, 20)
        kept.loaded(loaded, lambda: own)
        kept.cold_bytes = own // 2
        assert kept.over() == own - own // 2
        until(lambda: bytes_of(tmp_path, other) == 0 and not kept._trimming.locked())
        assert bytes_of(tmp_path, loaded) >= own - others, "a manifest's bytes may cost a block"
        assert kept.over() == own - own // 2


def test_a_model_that_is_loaded_meanwhile_does_not_disturb_the_counting(tmp_path: Path) -> None:
    with opened(tmp_path) as kept:

        def used() -> int:
            kept._used[root_of({"model": "late"})] = lambda: 0
            return 1

        kept.loaded(root_of({"model": "early"}), used)
        assert kept.over() == 0


def test_a_trim_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folder.open(tmp_path).close()
    loaded, other = root_of({"model": "loaded"}), root_of({"model": "other"})
    tried = threading.Semaphore(0)

    def fail(*_: object) -> None:
        tried.release()
        raise OSError("read-only")

    with opened(tmp_path) as kept:
        fill(tmp_path, other, 2)
        kept.loaded(loaded, lambda: 0)
        kept.cold_bytes = 0
        monkeypatch.setattr(keeping_module, "trim", fail)
        for _ in range(2):
            kept.over()
            assert tried.acquire(timeout=10)
            until(lambda: not kept._trimming.locked())
