"""The end: what was started is gone on both Macs, and so is what it took."""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

from tests.mac.machines import Failed, omlx_json, rays_here
from tests.mac.meeting import CHECK_WITHIN_S, login
from tests.mac.sizes import gb
from tests.mac.splitting import own_name
from tests.mac.steps import Run, step

GONE_WITHIN_S = 30.0
LOOK_EVERY_S = 1.0
NOISE_BYTES = 10**9
"""Free memory goes up and down by so much by itself."""


@step("nothing of it is left, on either machine")
def ended(run: Run) -> str:
    run.close()
    run.facts()
    end = time.monotonic() + GONE_WITHIN_S
    while left := " and ".join(leftovers(run)):
        if time.monotonic() > end:
            raise Failed(f"{GONE_WITHIN_S:g} s after the servers there still is {left}")
        time.sleep(LOOK_EVERY_S)
    if run.gifts is None or run.free_before is None or not run.started:
        return "no process is left; no model was loaded"
    there, here = run.gifts.values()
    return f"no process is left; free memory: {memory_back(run, (here, there), end)}"


def leftovers(run: Run) -> Iterator[str]:
    """In words."""
    if here := [one.pid for one in run.started if lives(one)]:
        yield f"what the servers started here ({here})"
    if rays := [one.pid for one in rays_here() - run.rays_before]:
        yield f"Ray here ({rays})"
    if there := run.remote.stages():
        yield f"a stage on {run.asked.host} ({there})"


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def memory_back(run: Run, taken: tuple[int, int], end: float) -> str:
    """Here and there, in words. Raises Failed where more than half of what was taken stays away."""
    assert run.free_before is not None
    allowed = [max(NOISE_BYTES, size // 2) for size in taken]
    while True:
        free = free_now(run)
        lacking = [before - now for before, now in zip(run.free_before, free, strict=True)]
        names = (own_name(), run.node["name"] if run.node is not None else run.asked.host)
        words = ", ".join(
            f"{gb(now)} on {name}, {gb(before)} before"
            for name, before, now in zip(names, run.free_before, free, strict=True)
        )
        if all(less <= most for less, most in zip(lacking, allowed, strict=True)):
            return words
        if time.monotonic() > end:
            raise Failed(f"memory has not come back: {words}")
        time.sleep(LOOK_EVERY_S)


def free_now(run: Run) -> tuple[int, int]:
    """Bytes here and there. Raises Failed."""
    words = ("cluster", "check", run.asked.host, *login(run))
    (report,) = omlx_json(*words, within_s=CHECK_WITHIN_S, codes=(0, 1))
    facts = report["facts"] or {}
    return int(psutil.virtual_memory().available), int(facts.get("available_bytes") or 0)
