"""What does a cluster cost? Two stages on two hosts of the lab against two on one, in turn. Linux, root.

one_tps, two_tps: tokens/s of one stream, both stages on one host, and one on each of two. ratio: two / one;
0.92 is the goal where a token takes 20 ms or more. recovery_s: the longest pause of a stream whose stage on
the other host is killed. head_idle_percent, node_idle_percent: of a core, all processes of a host that
serves and rests. planner_ms: the best spans of 128 layers over 64 unlike nodes; planner_above: how far that
lies above a bound that no plan can be below. The lab's hosts share this machine's cores.
"""

import os
import signal
import statistics
import time

import psutil

from bench.alternate import ratio
from bench.engines import model_folder
from bench.record import Spread, tell
from omlx.cluster.placement import Objective, solve
from tests.cluster.planning import large
from tests.lab.clustered import Server, clustered, gifts, processes, serving
from tests.lab.fleet import fleet
from tests.lab.host import Host

MODEL = "smollm2-135m-instruct-f32"
TOKENS, ROUNDS = 60, 5
REST_S, IDLE_S = 12.0, 20.0
GIVEN = {"mac-a": "560MB", "mac-b": "560MB"}
"""None of them holds the model alone."""


def tps(server: Server) -> float:
    (stream,) = server.stream(1, TOKENS).ended()
    return float((stream["tokens"] - 1) / stream["seconds"])


def recovery_s(server: Server, host: Host) -> float:
    streams = server.stream(1, TOKENS)
    for process in processes(host, "omlx.node.process"):
        os.kill(process.pid, signal.SIGKILL)
    (stream,) = streams.ended()
    return float(stream["longest_pause_s"])


def cpu_s(host: Host) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in host.pids())


def idle_percent(hosts: tuple[Host, ...]) -> list[float]:
    time.sleep(REST_S)
    before = [cpu_s(host) for host in hosts]
    time.sleep(IDLE_S)
    return [100 * (cpu_s(host) - then) / IDLE_S for host, then in zip(hosts, before, strict=True)]


def planner() -> tuple[list[float], list[float]]:
    """Milliseconds, and plan / bound, for both objectives in turn."""
    problem, took, above = large("all different"), [], []
    objectives: tuple[Objective, ...] = ("throughput", "single")
    for objective in objectives * ROUNDS:
        started = time.perf_counter()
        solution = solve(problem, objective)
        took.append(1e3 * (time.perf_counter() - started))
        assert solution is not None
        above.append(solution.value / solution.bound)
    return took, above


def main() -> None:
    folder = model_folder(MODEL)
    one: list[float] = []
    two: list[float] = []
    flags = ("--no-cache", "--max-concurrent-requests", "1")
    with fleet(2, memory_gib=(64, 16)) as two_hosts, clustered(two_hosts.hosts):
        first, other = two_hosts.hosts
        with (
            serving(first, folder, *flags, *gifts(GIVEN)) as cluster,
            serving(first, folder, *flags, "--no-cluster", "--stages", "2", port=8001) as local,
        ):
            assert len(cluster.shards()) == 2
            sides = [(one, local), (two, cluster)]
            for number in range(ROUNDS + 1):
                for found, server in sides if number % 2 else reversed(sides):
                    value = tps(server)
                    if number:
                        found.append(value)
        with serving(first, folder, *flags, *gifts(GIVEN)) as cluster:
            head, node = idle_percent((first, other))
            pauses = [recovery_s(cluster, other) for _ in range(2)]
    took, above = planner()
    figures = {
        "one_tps": Spread.of(one),
        "two_tps": Spread.of(two),
        "token_ms": Spread.of([1e3 / statistics.median(two)]),
        "recovery_s": Spread.of(pauses),
        "head_idle_percent": Spread.of([head]),
        "node_idle_percent": Spread.of([node]),
        "planner_ms": Spread.of(took),
        "planner_above": Spread.of(above),
    }
    tell("cluster", MODEL, ratio(two, one), figures)


if __name__ == "__main__":
    main()
