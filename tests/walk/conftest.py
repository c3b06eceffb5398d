"""What tests of what is kept share."""

import pytest

from omlx.node import prefixes
from tests.walk.cached import Folder, family


@pytest.fixture(scope="module")
def folder(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a model of KINDS."""
    parent = tmp_path_factory.mktemp("families")
    return lambda name: tiny(name) if name.startswith("tiny") else family(name, parent)


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "IDLE_S", 0.0)
