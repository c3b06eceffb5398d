"""Every step of a model on a time axis: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Chrome's trace event format, one event a line; its readers do not ask for the closing bracket, so the file
is good at any moment. All stages on one machine share its monotonic clock.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import structlog

from omlx.node.step import StepPlan, Work
from omlx.node.wire import PlanTimes

log = structlog.get_logger()

LARGEST_BYTES = 256 * 2**20
"""Then it says so and stops: some hours of a busy server."""
HEAD, PROCESS, DEVICE = 0, 1, 2


class Timeline:
    """Owned by the engine's meters. Raises OSError where the file cannot be written at first; a disk that
    fills up later ends the timeline and nothing else."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: TextIO | None = path.open("w", buffering=1, encoding="utf-8")
        self._bytes = 0
        self._named: set[int] = set()
        self._write_text("[\n")
        self._name(HEAD, "head", {0: "plans in flight"})

    def in_flight(self, count: int, at: float) -> None:
        """How many plans are on their way since `at`, on time.monotonic."""
        self._write(
            {"ph": "C", "name": "plans in flight", "pid": HEAD, "ts": at * 1e6, "args": {"plans": count}}
        )

    def sent(self, plan: StepPlan, at: float) -> None:
        self._write(
            {"ph": "i", "s": "t", "name": _title(plan.id, plan.work), "pid": HEAD, "tid": 0, "ts": at * 1e6}
        )

    def stage(self, stage: int, work: Work, times: PlanTimes) -> None:
        """One plan on one stage: what its process did, and when its device was busy."""
        pid = stage + 1
        if pid not in self._named:
            self._named.add(pid)
            self._name(pid, f"stage {stage}", {PROCESS: "process", DEVICE: "device"})
        title = _title(times.plan, work)
        arguments = {"plan": times.plan, "rows": work.rows, "chunk tokens": work.tokens, "pairs": work.pairs}
        for name, tid, start, end in (
            ("wait for input", PROCESS, times.taken, times.began),
            ("build", PROCESS, times.began, times.launched),
            ("give", PROCESS, times.computed, times.given),
            (title, DEVICE, times.computed - times.busy_s, times.computed),
        ):
            self._write(
                {
                    "ph": "X",
                    "name": name,
                    "pid": pid,
                    "tid": tid,
                    "ts": round(start * 1e6, 1),
                    "dur": round(max(0.0, end - start) * 1e6, 1),
                    "args": arguments,
                }
            )

    def close(self) -> None:
        """What a full disk does not take is lost."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _name(self, pid: int, process: str, threads: dict[int, str]) -> None:
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        for tid, name in threads.items():
            self._write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._write_text(json.dumps(event, separators=(",", ":")) + ",\n")

    def _write_text(self, text: str) -> None:
        if self._file is None:
            return
        self._bytes += len(text)
        try:
            self._file.write(text)
            if self._bytes > LARGEST_BYTES:
                log.warning("timeline is full", file=str(self._path), bytes=self._bytes)
                self.close()
        except OSError as error:
            log.warning("timeline ends", file=str(self._path), why=str(error))
            self.close()


def _title(plan: int, work: Work) -> str:
    parts = [f"{work.rows} rows"] if work.rows else []
    parts += [f"{work.tokens} prompt tokens"] if work.tokens else []
    return f"{plan}: {' + '.join(parts) or 'nothing'}"
