"""Run Python with the arguments given, in the environment that a stage's process has."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from omlx.cluster.local_actor import compute_environment

os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | compute_environment())
