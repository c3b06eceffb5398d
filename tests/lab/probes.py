"""Questions that tests ask from inside of hosts."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.lab.host import Host
from tests.lab.machine import BARE_PYTHON

CLOSED_PORT = 9
CONNECT = """
import socket, sys, time
best, said = float("inf"), "lost"
for _ in range(int(sys.argv[3])):
    with socket.socket() as one:
        one.settimeout(float(sys.argv[2]))
        start = time.perf_counter()
        try:
            one.connect((sys.argv[1], int(sys.argv[4])))
        except ConnectionRefusedError:
            said = "refused"
        except OSError:
            said = "lost"
        best = min(best, time.perf_counter() - start)
print(said, best * 1e3)
"""


def _connect(here: Host, there: Host, within_s: float, times: int) -> tuple[str, float]:
    words: list[str | Path | int] = [*BARE_PYTHON, "-c", CONNECT, there.ip, str(within_s), times, CLOSED_PORT]
    said, ms = here.run(words, check=True).stdout.split()
    return said, float(ms)


def reaches(here: Host, there: Host, within_s: float = 1.0) -> bool:
    """A connection that is refused has reached its host."""
    return _connect(here, there, within_s, 1)[0] == "refused"


def round_trip_ms(here: Host, there: Host) -> float:
    """The best of five."""
    return _connect(here, there, 1.0, 5)[1]


def wait_for(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
