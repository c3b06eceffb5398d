"""A script of ours, run on other nodes over SSH: bytes go in behind it, and one line of JSON comes back.

It is run to the letter, by the Python that `omlx` there belongs to, so it may import whatever omlx has.
"""

import asyncio
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from omlx.cluster.known_hosts import KnownHosts
from omlx.cluster.members import Joined
from omlx.cluster.nodes import NodeId
from omlx.cluster.ssh import Access, RemoteProcess, Shell, open_ssh, target
from omlx.cluster.trust import Trust
from omlx.cluster.validation import NO_PYTHON, START
from omlx.errors import BadSetting, SshFailed

ANSWER_WITHIN_S = 20.0
"""Starting Python there and writing a few files."""
MOST_ANSWER_BYTES = 65536
MOST_AT_ONCE = 8
MARK = b"omlx-answer "
FRAME = """
import json, sys
from pathlib import Path
data = i.read(int(i.readline()))
def answer():
    from omlx.errors import OmlxError
    folder = Path("~/.omlx/cluster")
    try:
{body}
    except OmlxError as error:
        return {{"error": str(error)}}
sys.stdout.write("omlx-answer " + json.dumps(answer()) + "\\n")
"""
"""`body` stands eight spaces in: it has `data` and `folder`, and returns a dictionary."""

A = TypeVar("A", bound=msgspec.Struct)


class _Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    error: str


def access_of(trust: Trust) -> Access:
    return Access(trust.ssh_key, KnownHosts(trust.folder / "known_hosts"))


async def ask_all(
    trust: Trust, nodes: Iterable[Joined], script: str, data: bytes, kind: type[A]
) -> dict[NodeId, A | str]:
    """What each node answers, or why it does not. A few at a time, and none keeps the others waiting long."""
    places = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(node: Joined) -> A | str:
        async with places:
            try:
                return await ask(trust, node, script, data, kind)
            except (SshFailed, BadSetting) as error:
                return str(error)

    async with asyncio.TaskGroup() as group:
        tasks = {node.id: group.create_task(one(node)) for node in nodes}
    return {id: task.result() for id, task in tasks.items()}


async def ask(trust: Trust, node: Joined, script: str, data: bytes, kind: type[A]) -> A:
    """Raises SshFailed within the deadlines of `open_ssh` and ANSWER_WITHIN_S, BadSetting where the node
    refuses."""
    async with open_ssh(target(node.host, node.user, node.port), access_of(trust)) as shell:
        return await run_script(shell, script, data, kind)


async def run_script(
    shell: Shell, script: str, data: bytes, kind: type[A], within_s: float = ANSWER_WITHIN_S
) -> A:
    """Run it there. Raises SshFailed, BadSetting with the machine's own words."""
    code = script.encode("ascii")
    try:
        async with asyncio.timeout(within_s), shell.start(START) as process:
            await process.write(b"%d\n%s%d\n%s" % (len(code), code, len(data), data))
            line = await _hear(process)
    except TimeoutError:
        raise _no_answer(f"nothing within {within_s:g} s", None) from None
    try:
        failed = msgspec.json.decode(line, type=_Failed)
    except msgspec.MsgspecError:
        pass  # an answer then
    else:
        raise BadSetting(f"{shell.peer_address} refuses: {failed.error}")
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise _no_answer(str(error), None) from error


async def _hear(process: RemoteProcess) -> bytes:
    """The line behind the mark; what a login shell prints before it is passed over."""
    heard = b""
    while True:
        _, mark, behind = heard.partition(MARK)
        line, end, _ = behind.partition(b"\n")
        if mark and end:
            return line
        got = await process.read(MOST_ANSWER_BYTES)
        heard += got
        if not got or len(heard) > MOST_ANSWER_BYTES:
            raise _no_answer(await process.complaint(500), await process.exit_code())


def _no_answer(said: str, code: int | None) -> SshFailed:
    if code == NO_PYTHON:
        return SshFailed("omlx", "it is not installed there", "omlx", "pip install 'omlx-cluster[cluster]'")
    seen = f"no answer of ours ({said or f'exit code {code}'})"
    fix = "look whether `omlx --version` works there and is the same as here"
    return SshFailed("omlx", seen, "one", fix)
