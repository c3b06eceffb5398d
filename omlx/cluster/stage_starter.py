"""Starts, watches and ends stages on the machine where it runs: what Ray's actor on a node does.

A stage is a process of its own and not Ray's worker. So its environment is right for its machine (Ray would
bring the coordinator's), MLX never shares a process with Ray, and a stage outlives the actor, the raylet and
the whole of Ray: its life hangs on the head's control connection alone. Ray is not imported here.
"""

import os
import socket
import subprocess
from dataclasses import dataclass, field

import psutil

from omlx.cluster.local_actor import STAGE, compute_environment
from omlx.cluster.recorded_process import RecordedProcess
from omlx.errors import BadSetting

SECURITY_FOLDER = "OMLX_RAY_SECURITY"
"""In the environment of a node's Ray: the folder of that node's certificate."""
KILLED_WITHIN_S = 5.0
OURS_ALONE = ("RAY_", "OMLX_RAY_")
"""What a stage has no use for; some of it leads to secrets."""


@dataclass(frozen=True, slots=True)
class StartedStage:
    """A stage's process on its machine."""

    address: str
    port: int
    """Where it waits for the head's control connection."""
    process: RecordedProcess


@dataclass(slots=True)
class StageStarter:
    """One a node. Ray calls its methods, in several threads."""

    command: tuple[str, ...] = STAGE
    _children: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    """So that nothing that ended stays a zombie."""

    def start(self, address: str, head: str) -> StartedStage:
        """A stage that listens at `address` for the node `head`, and ends when that does not come.

        Raises BadSetting where this machine cannot listen there, or does not know its certificate.
        """
        self._children = [child for child in self._children if child.poll() is None]
        folder = os.environ.get(SECURITY_FOLDER)
        if not folder:
            raise BadSetting("this node's Ray was not started by omlx: `omlx node run` starts it")
        try:
            listener = socket.create_server((address, 0), backlog=16)
        except OSError as error:
            raise BadSetting(f"cannot listen at {address}: {os.strerror(error.errno or 0)}") from None
        with listener:
            fd = listener.fileno()
            arguments = ["--listener", str(fd), "--security", folder, "--peer", head]
            child = subprocess.Popen(
                [*self.command, *arguments],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                env=stage_environment(),
                start_new_session=True,
            )
            port: int = listener.getsockname()[1]
        self._children.append(child)
        return StartedStage(address, port, RecordedProcess.of(psutil.Process(child.pid)))

    def end(self, stage: RecordedProcess, within_s: float) -> None:
        """Wait for a stage's end for so long, then kill it; returns when it is gone.

        Whoever started it, this actor or one before.
        """
        if (process := stage.find()) is not None:
            try:
                process.wait(within_s)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(KILLED_WITHIN_S)
        self._children = [child for child in self._children if child.poll() is None]


def stage_environment() -> dict[str, str]:
    """Of a stage on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS_ALONE)}
    return kept | compute_environment()
