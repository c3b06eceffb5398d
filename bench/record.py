"""A bench's one JSON line: what was asked, the ratio, the figures, and where they were measured."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over its runs; its name says the unit."""

    min: float
    median: float
    max: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        known = [round(value, 4) for value in values]
        return cls(min(known), round(statistics.median(known), 4), max(known), len(known))


def tell(bench: str, model: str, ratio: float, figures: Mapping[str, Spread]) -> None:
    """Print the line. `ratio` is the bench's answer; its module says of what to what."""
    line = {
        "bench": bench,
        "ratio": round(ratio, 4),
        "figures": {name: asdict(spread) for name, spread in figures.items()},
        "commit": commit(),
        "machine": machine(),
        # Other work on the machine shows in every figure.
        "load_average": round(os.getloadavg()[0], 2),
        "model": model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps(line), flush=True)


def commit() -> str:
    """The short hash, with + where omlx/ has changed since."""
    short = _git("rev-parse", "--short", "HEAD")
    return f"{short}+" if _git("status", "--porcelain", "--", "omlx") else short


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def machine() -> str:
    """Processor, cores, memory, system."""
    memory_gb = psutil.virtual_memory().total / 1e9
    return f"{_processor()}, {os.cpu_count()} cores, {memory_gb:.0f} GB, {platform.system()}"


def _processor() -> str:
    if platform.system() == "Darwin":
        return subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], check=True, capture_output=True, text=True
        ).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()} {platform.machine()}"
    return platform.machine()
