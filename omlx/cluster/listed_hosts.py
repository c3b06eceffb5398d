"""Hosts that a person listed, for networks that filter multicast: their names looked up, with a deadline."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable

from omlx.cluster.nodes import MOST_ADDRESSES, check_host, is_address
from omlx.errors import BadSetting, Refused

MOST_HOSTS = 64
LOOK_UP_S = 3.0


def check_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Each once, in the order given. Raises BadSetting for one that is neither a name nor an address."""
    try:
        listed = tuple(dict.fromkeys(check_host(host) for host in hosts))
    except Refused as error:
        raise BadSetting(str(error)) from error
    if len(listed) > MOST_HOSTS:
        raise BadSetting(f"{len(listed)} hosts are listed; at most {MOST_HOSTS} are looked for")
    return listed


async def look_up(host: str, deadline_s: float = LOOK_UP_S) -> tuple[str, ...]:
    """Addresses of a checked host, at most MOST_ADDRESSES; none where nobody knew it in time."""
    if is_address(host):
        return (host,)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def give(found: tuple[str, ...]) -> None:
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        found = _resolve(host)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(give, found)

    # A thread of its own: nobody can stop a resolver, and the loop's own threads are waited for at the end.
    threading.Thread(target=ask, name=f"look-up-{host}", daemon=True).start()
    try:
        async with asyncio.timeout(deadline_s):
            return await answer
    except TimeoutError:
        return ()


def _resolve(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    addresses = (str(where[0]) for _, _, _, _, where in found)
    return tuple(dict.fromkeys(filter(is_address, addresses)))[:MOST_ADDRESSES]
