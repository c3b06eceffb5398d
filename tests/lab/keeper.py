"""A lab that outlives the command that made it: a process in the background, asked over a Unix socket."""

import inspect
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tests.lab.lab import Lab, macs
from tests.lab.machine import ROOT, START_S, LabError, end, first_line

VERBS: dict[str, Callable[..., object]] = {
    "block": Lab.block,
    "boot": Lab.boot,
    "cpu": Lab.cpu,
    "crash": Lab.crash,
    "cut": Lab.cut,
    "heal": Lab.heal,
    "multicast": Lab.multicast,
    "power_off": Lab.power_off,
    "resume": Lab.resume,
    "shape": Lab.shape,
    "status": Lab.status,
    "suspend": Lab.suspend,
    "unblock": Lab.unblock,
}
MOST_BYTES = 1 << 20
"""Of one line either way."""
READY = "ready\n"
DOWN = "down"


def keep(folder: Path, count: int, memory_gib: list[int], ttl_s: float) -> None:
    """Holds the lab until it is told `down`, is ended, or its time is up. Says one line when it stands."""
    signal.signal(signal.SIGTERM, leave)
    sizes = memory_gib * count if len(memory_gib) == 1 else memory_gib
    try:
        with Lab(macs(count, sizes), ttl_s, folder=folder) as lab, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "sock"))
            listener.listen(8)
            listener.settimeout(1)
            print(READY, end="", flush=True)
            while time.monotonic() < lab.deadline and answer_next(listener, lab):
                pass
    except (LabError, OSError) as error:
        sys.exit(str(error))


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def answer_next(listener: socket.socket, lab: Lab) -> bool:
    """Waits a second for a question; False after `down`."""
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return True
    connection.settimeout(5)
    with connection, connection.makefile("rw") as line:
        try:
            verb, places, names = json.loads(line.readline(MOST_BYTES))
            reply = {"said": None if verb == DOWN else obey(lab, verb, places, names)}
        except (LabError, OSError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
            verb, reply = "", {"error": str(error)}
        with suppress(OSError):  # whoever asked went away
            line.write(json.dumps(reply) + "\n")
            line.flush()
    return bool(verb != DOWN)


def obey(lab: Lab, verb: str, places: list[Any], names: dict[str, Any]) -> object:
    if (move := VERBS.get(verb)) is None:
        raise LabError(f"no verb {verb!r}; there are {', '.join(VERBS)}")
    try:
        call = inspect.signature(move).bind(lab, *places, **names)
    except TypeError as error:
        raise LabError(f"{verb}{inspect.signature(move)}: {error}") from None
    try:
        return move(*call.args, **call.kwargs)
    except TypeError as error:  # a word where a number belongs
        raise LabError(f"{verb}: {error}") from None


def ask(folder: Path, verb: str, *places: object, **names: object) -> Any:
    """What the lab in that folder says. Raises `LabError` if it refuses or is not there."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.settimeout(30)
        try:
            asker.connect(str(folder / "sock"))
            with asker.makefile("rw") as line:
                line.write(json.dumps([verb, places, names]) + "\n")
                line.flush()
                reply = json.loads(line.readline(MOST_BYTES))
        except (FileNotFoundError, ConnectionError):
            raise LabError(f"no lab in {folder}: make one with `up`") from None
        except (OSError, ValueError) as error:
            raise LabError(f"the lab in {folder} does not answer: {error}") from None
    if "error" in reply:
        raise LabError(reply["error"])
    return reply["said"]


def start(folder: Path, count: int, memory_gib: list[int], ttl_s: float) -> None:
    """Starts the keeper and waits until its lab stands."""
    if (folder / "sock").exists():
        raise LabError(f"a lab is in {folder} already: `down` ends it")
    sizes = ",".join(map(str, memory_gib))
    command = [sys.executable, "-m", "tests.lab", "keep", "--state", str(folder), "-n", str(count)]
    with tempfile.TemporaryFile("w+") as complaint:
        keeper = subprocess.Popen(
            [*command, "--ttl", str(ttl_s), "--memory-gib", sizes],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaint,
            text=True,
            start_new_session=True,
        )
        if first_line(keeper, START_S * 2) != READY:
            end(keeper)
            complaint.seek(0)
            raise LabError(complaint.read().strip() or "the lab's keeper said nothing")
    assert keeper.stdout is not None
    keeper.stdout.close()
    # It goes on after this process, which is not the one to wait for it.
    keeper.returncode = 0


def stop(folder: Path, within_s: float = START_S) -> None:
    """Ends the lab and waits until its folder is gone. No lab there is no error."""
    if not (folder / "sock").exists():
        return
    ask(folder, DOWN)
    deadline = time.monotonic() + within_s
    while folder.exists():
        if time.monotonic() > deadline:
            raise LabError(f"the lab in {folder} did not go away in {within_s:g} s")
        time.sleep(0.02)
