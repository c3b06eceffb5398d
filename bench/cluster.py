"""What does a cluster cost? Two stages on two hosts of the lab against two on one, in turn. Linux, root.

one_tps, two_tps: tokens/s of one stream, both stages on one host, and one on each of two. ratio: two / one;
0.92 is the goal where a token takes 20 ms or more. recovery_s: the longest pause of a stream whose stage on
the other host is killed. head_idle_percent, node_idle_percent: of a core, all processes of a host that
serves and rests; 2 is the goal; head_raylet_percent and so on: of them, one kind. planner_ms: the best spans
of 128 layers over 64 unlike nodes; planner_above: how far that lies above a bound that no plan can be below.
The lab's hosts share this machine's cores. `python -m bench.cluster idle` looks at the rest alone, and its
ratio is the coordinator's share of a core.
"""

import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

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
REST_S, IDLE_S = 12.0, 40.0
"""A process's time is counted in hundredths of a second: that is 0.025 % of 40 s."""
GIVEN = {"mac-a": "560MB", "mac-b": "560MB"}
"""None of them holds the model alone."""
FLAGS = ("--no-cache", "--max-concurrent-requests", "1")
KINDS = {
    "gcs_server": "gcs",
    "raylet/raylet": "raylet",
    "StageStarter": "starter",
    "omlx.cluster.ray_actor": "driver",
    "omlx.node.process": "stage",
    "bin/omlx": "omlx",
    "ray": "other_ray",
}
"""Kinds of processes, by a word of their command line; the first that fits."""


def tps(server: Server) -> float:
    (stream,) = server.stream(1, TOKENS).ended()
    return float((stream["tokens"] - 1) / stream["seconds"])


def recovery_s(server: Server, host: Host) -> float:
    streams = server.stream(1, TOKENS)
    for process in processes(host, "omlx.node.process"):
        os.kill(process.pid, signal.SIGKILL)
    (stream,) = streams.ended()
    return float(stream["longest_pause_s"])


def kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for word, name in KINDS.items() if word in words), "system")


def cpu_s(host: Host) -> dict[str, float]:
    """By kind, seconds; processes that ended count no more."""
    found: dict[str, float] = defaultdict(float)
    for pid in host.pids():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found[kind(process)] += sum(process.cpu_times()[:2])
    return found


def idle_figures(hosts: dict[str, Host]) -> dict[str, Spread]:
    """Percent of a core, by host, and by kind of process on it."""
    time.sleep(REST_S)
    before = {name: cpu_s(host) for name, host in hosts.items()}
    time.sleep(IDLE_S)
    figures = {}
    for name, host in hosts.items():
        spent = cpu_s(host)
        by_kind = {one: 100 * (spent[one] - before[name].get(one, 0.0)) / IDLE_S for one in spent}
        figures[f"{name}_idle_percent"] = Spread.of([sum(by_kind.values())])
        for one, percent in sorted(by_kind.items()):
            figures[f"{name}_{one}_percent"] = Spread.of([percent])
    return figures


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


def idle(folder: Path) -> None:
    """The part of `main` that looks at the rest."""
    with fleet(2, memory_gib=(64, 16)) as two_hosts, clustered(two_hosts.hosts):
        first, other = two_hosts.hosts
        with serving(first, folder, *FLAGS, *gifts(GIVEN)) as cluster:
            assert len(cluster.shards()) == 2
            figures = idle_figures({"head": first, "node": other})
    tell("cluster", MODEL, figures["head_idle_percent"].median / 100, figures)


def main(folder: Path) -> None:
    one: list[float] = []
    two: list[float] = []
    with fleet(2, memory_gib=(64, 16)) as two_hosts, clustered(two_hosts.hosts):
        first, other = two_hosts.hosts
        with (
            serving(first, folder, *FLAGS, *gifts(GIVEN)) as cluster,
            serving(first, folder, *FLAGS, "--no-cluster", "--stages", "2", port=8001) as local,
        ):
            assert len(cluster.shards()) == 2
            sides = [(one, local), (two, cluster)]
            for number in range(ROUNDS + 1):
                for found, server in sides if number % 2 else reversed(sides):
                    value = tps(server)
                    if number:
                        found.append(value)
        with serving(first, folder, *FLAGS, *gifts(GIVEN)) as cluster:
            rest = idle_figures({"head": first, "node": other})
            pauses = [recovery_s(cluster, other) for _ in range(2)]
    took, above = planner()
    figures = {
        "one_tps": Spread.of(one),
        "two_tps": Spread.of(two),
        "token_ms": Spread.of([1e3 / statistics.median(two)]),
        "recovery_s": Spread.of(pauses),
        **rest,
        "planner_ms": Spread.of(took),
        "planner_above": Spread.of(above),
    }
    tell("cluster", MODEL, ratio(two, one), figures)


if __name__ == "__main__":
    (idle if "idle" in sys.argv[1:] else main)(model_folder(MODEL))
