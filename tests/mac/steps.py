"""What a step of the checklist is, and what the steps have found so far."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from tests.mac.machines import Failed, Mlx, Remote, rays_here
from tests.mac.server import Answer, Server, start_server

Outcome: TypeAlias = Literal["pass", "fail", "skipped"]


class Skipped(Exception):
    """Why a step was not tried."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one."""

    what: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    host: str
    model: Path
    user: str
    fingerprint: str | None
    """Of HOST's key, compared by a person; None: it is known, or has to be."""
    hands: bool
    """Somebody can pull a cable."""
    tokens: int
    """Of each answer."""


@dataclass(slots=True)
class Run:
    """Owned by the command. A step fills in what it found; None: it found nothing, and who needs it skips."""

    asked: Asked
    folder: Path
    """For the servers' logs."""
    tell: Callable[[str], None]
    """A line to whoever sits there."""
    here: Mlx | None = None
    report: dict[str, Any] | None = None
    """Of `omlx cluster check HOST`."""
    node: dict[str, Any] | None = None
    """HOST, as `omlx cluster status` has it."""
    gifts: dict[str, int] | None = None
    """Bytes that each machine is to give, as `omlx serve --node` takes them: HOST by its id, then here."""
    alone: Answer | None = None
    """What this machine says without the other one."""
    server: Server | None = None
    """Of both machines, and ready."""
    free_before: tuple[int, int] | None = None
    """Bytes, here and there, before anything was loaded."""
    running: list[Server] = field(default_factory=list)
    started: list[psutil.Process] = field(default_factory=list)
    """Every process of the servers that were ended."""
    rays_before: frozenset[psutil.Process] = field(default_factory=rays_here)
    """Of other servers of this user."""

    @property
    def remote(self) -> Remote:
        return Remote(self.asked.host, self.asked.user)

    def facts(self) -> dict[str, Any]:
        """What the check found out about HOST. Raises Skipped."""
        if self.report is None or self.report["facts"] is None:
            raise Skipped(f"the check came to no facts of {self.asked.host}")
        found: dict[str, Any] = self.report["facts"]
        return found

    def serving(self) -> tuple[Server, Answer]:
        """The server of both machines, and what every answer has to be. Raises Skipped."""
        if self.server is None or self.alone is None:
            raise Skipped("no server runs on both machines")
        return self.server, self.alone

    # ---------------------------------------------------------------- servers

    def start(self, name: str, *flags: str) -> Server:
        """Ready to answer. Raises Failed; then it was ended."""
        server = start_server(self.asked.model, self.folder / f"{name}.log", *flags)
        server.tokens = self.asked.tokens
        self.running.append(server)
        try:
            server.wait_ready()
        except Failed:
            self.end(server)
            raise
        return server

    def end(self, server: Server) -> None:
        """Raises Failed where it has to be killed."""
        self.running.remove(server)
        if server is self.server:
            self.server = None
        self.started += server.family()
        server.end()

    def close(self) -> None:
        """Whatever still runs. Raises Failed as `end`, after all were ended."""
        failed: Failed | None = None
        for server in tuple(self.running):
            try:
                self.end(server)
            except Failed as one:
                failed = one
        if failed is not None:
            raise failed


@dataclass(frozen=True, slots=True)
class Planned:
    """A step to carry out: `do` tells a detail, or raises Failed or Skipped with it."""

    what: str
    do: Callable[[Run], str]

    def __call__(self, run: Run) -> Step:
        try:
            return Step(self.what, "pass", self.do(run))
        except Failed as failed:
            return Step(self.what, "fail", str(failed))
        except Skipped as skipped:
            return Step(self.what, "skipped", str(skipped))


def step(what: str) -> Callable[[Callable[[Run], str]], Planned]:
    return lambda do: Planned(what, do)
