"""With hands: the cable between both Macs is pulled and put back, while answers run."""

import select
import sys
import termios
import time

from tests.mac.machines import Failed
from tests.mac.server import Answer, Server, same_as
from tests.mac.steps import Run, Skipped, step

LOOK_EVERY_S = 1.0
HANDS_WITHIN_S = 120.0
BACK_WITHIN_S = 300.0
"""From the cable put back to an answer: the model may be loaded again."""
AWAY = (" away, and ", "not fit")
"""What is said of a model that the machines left cannot hold, to who was answered and to who asks next."""


@step("the cable is pulled in the middle of an answer, and put back")
def cable(run: Run) -> str:
    server, wanted = run.serving()
    if not run.asked.hands:
        raise Skipped("--no-hands")
    if not sys.stdin.isatty():
        raise Skipped("there is nobody to pull it: this does not run in a terminal")
    run.tell(f"Pull the cable to {run.asked.host} now (you have {HANDS_WITHIN_S:g} s).")
    broke = until_broken(server, wanted)
    forget_typed()
    run.tell(f"Noticed: {broke}. Put it back, then press Enter (within {HANDS_WITHIN_S:g} s).")
    if not enter_within(HANDS_WITHIN_S):
        raise Failed(f"nobody pressed Enter within {HANDS_WITHIN_S:g} s")
    started = time.monotonic()
    again = until_answered(server)
    same_as(again, wanted, "after the cable was put back")
    return f"{broke}; {time.monotonic() - started:.0f} s after it was put back, the same text again"


def until_broken(server: Server, wanted: Answer) -> str:
    """One answer after the other until something befalls one. Where another link or one machine will do, it
    goes on after a pause; else it ends and names who is away (ADR 0022). Raises Failed."""
    before, end = server.model()["recoveries"], time.monotonic() + HANDS_WITHIN_S
    while time.monotonic() < end:
        answer = server.ask()
        if answer.error is not None:
            if not any(words in answer.error for words in AWAY):
                raise Failed(f"an answer ended, and not because a machine is away: {answer.error}")
            return f"the answer ended: {answer.error}"
        same_as(answer, wanted, "while the cable was pulled")
        if server.model()["recoveries"] > before:
            return f"the answer went on to the same text after a pause of {answer.longest_pause_s:.1f} s"
    raise Failed(f"nothing happened within {HANDS_WITHIN_S:g} s: was it the cable that this model runs over?")


def until_answered(server: Server) -> Answer:
    """Raises Failed."""
    end = time.monotonic() + BACK_WITHIN_S
    while (answer := server.ask()).error is not None:
        if time.monotonic() > end:
            raise Failed(f"no answer {BACK_WITHIN_S:g} s after the cable was put back: {answer.error}")
        time.sleep(LOOK_EVERY_S)
    return answer


def forget_typed() -> None:
    """What was typed before it was asked for is no answer."""
    termios.tcflush(sys.stdin, termios.TCIFLUSH)


def enter_within(seconds: float) -> bool:
    """Whether Enter was pressed in time."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.readline() != ""
