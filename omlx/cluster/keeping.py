"""What all models of a server may keep of computed prefixes: the cache folder, its budget, RAM's part."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from omlx.cache.block import root_of
from omlx.cache.budget import free_floor_bytes, parse_size
from omlx.cache.folder import INSTEAD, Folder, trim, usage
from omlx.cache.identity import identity_of
from omlx.errors import BadSetting
from omlx.ids import BlockId, ModelId
from omlx.node.hold import Hold
from omlx.node.housekeeping import Housekeeper
from omlx.node.wire import CacheSpec
from omlx.settings import Settings

log = structlog.get_logger()

ANY_VOLUME = 10**15
"""Bytes: the smallest share of it is not 0."""
PLAIN = "as computed"
"""The format of keys and values that are kept as the model computes them."""


def kv_format(bits: int | None) -> str:
    """By what blocks of one setting differ from those of another."""
    return PLAIN if bits is None else f"{bits} bits"


@dataclass(slots=True)
class Keeping:
    """One per server, owned by its coordinator."""

    settings: Settings
    ceiling_bytes: int
    """What all models together may take of the memory."""
    folder: Folder | None = None
    cold_bytes: int = 0
    floor_bytes: int = 0
    _used: dict[BlockId, Callable[[], int]] = field(default_factory=dict)
    """Of the loaded models: bytes in the cold tier."""
    _housekeepers: dict[BlockId, Housekeeper] = field(default_factory=dict)
    _others: int = 0
    """Bytes of models that are not loaded."""
    _trimming: threading.Lock = field(default_factory=threading.Lock)

    @property
    def on(self) -> bool:
        return self.settings.cache

    def identify(self, id: ModelId, model_folder: Path) -> CacheSpec | None:
        """Reads all weights the first time: call it in a thread. Raises BadModel."""
        if not self.on:
            return None
        memo = self.folder.path / "digests.json" if self.folder is not None else None
        identity = identity_of(
            model_folder, memo, kv_format(self.settings.kv_bits), self.settings.cache_block_tokens
        )
        root = root_of(identity)
        if self.folder is not None:
            try:
                self.folder.describe(root, id, identity)
            except OSError as error:
                log.warning("cache folder", folder=str(self.folder.path), why=str(error))
        path = str(self.folder.path) if self.folder is not None else None
        return CacheSpec(root, self.settings.cache_block_tokens, path, self.floor_bytes)

    def hold(self, hot_bytes: tuple[int, ...]) -> Hold:
        """What may be kept of a model whose stages have so much RAM for it."""
        return Hold(
            hot_bytes=hot_bytes,
            cold=self.folder is not None,
            block_tokens=self.settings.cache_block_tokens,
            snapshot_tokens=self.settings.cache_snapshot_tokens,
        )

    def loaded(self, root: BlockId, used: Callable[[], int], housekeeper: Housekeeper | None = None) -> None:
        """A model is served from now on; `used` tells its bytes in the cold tier."""
        self._used[root] = used
        if housekeeper is not None:
            self._housekeepers[root] = housekeeper
        if self.folder is not None:
            self._count_others()

    def over_for(self, root: BlockId) -> int:
        """Bytes that this model has to give up. A loaded model that nobody has asked for longer gives first:
        it is told to."""
        over = self.over()
        if not over or root not in self._housekeepers:
            return over
        holders = [keeper for keeper in self._housekeepers.values() if keeper.cold_bytes()]
        idle = min(holders, key=lambda keeper: keeper.last_used, default=None)
        if idle is None or idle is self._housekeepers[root]:
            return over
        idle.purge(over)
        return 0

    def over(self) -> int:
        """Bytes that loaded models have to give up. Models that are not loaded give theirs first."""
        # A copy: another thread may add a model that is loaded now.
        loaded = sum(used() for used in list(self._used.values()))
        others = self._others  # read once: the thread that trims them changes it
        over = others + loaded - self.cold_bytes
        if self.folder is None or over <= 0:
            return 0
        if others and self._trimming.acquire(blocking=False):
            budget = max(self.cold_bytes, loaded)  # whose blocks these are gives them up itself
            threading.Thread(target=self._trim_others, args=(budget,), name="cache-trim", daemon=True).start()
        return max(0, over - others)

    def _trim_others(self, budget_bytes: int) -> None:
        assert self.folder is not None
        try:
            trim(self.folder.path, budget_bytes, self.floor_bytes, list(self._used))
            self._count_others()
        except OSError as error:
            log.warning("cache folder", folder=str(self.folder.path), why=str(error))
        finally:
            self._trimming.release()

    def _count_others(self) -> None:
        assert self.folder is not None
        models = usage(self.folder.path)
        self._others = sum(model.bytes for model in models if model.root not in self._used)


@contextmanager
def keeping(settings: Settings, ceiling_bytes: int) -> Iterator[Keeping]:
    """Locks the cache folder, where there is to be one, and brings it under its budget.

    Raises BadSetting where it cannot be used.
    """
    if not settings.cache or parse_size(settings.paged_ssd_cache_max_size, ANY_VOLUME, "") == 0:
        yield Keeping(settings, ceiling_bytes)
        return
    folder = Folder.open(settings.paged_ssd_cache_dir)
    try:
        volume = shutil.disk_usage(folder.path).total
        budget = parse_size(settings.paged_ssd_cache_max_size, volume, "paged_ssd_cache_max_size")
        floor = free_floor_bytes(volume)
        try:
            trim(folder.path, budget, floor, ())
        except OSError as error:
            raise BadSetting(f"cache folder {folder.path}: {error.strerror}; {INSTEAD}") from error
        yield Keeping(settings, ceiling_bytes, folder, budget, floor)
    finally:
        folder.close()
