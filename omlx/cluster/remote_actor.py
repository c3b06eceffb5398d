"""A stage on another machine, as the coordinator holds it: placed by Ray, spoken to over our own TLS.

Ray's part is over once the stage's process is there. From then on the stage lives as long as its control
connection; Ray is asked once more to see to its end.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from omlx.cluster.local_actor import STAGE, LocalActor, place_local
from omlx.cluster.membership import Member
from omlx.cluster.ray_driver import RayDriver
from omlx.cluster.ray_messages import Placed
from omlx.cluster.recorded_process import RecordedProcess
from omlx.errors import Closed, LinkLost, RayFailed, StageLost
from omlx.node.channel import Streams, open_streams
from omlx.node.client import StageProcess

log = structlog.get_logger()

PLACE_WITHIN_S = 20.0
"""An actor that is not there yet takes a second or two."""
CONNECT_WITHIN_S = 8.0
"""Less than a stage waits for its head: it looks up once Python has started."""
CONFIRM_WITHIN_S = 1.0
"""How long a rebuild waits to hear that a lost stage is gone for good; its node may be gone, too."""


@dataclass(slots=True)
class RemoteActor:
    """A stage in use. Implements StageProcess."""

    host: str
    node: str | None
    placed: RecordedProcess
    driver: RayDriver = field(repr=False)
    streams: Streams = field(repr=False)
    reader: asyncio.StreamReader = field(init=False, repr=False)
    writer: asyncio.StreamWriter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.reader, self.writer = self.streams.reader, self.streams.writer

    @property
    def pid(self) -> int:
        return self.placed.pid

    async def end(self, within_s: float) -> None:
        """Wait for its end for so long, then kill it. Where Ray cannot say that it is gone, its connection
        is: that ends every stage that is not frozen."""
        assert self.node is not None
        if within_s == 0.0:
            self.streams.close()
        try:
            async with asyncio.timeout(within_s + CONFIRM_WITHIN_S):
                await self.driver.end(self.node, self.placed, within_s)
        except TimeoutError:
            log.warning("a stage's end is not confirmed", node=self.node, pid=self.pid)
        except (RayFailed, Closed) as failed:
            log.warning("a stage's end is not confirmed", node=self.node, pid=self.pid, why=str(failed))
        finally:
            self.streams.close()
            with suppress(OSError):
                await self.writer.wait_closed()


class RayPlacement:
    """Stages on the nodes that their layout names. Implements Placement.

    `member` is this machine as a node: stages on it are children of this process. All of them show their
    node's certificate to each other. `address_of`: where a node's neighbours reach it, by its id; on the
    nodes' fastest network, which need not be Ray's.
    """

    def __init__(self, driver: RayDriver, member: Member, address_of: Callable[[str], str]) -> None:
        self._driver = driver
        self._member = member
        self._address_of = address_of
        self._here: list[LocalActor] = []

    async def __call__(self, index: int, node: str) -> StageProcess:
        """Raises StageLost where its node does not take it."""
        address = self._address_of(node)
        if node == self._member.node_id:
            return await self._place_here(index, address)
        try:
            placed = await self._driver.place(node, self._member.node_id, PLACE_WITHIN_S)
            streams = await self._connect(placed, node)
        except (RayFailed, LinkLost) as error:
            raise StageLost(f"stage {index} cannot be placed on node {node}: {error}", index) from error
        return RemoteActor(address, node, placed.process, self._driver, streams)

    async def _connect(self, placed: Placed, node: str) -> Streams:
        address = (placed.address, placed.port)
        try:
            return await open_streams(address, self._member.security, node, CONNECT_WITHIN_S)
        except BaseException:
            # It ends by itself when its head does not come; this is only sooner.
            with suppress(TimeoutError, RayFailed):
                async with asyncio.timeout(CONFIRM_WITHIN_S):
                    await self._driver.end(node, placed.process, 0.0)
            raise

    async def _place_here(self, index: int, address: str) -> LocalActor:
        node = self._member.node_id
        actor = await place_local(index, node, (*STAGE, "--security", self._member.security.folder))
        actor.host, actor.node = address, node
        self._here = [one for one in self._here if one.process.poll() is None] + [actor]
        return actor

    def end_here(self) -> None:
        """This machine has another address, and neighbours go to the old one: stages here are placed anew."""
        for actor in self._here:
            actor.process.kill()
