"""Labs for tests, closed when their module is done; skipped, with the reason, where there can be none."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import pytest

from tests.lab.clustered import Running, clustered
from tests.lab.fleet import Fleet, fleet
from tests.lab.lab import Lab, macs
from tests.lab.machine import missing


class NewLab(Protocol):
    def __call__(
        self, count: int, memory_gib: int | Sequence[int] = 64, shims: Mapping[str, str] | None = None
    ) -> Lab: ...


class NewHosts(Protocol):
    def __call__(
        self, count: int, memory_gib: int | Sequence[int] = 64, shims: Mapping[str, str] | None = None
    ) -> Fleet: ...


@pytest.fixture(scope="module")
def lab() -> Iterator[NewLab]:
    """`lab(3, memory_gib=(64, 16, 128))` is a lab of three hosts without servers."""
    if reason := missing(sshd=False):
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count, memory_gib=64, shims=None: stack.enter_context(
            Lab(macs(count, memory_gib, shims))
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[NewHosts]:
    """`hosts(3)` are three with an sshd each, one key that all take, and a known_hosts file."""
    if reason := missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count, memory_gib=64, shims=None: stack.enter_context(fleet(count, memory_gib, shims))


@pytest.fixture(scope="module")
def three(hosts: NewHosts) -> Fleet:
    """Of unequal memory; a module may make its own."""
    return hosts(3, memory_gib=(64, 16, 128))


@pytest.fixture(scope="module")
def nodes(three: Fleet) -> Iterator[dict[str, Running]]:
    """The three in a cluster, `omlx node run` on all but the first."""
    with clustered(three.hosts) as running:
        yield running
