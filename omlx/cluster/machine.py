"""What this machine has for models: memory ceilings, and what of them is free now."""

import platform
import subprocess

import psutil

GPU_LIMIT_QUERY = ("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb")


def memory_ceiling_bytes() -> int:
    """The most that all models together may take.

    macOS: what the GPU may wire, as set by iogpu.wired_limit_mb, else the system's default of two thirds
    of the memory up to 36 GB and three quarters above. Elsewhere nine tenths of the memory.
    """
    total = int(psutil.virtual_memory().total)
    if platform.system() != "Darwin":
        return total * 9 // 10
    answer = subprocess.run(GPU_LIMIT_QUERY, capture_output=True, text=True, timeout=10, check=False)
    limit_mb = int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0
    if limit_mb > 0:
        return min(total, limit_mb * 2**20)
    return total * 2 // 3 if total <= 36 * 2**30 else total * 3 // 4


def memory_available_bytes() -> int:
    """What could be taken now without swapping."""
    return int(psutil.virtual_memory().available)
