"""What tests of many families share."""

from collections.abc import Iterator
from functools import cache
from inspect import signature
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models import base


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Without what would take most of the time: on a CPU, the C++ compiler for every family's fused kernels;
    in mlx-lm's configs, one look at the signature for each of their fields."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "inspect", SimpleNamespace(signature=cache(signature)))
        mx.disable_compile()
        yield
        mx.enable_compile()
