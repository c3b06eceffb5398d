"""A coordinator tells a host over OpenSSH where Ray's head is; an agent runs there, or it does not."""

import json
import sys
import time
from pathlib import Path

from omlx.cluster.head_address import HeadAddress, read_head
from omlx.cluster.node_agent import holder
from tests.lab.clustered import fingerprint
from tests.lab.conftest import NewHosts
from tests.lab.host import Host
from tests.lab.machine import ROOT

AGENT_WITHIN_S = 20.0
SUMMON = """
import asyncio, json, sys
from pathlib import Path
from omlx.cluster.head_address import HeadAddress
from omlx.cluster.members import read_members
from omlx.cluster.summoning import hindrance, summon
from omlx.cluster.trust import open_trust

folder = Path("~/.omlx/cluster")
trust, members = open_trust(folder), read_members(folder)
answers = asyncio.run(summon(trust, members, HeadAddress(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
print(json.dumps([hindrance(one, answers[one.id]) for one in members]))
"""


def summon(host: Host, head: HeadAddress) -> list[str | None]:
    """What stands in the way, by node."""
    asked: list[str | Path | int] = [sys.executable, "-c", SUMMON, head.address, head.port, head.number]
    ran = host.run(asked, folder=ROOT, check=True)
    said: list[str | None] = json.loads(ran.stdout)
    return said


def announced(lock: Path) -> bool:
    found = holder(lock)
    return found is not None and found.announced


def test_a_host_learns_where_the_head_is_and_says_whether_its_agent_runs(hosts: NewHosts) -> None:
    first, second = hosts(2).hosts
    assert first.omlx("cluster", "init").returncode == 0
    second.sshd.authorize((first.home / ".omlx/cluster/authority/ssh_key.pub").read_text())
    joined = first.omlx("cluster", "join", second.ip, "--user", "root", "--fingerprint", fingerprint(second))
    assert joined.returncode == 0, joined.stdout + joined.stderr

    head = HeadAddress(first.ip, 6399, 1)
    assert summon(first, head) == [
        f"omlx node does not run on {second.name}: start it there with `omlx node install`"
    ]
    assert read_head(second.home / ".omlx/cluster") == head

    omlx = Path(sys.executable).with_name("omlx")
    agent = second.popen([omlx, "node", "run"], folder=ROOT)
    try:
        end = time.monotonic() + AGENT_WITHIN_S
        while not announced(second.home / ".omlx/node.lock") and time.monotonic() < end:
            time.sleep(0.05)
        again = HeadAddress(first.ip, 6400, 2)
        assert summon(first, again) == [None]
        assert read_head(second.home / ".omlx/cluster") == again
        assert agent.poll() is None, "a head that is not there ends no agent"
    finally:
        agent.kill()
        agent.wait(10)
