"""Virtual environments for programs that are not ours: made from PyPI on first use, kept in the cache."""

import subprocess
import sys
from pathlib import Path

from omlx.demo.cache import build_whole, default_cache

INSTALL_WITHIN_S = 3600.0
"""Some programs bring gigabytes of libraries along."""


def python_with(name: str, requirements: tuple[str, ...]) -> Path:
    """The Python of an environment that has `requirements`; of another list it is made anew.

    Run what is installed by `-m` or `-c`: the scripts beside it name the folder as it was called while it was
    made. Ends the bench with one line where pip cannot install.
    """
    recipe = "\n".join((*requirements, f"Python {sys.version}"))

    def make(beside: Path) -> None:
        print(f"bench: installing {', '.join(requirements)} for {name}", file=sys.stderr)
        _run(name, sys.executable, "-m", "venv", str(beside))
        python = str(beside / "bin" / "python")
        _run(name, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)

    return build_whole(default_cache() / "peers" / name, recipe, make) / "bin" / "python"


def _run(name: str, *command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"bench: {name} was not installed within {INSTALL_WITHIN_S:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else f"{' '.join(command[1:4])} ended with {done.returncode}"
        raise SystemExit(f"bench: {name} cannot be installed: {reason}")
