"""What each machine is to give so that neither holds a model alone, found by asking `omlx cluster plan`."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.mac.machines import Failed, complaint, omlx, omlx_json

CONTEXT_TOKENS = 2048
PLAN_WITHIN_S = 60.0
SHARES = (0.6, 0.7, 0.8, 0.9, 0.97)
"""Of what one machine alone would need. Layers are lumps, and an embedding may be needed at both ends."""
MOST_OF_MEMORY = 0.65
"""What omlx takes of a Mac on which somebody works."""


@dataclass(frozen=True, slots=True)
class Gifts:
    """Bytes."""

    here: int
    there: int
    whole: int
    """What the model takes on one machine."""

    def __str__(self) -> str:
        return f"the model takes {gb(self.whole)}; {gb(self.here)} given here, {gb(self.there)} there"


def share_out(model: Path, memory_here: int, memory_there: int) -> Gifts:
    """The least shares by which both hold what neither does. Raises Failed where there are none."""
    whole = whole_bytes(model)
    said = ""
    for share in SHARES:
        here, there = (part(whole, share, memory) for memory in (memory_here, memory_there))
        nodes = ("--only", "--node", f"here={here}", "--node", f"there={there}")
        ran = omlx("cluster", "plan", model, *context(), *nodes, "--json", within_s=PLAN_WITHIN_S)
        if ran.returncode == 0 and len(json.loads(ran.stdout)["stages"]) == 2:
            return Gifts(here, there, whole)
        said = complaint(ran.stderr)
    raise Failed(f"{model.name} cannot be cut so that both machines are needed and enough: {said}")


def part(whole: int, share: float, memory: int) -> int:
    """Of a machine with that memory; 0: it is not known."""
    wanted = int(whole * share)
    return max(1, min(wanted, int(memory * MOST_OF_MEMORY))) if memory else wanted


def whole_bytes(model: Path) -> int:
    """With everything that a stage keeps beside the weights. Raises Failed."""
    words = ("cluster", "plan", model, *context(), "--only", "--node", "one=100TB")
    stages = omlx_json(*words, within_s=PLAN_WITHIN_S)["stages"]
    names = ("weights_bytes", "kv_bytes", "scratch_bytes")
    return sum(int(stage[name]) for stage in stages for name in names)


def planned_budgets(model: Path) -> dict[str, int]:
    """Bytes by node that omlx would use by itself; none where the model does not fit."""
    ran = omlx("cluster", "plan", model, *context(), "--json", within_s=PLAN_WITHIN_S)
    stages = json.loads(ran.stdout)["stages"] if ran.returncode == 0 else []
    return {stage["node"]: int(stage["budget_bytes"]) for stage in stages}


def context() -> tuple[str, str]:
    return "--context", str(CONTEXT_TOKENS)


def gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
