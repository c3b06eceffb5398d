"""Look at other machines before they join: one SSH connection each, one probe, one Report.

Nothing is installed or changed there. What is sent to the remote shell is START, to the letter; all else goes
to the probe as JSON. A host that fails says so in its own report, and hides no other.
"""

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from omlx.cluster import probe
from omlx.cluster.facts import (
    ClockAnswer,
    Facts,
    Look,
    LookAnswer,
    Measured,
    ReachAnswer,
    Reached,
    Unreadable,
    facts_of,
    printable,
    read_answer,
)
from omlx.cluster.findings import Finding, LinkFinding, Report, sort_findings
from omlx.cluster.rules import Case, judge, links_of
from omlx.cluster.ssh import Access, RemoteProcess, Shell, Target, open_ssh
from omlx.errors import BadSetting, SshFailed

A = TypeVar("A")
LOOK_S = 10.0
"""To connect, to look at the machine and to try its ports."""
MEASURE_S = 5.0
MOST_AT_ONCE = 8
LIFE_S = LOOK_S + MEASURE_S * (MOST_AT_ONCE + 1)
"""A probe that nobody listens to any more ends by itself."""
CLOCK_TRIES = 5
BULK_S = 0.5
ALL_BULK_S = 10.0
"""Of those that are looked at at a time: with several each gets less, so that nobody waits long."""
MOST_MEASURED = 3
"""Address pairs; the fastest kinds come first."""
MOST_ANSWER_BYTES = 1 << 20
READ_BYTES = 1 << 16
QUOTED_BYTES = 1 << 12
"""Of what is said there instead of an answer."""
DEFAULT_CACHE = "~/.omlx/cache"

# Finds the Python that omlx runs in there: beside `omlx` itself, which a shell without a login may not have
# in its PATH. `cd /`, for -c looks for modules in the current folder. A Mac without developer tools opens a
# dialog when its own python3 is started. /bin/sh, whatever the user's shell is.
START = (
    "exec /bin/sh -c '"
    'cd /; PATH="$HOME/.omlx/bin:$PATH:$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin"; '
    'o=$(command -v omlx) && o=$(readlink -f "$o") && p="${o%/*}/python3"; '
    '[ -x "$p" ] || { [ "$(uname)" != Darwin ] || xcode-select -p >/dev/null 2>&1 || exit 127; p=python3; }; '
    'exec "$p" -c "import sys; i = sys.stdin.buffer; exec(compile(i.read(int(i.readline())), sys.argv[0], '
    '\\"exec\\"))"'
    "'"
)
NO_PYTHON = 127


@dataclass(frozen=True, slots=True)
class Asked:
    """A machine to look at. vouched: a fingerprint that a person has compared with the machine's own."""

    target: Target
    vouched: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What else to look at, as paths that mean the same on every machine; ~ is the home there."""

    cache: str = DEFAULT_CACHE
    model: str | None = None
    bulk_s: float = BULK_S


async def check_hosts(asked: Sequence[Asked], access: Access, wanted: Wanted) -> list[Report]:
    """One report each, in the order asked. MOST_AT_ONCE at a time, LOOK_S + MEASURE_S each and its turn.

    Links are measured in turn, for two at once would halve each other's.
    """
    ours = await own_facts(wanted)
    wanted = replace(wanted, bulk_s=bulk_share_s(wanted.bulk_s, len(asked)))
    places, turn = asyncio.Semaphore(MOST_AT_ONCE), asyncio.Lock()

    async def one(each: Asked) -> Report:
        async with places:
            return await check_host(each, access, wanted, ours, turn)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(each)) for each in asked]
    return [task.result() for task in tasks]


def bulk_share_s(wanted_s: float, hosts: int) -> float:
    """For one direction of one pair of addresses, in seconds."""
    side_by_side = max(1, min(hosts, MOST_AT_ONCE))
    return min(wanted_s, ALL_BULK_S / (2 * MOST_MEASURED * side_by_side))


async def own_facts(wanted: Wanted) -> Facts:
    """This machine's, by the very same probe."""
    look = await asyncio.to_thread(probe.look, wanted.cache, wanted.model)
    return facts_of(read_answer(json.dumps(look).encode(), Look))


async def check_host(asked: Asked, access: Access, wanted: Wanted, ours: Facts, turn: asyncio.Lock) -> Report:
    """Never raises for what is wrong with the machine: that is in the report."""
    check = _Check(asked, access, wanted, ours, turn)
    try:
        await check.run()
    except SshFailed as error:
        check.fingerprint = error.fingerprint or check.fingerprint
        check.add(error.what, error.seen, error.wanted, error.fix)
    except Unreadable as error:
        fix = "look what runs as omlx and python3 there"
        check.add("probe", str(error), "an answer of our probe", fix)
    except BadSetting as error:
        check.add("set-up here", str(error), "files that can be used", "as it says")
    except TimeoutError:
        fix = "look at the load of that machine, and try again"
        check.add("time", f"it took too long {check.step}", f"an end within {LOOK_S:g} s", fix)
    except OSError as error:
        check.add(
            "ports here", error.strerror or str(error), "a free port", "look at the limits of this machine"
        )
    return check.report()


@dataclass(slots=True)
class _Check:
    """One check of one machine while it goes on."""

    asked: Asked
    access: Access
    wanted: Wanted
    ours: Facts
    turn: asyncio.Lock
    step: str = "to connect"
    fingerprint: str | None = None
    theirs: Facts | None = None
    links: tuple[LinkFinding, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    def add(self, what: str, seen: str, wanted: str, fix: str) -> None:
        """It blocks."""
        self.findings.append(Finding(what, "blocking", seen, wanted, fix))

    def report(self) -> Report:
        target = self.asked.target
        findings = sort_findings(self.findings)
        return Report(
            target.host, target.user, target.port, self.fingerprint, findings, self.theirs, self.links
        )

    async def run(self) -> None:
        now = asyncio.get_running_loop().time
        async with (
            asyncio.timeout(LOOK_S) as deadline,
            open_ssh(self.asked.target, self.access, self.asked.vouched) as shell,
        ):
            self.fingerprint = shell.host_key.fingerprint
            self.step = "to start the probe"
            async with _conversation(shell) as talk:
                self.step = "to look at the machine"
                looked = await talk.ask(
                    LookAnswer, ask="look", cache=self.wanted.cache, model=self.wanted.model
                )
                self.theirs = facts_of(looked.look)
                self.step = "to ask for the time"
                offset, doubt = await _clock(talk)
                with closing(probe.Listener(talk.secret)) as listener:
                    ports = _Ports(talk, shell, looked.port, listener.port)
                    self.step = "to try the ports"
                    there, back = await ports.reach(self.ours, self.theirs)
                    deadline.reschedule(now() + MEASURE_S * (MOST_AT_ONCE + 1))
                    async with self.turn:
                        await self._measure(ports, there, back)
        self.findings.extend(judge(Case(self.ours, self.theirs, offset, doubt, there, back, self.links)))

    async def _measure(self, ports: "_Ports", there: tuple[Reached, ...], back: tuple[Reached, ...]) -> None:
        """Addresses that were reached; where one takes too long, the figures of those before it stay."""
        try:
            async with asyncio.timeout(MEASURE_S):
                await self._measure_each(ports, there, back)
        except TimeoutError:
            seen, fix = f"no end of the measuring within {MEASURE_S:g} s", "look at the cable and the load"
            self.findings.append(Finding("links", "warning", seen, fix=fix))

    async def _measure_each(
        self, ports: "_Ports", there: tuple[Reached, ...], back: tuple[Reached, ...]
    ) -> None:
        assert self.theirs is not None
        returns = {one.address for one in back if one.error is None}
        measured: list[Measured] = []
        measured_back: list[Measured] = []
        for one in [one for one in there if one.error is None][:MOST_MEASURED]:
            measured.append(await ports.measure(one.address, self.wanted.bulk_s))
            if one.local in returns:
                returns.remove(one.local)
                measured_back.append(await ports.measure_back(one.local, self.wanted.bulk_s))
            self.links = links_of(self.ours, self.theirs, there, tuple(measured), tuple(measured_back))


class _Conversation:
    """Questions to a probe and its answers, in turn."""

    def __init__(self, process: RemoteProcess, secret: str) -> None:
        self.secret = secret
        self._process = process
        self._mark = f"{probe.MARK} {secret} ".encode("ascii")
        self._lines: deque[bytes] = deque()
        self._open = b""
        """A line that has not ended yet."""
        self._noise = bytearray()
        self._unanswered = 0

    async def start(self) -> None:
        script = Path(probe.__file__).read_bytes()  # noqa: ASYNC240 - a few KB that Python itself has just read
        hello = json.dumps({"secret": self.secret, "life_s": LIFE_S}).encode("ascii")
        await self._process.write(b"%d\n%s%s\n" % (len(script), script, hello))

    async def ask(self, kind: type[A], **question: Any) -> A:
        """Raises SshFailed when the probe is gone or was never there, Unreadable for what it says."""
        await self._process.write(json.dumps(question).encode("ascii") + b"\n")
        while True:
            if not self._lines:
                await self._hear()
                continue
            line = self._lines.popleft()
            if line.startswith(self._mark):
                self._unanswered = 0
                return read_answer(line.removeprefix(self._mark), kind)
            if len(self._noise) < QUOTED_BYTES:
                self._noise += line + b" "

    async def _hear(self) -> None:
        got = await self._process.read(READ_BYTES)
        if not got:
            raise await self._ended()
        self._unanswered += len(got)
        if self._unanswered > MOST_ANSWER_BYTES:
            seen = f"it sends more than {MOST_ANSWER_BYTES:,} bytes without an answer"
            fix = "look what that user's shell prints when it starts"
            raise SshFailed("probe", seen, "an answer of our probe", fix)
        *lines, self._open = (self._open + got).split(b"\n")
        self._lines.extend(lines)

    async def _ended(self) -> SshFailed:
        said = await self._process.complaint(QUOTED_BYTES)
        code = await self._process.exit_code()
        if code == NO_PYTHON:
            fix = "install omlx there: pip install 'omlx-cluster[cluster]'"
            return SshFailed(
                "omlx", f"neither omlx nor Python is there ({said or 'exit code 127'})", "both", fix
            )
        words = said or printable((self._noise + self._open).decode("utf-8", "replace")) or "nothing"
        fix = "log in there by hand with `ssh`, and look what stands in the way of a command"
        return SshFailed(
            "probe", f"it ended with exit code {code} and said: {words}", "an answer of our probe", fix
        )


@asynccontextmanager
async def _conversation(shell: Shell) -> AsyncIterator[_Conversation]:
    async with shell.start(START) as process:
        talk = _Conversation(process, secrets.token_hex(probe.SECRET_BYTES // 2))
        await talk.start()
        yield talk


async def _clock(talk: _Conversation) -> tuple[float, float]:
    """(offset, doubt) in seconds, theirs less ours: of several answers the one that was back soonest, taken
    to have been given half-way (Cristian, Probabilistic clock synchronization, 1989)."""
    tries = []
    for _ in range(CLOCK_TRIES):
        start, before = time.monotonic(), time.time()
        answer = await talk.ask(ClockAnswer, ask="clock")
        took = time.monotonic() - start
        tries.append((took / 2, answer.time - (before + took / 2)))
    doubt, offset = min(tries)
    return offset, doubt


@dataclass(frozen=True, slots=True)
class _Ports:
    """Both machines' listeners: the port there, and our own."""

    talk: _Conversation
    shell: Shell
    port: int
    own: int

    async def reach(self, ours: Facts, theirs: Facts) -> tuple[tuple[Reached, ...], tuple[Reached, ...]]:
        """From here to there, then from there to here."""
        to = _addresses(self.shell.peer_address, theirs)
        back_to = _addresses(self.shell.local_address, ours)
        tried = await asyncio.to_thread(probe.reach_all, to, self.port, self.talk.secret)
        there = read_answer(json.dumps({"reached": tried}).encode(), ReachAnswer)
        back = await self.talk.ask(ReachAnswer, ask="reach", addresses=back_to, port=self.own)
        return there.reached, back.reached

    async def measure(self, address: str, bulk_s: float) -> Measured:
        tried = await asyncio.to_thread(probe.measure, address, self.port, self.talk.secret, bulk_s)
        return read_answer(json.dumps(tried).encode(), Measured)

    async def measure_back(self, address: str, bulk_s: float) -> Measured:
        return await self.talk.ask(Measured, ask="measure", address=address, port=self.own, bulk_s=bulk_s)


def _addresses(used: str, facts: Facts) -> list[str]:
    """IPv4, by kind of interface; the one that SSH goes over is among them in any case."""
    known = [one.address for one in facts.interfaces]
    return known if used in known or ":" in used else [used, *known]
