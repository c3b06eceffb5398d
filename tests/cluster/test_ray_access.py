"""The environment of Ray's processes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from omlx.cluster.ray_access import HEALTH, QUIET


@pytest.mark.parametrize("program", ["raylet/raylet", "gcs/gcs_server"])
def test_every_setting_is_one_that_the_installed_ray_knows(program: str) -> None:
    """Others are ignored in silence: a node that is gone would be noticed late, and Ray would never rest."""
    found = find_spec("ray")
    assert found is not None and found.origin is not None
    known = Path(found.origin).parent.joinpath("core/src/ray", program).read_bytes()
    names = [name.removeprefix("RAY_") for name in HEALTH | QUIET]
    assert [name for name in names if f"\0{name}\0".encode() not in known] == []
