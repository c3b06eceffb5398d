"""Ray's own processes on this machine: a head or a worker, started by us, recorded by us, ended by us.

`ray stop` ends every Ray on a machine, another project's too; here only what carries our mark is touched, by
pid and start time. Ray itself is not imported: it is a command that is run.

    <folder>/ray.lock    held while the session lives: one of this cluster on a machine
    <folder>/ray.json    0600: mark, Ray's own folder, pids with start times; finds what a kill -9 left
    /tmp/omlx-ray-*      0700: Ray's sockets and logs. Short, because a Unix socket's path is limited
"""

import fcntl
import ipaddress
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from omlx.cluster.membership import Member
from omlx.cluster.private_files import decoded, own_folder, read_private, write
from omlx.cluster.ray_access import check_head, ray_environment
from omlx.cluster.recorded_process import RecordedProcess
from omlx.errors import BadSetting, RayFailed

RAY = (sys.executable, "-m", "ray.scripts.scripts", "start")
MARK = "OMLX_RAY_MARK"
"""In the environment of all that we start: which session it is of."""
TEMP = "omlx-ray-"
START_WITHIN_S = 60.0
END_WITHIN_S = 2.0
"""Asked to end, a worker takes 1.7 s; a head may wait for itself for ever."""
LOOK_EVERY_S = 0.02
OBJECT_STORE_BYTES = 80 * 2**20
"""About the least that Ray takes; nothing of ours goes through it."""
WRONG_TOKEN = "InvalidAuthToken"
"""In what Ray says."""
LOG_LINES = 3
LOGS = ("gcs_server.err", "raylet.err", "gcs_server.out", "raylet.out")

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

LEAN = (
    "--include-log-monitor=false",
    "--disable-usage-stats",
    "--num-cpus=0",
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--dashboard-agent-listen-port=0",
)


class _Recorded(msgspec.Struct, frozen=True):
    """ray.json."""

    mark: str
    temp: str
    processes: tuple[RecordedProcess, ...] = ()


@dataclass(slots=True)
class RaySession:
    """Our Ray on this machine, from `start_head` or `start_worker` to `stop`. All of it blocks."""

    member: Member
    address: str
    """This machine's, as the other nodes reach it."""
    head: str
    """HOST:PORT of the cluster's head."""
    folder: Path
    temp: Path
    processes: tuple[RecordedProcess, ...]
    _lock: int | None = field(repr=False)
    """A file's number; None once it is let go."""

    def alive(self) -> bool:
        """Whether everything that was started runs. A worker that the head gave up on ends by itself."""
        return all(one.find() is not None for one in self.processes)

    def log_tail(self) -> str:
        """The last lines of Ray's own logs, on one line."""
        return _log_tail(self.temp)

    def stop(self) -> None:
        """End our processes and nobody else's; safe to call twice. Stages go on."""
        if self._lock is not None:
            try:
                _reap(self.folder)
            finally:
                os.close(self._lock)
                self._lock = None


def start_head(member: Member, address: str, port: int, folder: Path) -> RaySession:
    """The cluster's head, on the coordinator. `folder` keeps the record, `port` is of Ray's GCS.

    Raises BadSetting for what cannot be, RayFailed with the last lines of Ray's log.
    """
    if not 1024 <= port <= 65535:
        raise BadSetting(f"port {port} for Ray's head: one from 1024 to 65535")
    if not can_listen("", port):
        raise BadSetting(
            f"port {port} for Ray's head is taken on this machine: end what has it, or set another"
        )
    own = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
    return _start(member, address, f"{_host(address)}:{port}", folder, own)


def start_worker(member: Member, address: str, head: tuple[str, int], folder: Path) -> RaySession:
    """A node's Ray, which joins the head. Raises as `start_head`."""
    where = f"{_host(head[0])}:{head[1]}"
    ray_environment(member)  # what is missing here is said before who is not there
    check_head(member, head)
    return _start(member, address, where, folder, [f"--address={where}"])


def reap_left_over(folder: Path) -> bool:
    """End what a session here left when its owner was killed. False where there was nothing, or where the
    owner lives."""
    if (lock := _hold(own_folder(folder))) is None:
        return False
    try:
        return _reap(folder)
    finally:
        os.close(lock)


def _start(member: Member, address: str, head: str, folder: Path, own: list[str]) -> RaySession:
    if not _LABEL.fullmatch(member.node_id):
        raise BadSetting(f"node id {member.node_id!r} cannot be a label of Ray's: join with another one")
    if not can_listen(_host(address)):
        raise BadSetting(f"{address} is no address of this machine; give one that the other nodes reach")
    where = [f"--node-ip-address={address}", f"--labels=omlx={member.node_id}"]
    environment = ray_environment(member)
    folder = own_folder(folder)
    if (lock := _hold(folder)) is None:
        raise BadSetting(f"another omlx process runs this cluster's Ray here ({folder}/ray.lock)")
    with ExitStack() as undo:
        undo.callback(os.close, lock)
        _reap(folder)
        mark, temp = secrets.token_hex(16), Path(tempfile.mkdtemp(prefix=TEMP, dir="/tmp")).resolve()
        recorded = _Recorded(mark, str(temp))
        _record(folder, recorded)
        undo.callback(_reap, folder)
        _run([*RAY, *own, *LEAN, *where, f"--temp-dir={temp}"], environment | {MARK: mark}, temp)
        found = tuple(RecordedProcess.of(process) for process in _marked(recorded))
        _record(folder, msgspec.structs.replace(recorded, processes=found))
        session = RaySession(member, address, head, folder, temp, found, lock)
        if not found or not session.alive():
            raise RayFailed(f"Ray ended as soon as it was started: {_log_tail(temp)}")
        undo.pop_all()
    return session


def _run(command: list[str], environment: dict[str, str], temp: Path) -> None:
    """`ray start`, which returns once its processes run and, on a worker, the head has taken it."""
    said = temp / "start.log"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=temp,
            start_new_session=True,
        )
        try:
            code = process.wait(START_WITHIN_S)
        except subprocess.TimeoutExpired:
            why = f"Ray did not start within {START_WITHIN_S:.0f} s; is the head up, with TLS?"
            raise RayFailed(f"{why} {_log_tail(temp)}") from None
        finally:
            process.kill()
            process.wait()
    if code != 0:
        if WRONG_TOKEN in said.read_text(errors="replace"):
            raise RayFailed("the cluster's head takes another token than this machine's: join it again")
        raise RayFailed(f"Ray does not start: {last_lines(said)} {_log_tail(temp)}".strip())


# ------------------------------------------------------------------ the record, and what it leads to


def _hold(folder: Path) -> int | None:
    """The session's lock, which ends with its owner; None while another process has it."""
    lock = os.open(folder / "ray.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _record(folder: Path, recorded: _Recorded) -> None:
    write(folder / "ray.json", msgspec.json.encode(recorded))


def _reap(folder: Path) -> bool:
    """By the record; nothing where there is none. The caller holds the lock."""
    file = folder / "ray.json"
    if not file.exists():
        return False
    recorded = decoded(read_private(file), _Recorded, str(file))
    found = [one.find() for one in recorded.processes]
    ours = {process.pid: process for process in [*found, *_marked(recorded)] if process is not None}
    _end(list(ours.values()))
    temp = Path(recorded.temp)
    if temp.name.startswith(TEMP) and not temp.is_symlink():
        shutil.rmtree(temp, ignore_errors=True)
    file.unlink()
    return bool(ours)


def _marked(recorded: _Recorded) -> list[psutil.Process]:
    """This user's processes of that session, also what its raylet started and left; no stages."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.uids().real == os.getuid() and _is_marked(process, recorded):
                found.append(process)
    return found


def _is_marked(process: psutil.Process, recorded: _Recorded) -> bool:
    if process.environ().get(MARK) == recorded.mark:
        return True
    # Agents and workers write their title over their environment, but they log into the session's folder.
    if not "".join(process.cmdline()[:1]).startswith("ray::"):
        return False
    return any(Path(file.path).is_relative_to(recorded.temp) for file in process.open_files())


def _end(processes: list[psutil.Process]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)  # psutil compares start times first
        end = time.monotonic() + END_WITHIN_S
        while (processes := [one for one in processes if _runs(one)]) and time.monotonic() < end:
            time.sleep(LOOK_EVERY_S)


def _runs(process: psutil.Process) -> bool:
    """A zombie does not, and in a container it may stay one for long."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# ------------------------------------------------------------------ small facts


def _host(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        raise BadSetting(f"{address!r} is no IP address; Ray needs one") from None
    if found.version != 4:
        raise BadSetting(f"{address}: Ray's nodes are reached by IPv4 here; give that address")
    return str(found)


def can_listen(address: str, port: int = 0) -> bool:
    """Whether a process here could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _log_tail(temp: Path) -> str:
    for name in LOGS:
        if said := last_lines(temp / "session_latest" / "logs" / name):
            return said
    return ""


def last_lines(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-LOG_LINES:] if line.strip())
