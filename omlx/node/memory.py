"""A stage's memory: what MLX may take, and giving back what is freed."""

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from omlx.ids import PlanId

GPU_SIZES = ("max_recommended_working_set_size", "total_memory", "memory_size")
"""What MLX's back ends call the memory that a GPU may use, in bytes; the best one first."""
CLEAR_EVERY, FULL = 32, 0.75
"""Every so many plans, what MLX keeps of freed memory is given back if it is so near its limit. Full of sizes
that nobody asks for any more, it would keep nothing else, and every operation would allocate."""
TRIM_EVERY = 8
"""Plans. On a CPU it is the C library that keeps what is freed, up to half a stage's size; to trim it takes
some milliseconds (docs/LOG.md)."""


@dataclass(slots=True)
class Memory:
    """Owned by the compute thread."""

    _kept_bytes: int = 0
    """What MLX may keep of freed memory."""

    def share(self, share: float) -> None:
        """Set this process's part of the GPU's limits: several must not take more than the machine bears.

        MLX keeps what it frees up to its limit, and each process takes the whole GPU for its own. What is
        kept is limited on Metal alone: there it is missing for everything else on a Mac.
        """
        self._kept_bytes = sys.maxsize
        info = mx.device_info() if _on_gpu() else {}
        whole = next((int(info[name]) for name in GPU_SIZES if name in info), 0)
        if not whole:
            return
        mx.set_memory_limit(int(whole * share))
        if mx.metal.is_available():
            mx.set_wired_limit(int(whole * share))
            self._kept_bytes = int(whole * share / 8)
            mx.set_cache_limit(self._kept_bytes)

    def trim(self, plan: PlanId) -> None:
        """Give back, now and then, what is freed."""
        if plan % CLEAR_EVERY == 0 and mx.get_cache_memory() > self._kept_bytes * FULL:
            mx.clear_cache()
        if plan % TRIM_EVERY == 0:
            self.rest()

    def rest(self) -> None:
        """Give back what the C library keeps; to be called when nothing more is to do, too."""
        if sys.platform == "linux" and not _on_gpu():
            ctypes.CDLL(None).malloc_trim(0)


def _on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def peak_rss_bytes() -> int:
    """The most memory that this process ever had resident.

    On Linux by the kernel's status: getrusage counts what the parent had when it started us, too.
    """
    if (status := Path("/proc/self/status")).exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes() -> int:
    """Of this machine's memory, what could be taken now without swapping."""
    return int(psutil.virtual_memory().available)
