"""The API's tests are coroutines on one asyncio loop, which the server under test shares."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the server logs in this test."""
    with capture_logs() as entries:
        yield entries
