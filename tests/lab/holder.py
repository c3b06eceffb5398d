"""The process that holds namespaces of the lab until its owner or its time ends. In a host it is init.

Run by its path with the standard library alone: `holder.py TTL_S [LEFTOVERS]`. The switch's holder also
clears away what a lab leaves on the machine, so that even a killed owner leaves nothing.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cgroup_roots() -> list[Path]:
    """The folders in which groups are made: version 2's one, or version 1's for cpu and memory."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [root for root in (CGROUPS / "cpu", CGROUPS / "memory") if root.is_dir()]


def clear(tag: str, folder: Path) -> None:
    """Removes the lab's groups, with what still runs in them, and its folder."""
    for top in (root / tag for root in cgroup_roots()):
        groups = [*top.iterdir(), top] if top.is_dir() else []
        for group in filter(Path.is_dir, groups):
            _remove(group)
    shutil.rmtree(folder, ignore_errors=True)


def _remove(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:  # its processes are still ending
            with suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)


@contextmanager
def mount_point(path: str) -> Iterator[None]:
    """An empty folder of the machine, for hosts to mount their own upon; its last lab removes it."""
    while True:
        Path(path).mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):  # noqa: PTH116 (Path has no samestat)
                break
        os.close(handle)  # another lab removed it meanwhile
    try:
        yield
    finally:
        # Removed under another lab's hosts, it would take their mounts with it.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(path).rmdir()
        os.close(handle)


def reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def hold(ttl_s: float) -> None:
    """Says that it is ready, then waits for the end of standard input or of the time."""
    signal.signal(signal.SIGCHLD, reap)  # as init it is the parent of all orphans
    print("ready", flush=True)
    end = time.monotonic() + ttl_s
    while (left := end - time.monotonic()) > 0:
        if select.select([0], [], [], min(5.0, left))[0] and not os.read(0, 1):
            return


def main(ttl_s: str, leftovers: str | None = None) -> None:
    if leftovers is None:
        hold(float(ttl_s))
        return
    left = json.loads(leftovers)
    with ExitStack() as stack:
        for path in left["mount_points"]:
            stack.enter_context(mount_point(path))
        stack.callback(clear, left["tag"], Path(left["folder"]))
        hold(float(ttl_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
