"""Every fault of the lab does what it says, and its opposite undoes it."""

import subprocess

import pytest

from tests.lab.conftest import NewLab
from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.machine import BARE_PYTHON, LabError, end
from tests.lab.probes import reaches, round_trip_ms, wait_for

HEAR = """
import socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
    ear.bind(("", 5454))
    group = socket.inet_aton("224.0.0.251") + socket.inet_aton(sys.argv[1])
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
    ear.settimeout(20)
    print("ready", flush=True)
    while True:
        print(ear.recv(100).decode(), flush=True)
"""
SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
    mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))
    mouth.sendto(sys.argv[2].encode(), (sys.argv[3], 5454))
"""
TALK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7070), 5) as line:
    print("ready", flush=True)
    line.settimeout(float(sys.argv[2]))
    start = time.monotonic()
    try:
        print("ended" if line.recv(1) == b"" else "heard")
    except ConnectionResetError:
        print("ended")
    except TimeoutError:
        print("silence")
"""
LISTEN = """
import socket
with socket.create_server(("", 7070)) as door:
    print("ready", flush=True)
    kept = [door.accept() for _ in range(9)]
"""


@pytest.fixture(scope="module")
def three(lab: NewLab) -> Lab:
    return lab(3)


def started(host: Host, program: str, *words: str) -> subprocess.Popen[str]:
    """The program in the host, after it said that it is ready."""
    process = host.popen([*BARE_PYTHON, "-c", program, *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def say(host: Host, word: str, to: str = "224.0.0.251") -> None:
    host.run([*BARE_PYTHON, "-c", SAY, host.ip, word, to], check=True)


@pytest.mark.parametrize("carrier", [False, True])
def test_a_cut_host_is_lost_to_the_others_until_it_is_healed(three: Lab, carrier: bool) -> None:
    a, b, c = three.hosts
    three.cut(b, carrier=carrier)
    assert not reaches(a, b, 0.5)
    assert reaches(a, c)
    card = (
        b.run(["cat", "/proc/net/dev_mcast"]).returncode == 0 and b.run(["ip", "link", "show", "eth0"]).stdout
    )
    assert ("NO-CARRIER" in str(card)) is carrier
    three.heal(b)
    assert reaches(a, b, 3)


def test_a_blocked_pair_still_reaches_everybody_else(three: Lab) -> None:
    a, b, c = three.hosts
    three.block(a, c)
    assert not reaches(a, c, 0.5)
    assert not reaches(c, a, 0.5)
    assert reaches(b, c)
    three.unblock(a, c)
    assert reaches(a, c, 3)


def test_a_shaped_link_is_slow_through_cut_and_heal(three: Lab) -> None:
    a, b, _ = three.hosts
    three.shape(b, delay_ms=10)
    assert 19 < round_trip_ms(a, b) < 80
    three.cut(b)
    assert not reaches(a, b, 0.5)
    three.heal(b)
    assert 19 < round_trip_ms(a, b) < 80
    three.shape(b)
    assert round_trip_ms(a, b) < 10


def test_a_cut_host_stays_cut_when_its_link_is_shaped_and_when_it_is_not_any_more(three: Lab) -> None:
    a, b, _ = three.hosts
    three.cut(b)
    three.shape(b, delay_ms=1)
    assert not reaches(a, b, 0.5)
    three.shape(b)
    assert not reaches(a, b, 0.5)
    three.heal(b)
    assert reaches(a, b, 3)


def test_filtered_multicast_is_heard_neither_way_while_unicast_passes(three: Lab) -> None:
    a, b, _ = three.hosts
    three.shape(b, delay_ms=1)
    three.multicast(b, False)
    ears = {host: started(host, HEAR, host.ip) for host in (a, b)}
    say(a, "from a")
    say(b, "from b")
    say(a, "unicast", b.ip)
    say(b, "unicast", a.ip)
    three.multicast(b, True)
    say(a, "again")
    heard = {}
    for host, ear in ears.items():
        assert ear.stdout is not None
        words = iter(ear.stdout.readline, "again\n")
        heard[host.name] = [word.strip() for word in words if word != f"from {host.name[-1]}\n"]
        end(ear)
    assert heard == {"mac-a": ["unicast"], "mac-b": ["unicast"]}
    three.shape(b)


def test_a_suspended_host_is_silent_and_goes_on_when_it_is_resumed(three: Lab) -> None:
    a, b, _ = three.hosts
    sleeper = started(b, "import time; print('ready', flush=True); time.sleep(100)")
    three.suspend(b)
    assert not reaches(a, b, 0.5)
    three.resume(b)
    assert reaches(a, b, 3)
    assert sleeper.poll() is None
    end(sleeper)


def test_a_crash_ends_connections_and_a_power_off_does_not(three: Lab) -> None:
    a, b, _ = three.hosts
    for fault, noticed in ((three.crash, "ended"), (three.power_off, "silence")):
        server = started(b, LISTEN)
        client = started(a, TALK, b.ip, "1")
        fault(b)
        assert client.communicate(timeout=10)[0] == f"{noticed}\n"
        server.communicate(timeout=5)
        three.boot(b)


def test_a_host_that_was_off_boots_with_its_files_and_none_of_its_processes(three: Lab) -> None:
    a, b, _ = three.hosts
    (b.home / "kept").write_text("1")
    sleeper = b.popen(["sleep", "100"])
    three.power_off(b)
    assert sleeper.wait(5) != 0
    assert not reaches(a, b, 0.5)
    for refused in (lambda: b.run(["true"]), lambda: three.cut(b), lambda: three.shape(b, delay_ms=1)):
        with pytest.raises(LabError, match="mac-b is off: boot it first"):
            refused()
    three.boot(b)
    assert reaches(a, b, 3)
    assert b.run(["cat", "kept"]).stdout == "1"
    with pytest.raises(LabError, match="mac-b is on already"):
        three.boot(b)


def test_a_host_that_crashed_while_it_was_suspended_is_gone(three: Lab) -> None:
    _, b, _ = three.hosts
    started_pid = b.pid
    sleeper = b.popen(["sleep", "100"])
    three.suspend(b)
    three.power_off(b)
    assert sleeper.wait(5) != 0
    assert wait_for(lambda: not three.groups.pids(b.name))
    three.boot(b)
    assert b.pid != started_pid
    assert not b.is_frozen


def test_faults_out_of_range_are_refused(three: Lab) -> None:
    with pytest.raises(LabError, match="loss is 0 to 1"):
        three.shape("mac-a", loss=5)
