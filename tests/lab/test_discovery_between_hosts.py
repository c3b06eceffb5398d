"""Nodes on different hosts find each other by mDNS, and nothing that they hear is a report of death."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import NewLab
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.machine import ROOT, end, sh
from tests.lab.probes import wait_for

WITHIN_S = 20.0


@dataclass(frozen=True)
class Peer:
    """`tests.lab.peer` in a host, and the file in which it says what it hears."""

    host: Host
    process: subprocess.Popen[str]
    said: Path
    complaints: Path

    def told(self, what: str) -> list[dict[str, Any]]:
        lines = [json.loads(text) for text in self.said.read_text().splitlines()]
        return [line for line in lines if line["what"] == what]

    @property
    def id(self) -> str:
        assert wait_for(lambda: bool(self.told("announced")), WITHIN_S), self.complaints.read_text()
        return str(self.told("announced")[0]["id"])

    def hears(self, other: "Peer") -> dict[str, Any] | None:
        """What it heard of the other last."""
        return next((line for line in reversed(self.told("seen")) if line["id"] == other.id), None)

    def hears_soon(self, other: "Peer") -> bool:
        return wait_for(lambda: self.hears(other) is not None, WITHIN_S)

    def leave(self) -> None:
        """Says goodbye."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(WITHIN_S)


NewPeer = Callable[..., Peer]


@pytest.fixture(scope="module")
def one_lab(lab: NewLab) -> Lab:
    return lab(3)


@pytest.fixture
def three(one_lab: Lab) -> Iterator[Lab]:
    yield one_lab
    for host in one_lab.hosts:
        one_lab.multicast(host, True)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[NewPeer]:
    """`peer(host, *listed)` is a node there, which also asks the listed hosts directly."""
    with ExitStack() as stack:

        def start(host: Host, *listed: str) -> Peer:
            said, complaints = tmp_path / f"{host.name}.said", tmp_path / f"{host.name}.complaints"
            process = host.popen(
                [sys.executable, "-m", "tests.lab.peer", *listed],
                folder=ROOT,
                stdin=subprocess.PIPE,
                stdout=stack.enter_context(said.open("w")),
                stderr=stack.enter_context(complaints.open("w")),
            )
            stack.callback(end, process)
            return Peer(host, process, said, complaints)

        yield start


def test_three_nodes_hear_of_each_other(three: Lab, peer: NewPeer) -> None:
    peers = [peer(host) for host in three.hosts]
    assert len({one.id for one in peers}) == 3
    for here in peers:
        for there in peers:
            if here is there:
                continue
            assert here.hears_soon(there), here.complaints.read_text()
            heard = here.hears(there)
            assert heard is not None
            shown = sh(["ssh-keygen", "-l", "-f", there.host.sshd.key]).split()[1]
            assert (heard["name"], heard["key"]) == (there.host.name, shown)
            assert heard["addresses"] == [there.host.ip]


def test_a_node_behind_a_switch_that_filters_multicast_is_found_when_it_is_listed(
    three: Lab, peer: NewPeer
) -> None:
    a, b, c = three.hosts
    three.multicast(c, False)
    hidden = peer(c)
    assert hidden.id
    asking, deaf = peer(a, c.ip), peer(b)
    assert asking.hears_soon(hidden), asking.complaints.read_text()
    heard = asking.hears(hidden)
    assert heard is not None
    assert (heard["source"], heard["addresses"]) == ("static", [c.ip])
    assert deaf.hears_soon(asking)
    assert asking.hears_soon(deaf)
    assert deaf.hears(hidden) is None
    assert hidden.hears(asking) is None
    assert hidden.hears(deaf) is None


def test_a_node_that_is_powered_off_is_not_reported_while_a_goodbye_is(three: Lab, peer: NewPeer) -> None:
    a, b, c = three.hosts
    here, polite, dead = peer(a), peer(b), peer(c)
    assert here.hears_soon(polite)
    assert here.hears_soon(dead)
    three.power_off(c)
    polite.leave()
    assert wait_for(lambda: bool(here.told("lost")), WITHIN_S)
    assert [line["id"] for line in here.told("lost")] == [polite.id]
    three.boot(c)
    again = peer(c)
    assert again.id == dead.id
    assert here.process.poll() is None
