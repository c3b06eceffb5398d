"""Models for every test, and the rule that nothing is skipped silently where all of it can run."""

import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from omlx.demo.cache import build_whole, default_cache
from omlx.demo.models import build
from tests.models.tiny import TINY, build_tiny, recipe

NO_SKIPS = os.environ.get("OMLX_NO_SKIPS") == "1"


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test keeps blocks in the user's own folder."""
    os.environ["OMLX_PAGED_SSD_CACHE_DIR"] = str(tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="session")
def cache() -> Path:
    """The user's own cache folder: what a test builds there is found again by the next run."""
    return default_cache()


@pytest.fixture(scope="session")
def tiny(cache: Path) -> Callable[[str], Path]:
    """`tiny("tiny-llama")` is the folder of that model of tests/models/tiny.py, built once a machine."""

    def folder(name: str) -> Path:
        if name not in TINY:
            raise LookupError(f"no tiny model {name!r}; there are {', '.join(TINY)}")
        return build_whole(cache / "tests" / name, recipe(), lambda beside: build_tiny(name, beside))

    return folder


@pytest.fixture(scope="session")
def smollm2(cache: Path) -> Path:
    """SmolLM2 135M Instruct in float32: a real chat model, 30 layers, 538 MB."""
    return build("smollm2-135m-instruct-f32", cache)


@pytest.fixture(scope="session")
def gemma(cache: Path) -> Path:
    """Gemma 3 270M (base) in float32: a real model with sliding windows, 18 layers, 1,072 MB."""
    return build("gemma-3-270m-f32", cache)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The long ones first, and files with processes of their own: else one worker ends with them while the
    # others have nothing left.
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, "walk" not in item.path.parts))
    if sys.platform != "darwin":
        for item in items:
            if item.get_closest_marker("macos"):
                item.add_marker(pytest.mark.skip(reason="needs macOS"))


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {reason}, and OMLX_NO_SKIPS=1 wants every test to run"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    elsewhere = item.get_closest_marker("macos") and sys.platform != "darwin"
    if NO_SKIPS and report.skipped and not elsewhere and not hasattr(report, "wasxfail"):
        refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIPS and report.skipped:
        refuse_skip(report)
    return report
