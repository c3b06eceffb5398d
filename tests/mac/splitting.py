"""One model over both Macs: what each gives, the same text as from one, and a stage that dies meanwhile."""

import platform
import time

import psutil

from tests.mac.machines import Failed, mlx_there, run_command
from tests.mac.meeting import described
from tests.mac.server import Answer, Server, same_as
from tests.mac.sizes import CONTEXT_TOKENS, gb, planned_budgets, share_out
from tests.mac.steps import Run, Skipped, step

LOOK_EVERY_S = 1.0
NOTICED_WITHIN_S = 10.0
ROUNDING = 1.01
"""omlx computes the system's default limit by a rule; Metal rounds it."""
FLAGS = (
    *("--no-cache", "--context-tokens", str(CONTEXT_TOKENS)),
    *("--stages", "1", "--link", "tcp", "--objective", "single"),
)
"""Every answer is computed, and nothing is left in the cache folder."""


@step("memory: the GPU's wired limits, and what stages may take")
def memory(run: Run) -> str:
    facts = run.facts()
    if run.node is None:
        raise Skipped("HOST is no node of this cluster")
    own = psutil.virtual_memory()
    run.free_before = int(own.available), facts["available_bytes"] or 0
    gifts = share_out(run.asked.model, int(own.total), facts["memory_bytes"] or 0)
    # HOST first: where both have one name, that is this machine's.
    run.gifts = {run.node["id"]: gifts.there, own_name(): gifts.here}
    there = mlx_there(run.remote, facts["executable"])
    if run.here is None or not (run.here.shows_macos and there.shows_macos):
        raise Skipped(f"no Metal on both machines, so no wired limit to compare with; {gifts}")
    planned = planned_budgets(run.asked.model)
    here_bytes = max(gifts.here, planned.get(own_name(), 0))
    there_bytes = max(gifts.there, planned.get(run.node["name"], 0))
    for where, given, mlx in (("here", here_bytes, run.here), ("there", there_bytes, there)):
        if given > mlx.most_bytes * ROUNDING:
            raise Failed(f"{where} omlx would take {gb(given)}: {described(mlx)}")
    return (
        f"here {described(run.here)}, iogpu.wired_limit_mb {wired_limit_here()}; there {described(there)}, "
        f"iogpu.wired_limit_mb {facts['wired_limit_mb']} (0: the system's default); {gifts}"
    )


def own_name() -> str:
    """As `omlx serve` calls this machine."""
    return platform.node().split(".")[0] or "here"


def wired_limit_here() -> str:
    ran = run_command(["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"], 10)
    return ran.stdout.strip() or "not told"


# ------------------------------------------------------------------ one model over both


@step("a model over both machines says what this one says alone")
def split(run: Run) -> str:
    if run.gifts is None or run.node is None:
        raise Skipped("it is not known what each machine has to give")
    run.tell("this machine alone: the model is loaded and asked twice")
    alone = run.start("alone", "--no-cluster", *FLAGS)
    try:
        run.alone = steady(alone, "this machine alone")
    finally:
        run.end(alone)
    run.tell("both machines: layers that the other one lacks are copied to it first")
    nodes = [word for name, size in run.gifts.items() for word in ("--node", f"{name}={size}")]
    server = run.start("both", *FLAGS, *nodes)
    stages = spans(server)
    if run.node["name"] not in stages or len(stages) != 2:
        raise Failed(f"the model is not on both machines: {stages}")
    run.server = server
    both = steady(server, "both machines")
    same_as(both, run.alone, f"both machines ({chips(run)})")
    where = ", ".join(f"layers {start} to {end - 1} on {name}" for name, (start, end) in stages.items())
    return f"{both.tokens} tokens are the same; alone {run.alone.figures()}; both {both.figures()}; {where}"


def spans(server: Server) -> dict[str, tuple[int, int]]:
    """By the node's name."""
    return {stage["node"]: (stage["start"], stage["end"]) for stage in server.model()["stages"]}


def steady(server: Server, who: str) -> Answer:
    """The second of two answers, for the first one warms up. Raises Failed where they differ."""
    first = server.ask()
    if first.error is not None:
        raise Failed(f"{who}: {first.error}")
    second = server.ask()
    same_as(second, first, f"{who}, asked again")
    return second


def chips(run: Run) -> str:
    """Unlike ones may round unlike."""
    here = run.here.name if run.here is not None and run.here.name else platform.machine()
    return f"{here} and {run.facts()['chip']}"


@step("the stage on HOST is killed in the middle of an answer")
def killed(run: Run) -> str:
    server, wanted = run.serving()
    before = server.model()["recoveries"]
    with run.remote.ready_to_kill() as killer:
        answer = server.ask(midway=killer.fire)
        same_as(answer, wanted, "after the loss")
        killer.check()
    end = time.monotonic() + NOTICED_WITHIN_S
    while server.model()["recoveries"] <= before:
        if time.monotonic() > end:
            raise Failed(
                "the answer is whole, and no loss was noticed: was it over before the stage was gone?"
            )
        time.sleep(LOOK_EVERY_S)
    return f"the same text; the longest pause was {answer.longest_pause_s:.2f} s; then {spans(server)}"
