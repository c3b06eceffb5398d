"""The coordinator tells its nodes, over SSH, where Ray's head is, and who is no longer trusted.

What a node does about it is `ray_keeper`'s, in `omlx node run` there.
"""

from typing import TYPE_CHECKING

import msgspec

from omlx.cluster.head_address import HeadAddress
from omlx.cluster.members import Joined, Members
from omlx.cluster.nodes import NodeId
from omlx.cluster.remote_script import FRAME, ask_all
from omlx.cluster.trust import Trust

if TYPE_CHECKING:
    from omlx.cluster.ray_processes import RaySession

SUMMON = FRAME.format(
    body="""        from omlx.cluster.head_address import HeadAddress, write_head
        from omlx.cluster.membership import News, install_news
        head, _, news = data.partition(b"\\n")
        head, news = HeadAddress.unpack(head), News.unpack(news)
        install_news(folder, news)
        write_head(folder, head)
        try:
            from omlx.cluster.node_agent import holder
            return {"agent": holder(folder.parent / "node.lock") is not None}
        except (ImportError, OmlxError, OSError):
            return {"agent": False}"""
)


class Summoned(msgspec.Struct, frozen=True):
    """What a node answers that has taken the news and the head's address."""

    agent: bool
    """Whether `omlx node run` runs there. Without it nothing follows."""


async def summon(trust: Trust, members: Members, head: HeadAddress) -> dict[NodeId, Summoned | str]:
    """Have the nodes' Ray join this head; by node, or why it was not told. To be repeated at will: what a
    node has heard already changes nothing there, except that it tries at once."""
    data = head.pack() + b"\n" + trust.news().pack()
    return await ask_all(trust, members, SUMMON, data, Summoned)


def head_of(session: "RaySession") -> HeadAddress:
    """Of a head that `start_head` has started. Its number is when that was, in milliseconds."""
    address, _, port = session.head.rpartition(":")
    number = max((int(one.started * 1000) for one in session.processes), default=0)
    return HeadAddress(address, int(port), number)


def hindrance(node: Joined, answer: Summoned | str) -> str | None:
    """Why that node's Ray will not come; None where nothing is in its way. A line for a person."""
    if isinstance(answer, str):
        return f"{node.name} was not told where Ray's head is: {answer}"
    if not answer.agent:
        return f"omlx node does not run on {node.name}: start it there with `omlx node install`"
    return None
