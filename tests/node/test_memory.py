"""What a stage says of its own memory."""

import subprocess
import sys

import numpy as np

CHILD = "from omlx.node.memory import peak_rss_bytes; print(peak_rss_bytes())"


def test_a_large_parent_is_not_counted_as_the_stages_own_peak() -> None:
    """A stage started by a process of 3 GB was said to have 3 GB itself."""
    large = np.ones(600 * 2**20, np.uint8)
    said = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=60
    )
    assert 10 * 2**20 < int(said.stdout) < large.nbytes
