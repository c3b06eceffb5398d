"""The API's tests are coroutines on one asyncio loop, which the server under test shares."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
