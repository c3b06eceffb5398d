"""`python -m bench [NAME ...]`: run the benches named, or all of them, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

NAMES = (
    "empty_step",
    "decode_alone",
    "decode_together",
    "stage_rss",
    "start_up",
    "idle",
    "two_stages",
    "pipeline",
    "emulated",
    "mixed_lengths",
    "cache",
)
ON_REQUEST = ("peers", "performance", "cache_soak", "fast_gpu", "cluster")
"""They take long, need PyPI, write the documentation's figures, need a GPU, or root for the lab."""
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Ends with 2 for an unknown name, 1 where a bench failed; a missed goal is a figure, no failure."""
    names = sys.argv[1:] or list(NAMES)
    if unknown := [name for name in names if name not in NAMES + ON_REQUEST]:
        print(f"bench: no bench {unknown[0]!r}; there are {', '.join(NAMES + ON_REQUEST)}", file=sys.stderr)
        sys.exit(2)
    codes = [
        subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=ROOT, check=False).returncode
        for name in names
    ]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
