"""One machine: every stage is a child of this process, and they share its memory in equal parts."""

import platform
from collections.abc import Callable

import psutil
import structlog

from omlx.cluster.offer import Terms
from omlx.cluster.planner import NodeBudget, ShardPlan, StagePlan, plan_work
from omlx.cluster.shard_map import NodeView
from omlx.cluster.site import Need, layout_of
from omlx.errors import DoesNotFit
from omlx.node.client import Placement, StageProcess
from omlx.node.layout import Layout
from omlx.settings import Settings

log = structlog.get_logger()


class LocalSite:
    """Implements Site. `ceiling_bytes`: what all models together may take of the memory; `available_bytes`:
    of it, at this moment."""

    def __init__(
        self, settings: Settings, ceiling_bytes: int, available_bytes: Callable[[], int], place: Placement
    ) -> None:
        self._settings = settings
        self._ceiling_bytes = ceiling_bytes
        self._available_bytes = available_bytes
        self._place = place

    async def place(self, index: int, node: str) -> StageProcess:
        return await self._place(index, node)

    async def layout(self, need: Need) -> Layout:
        """Raises DoesNotFit."""
        plan, hot_bytes = self._plan(need)
        return layout_of(
            need.manifest,
            plan,
            nodes=("",) * len(plan.stages),
            memory_shares=[self._gpu_share(stage, need.models) for stage in plan.stages],
            hot_bytes=share_out(hot_bytes, plan),
            places=self._settings.max_concurrent_requests,
        )

    async def again(self, need: Need, before: Layout, lost: frozenset[str]) -> Layout:
        """Here again: there is no other place."""
        return before

    def nodes(self) -> tuple[NodeView, ...]:
        total, ceiling = int(psutil.virtual_memory().total), self._ceiling_bytes
        return (NodeView(self.name(""), None, True, "up", None, total, ceiling),)

    def name(self, node: str) -> str:
        return platform.node().split(".")[0] or "here"

    def _plan(self, need: Need) -> tuple[ShardPlan, int]:
        """The plan, and the bytes that the hot tier has beside it: none where there is no room for both."""
        ceiling = self._ceiling_bytes
        budget = min(ceiling - sum(need.taken.values()), self._available_bytes())
        hot_bytes = Terms.of(self._settings).hot_bytes(ceiling, need.models)
        try:
            return self._plan_within(need, budget - hot_bytes), hot_bytes
        except DoesNotFit:
            pass  # perhaps without
        try:
            plan = self._plan_within(need, budget)
        except DoesNotFit as error:
            raise DoesNotFit(f"{need.model} does not fit into memory: {error}", error.short_bytes) from error
        log.warning("no memory is left for the hot tier", model=need.model, wanted_bytes=hot_bytes)
        return plan, 0

    def _plan_within(self, need: Need, budget: int) -> ShardPlan:
        stages = self._settings.stages
        nodes = [NodeBudget(f"stage {i}", max(1, budget // stages)) for i in range(stages)]
        return plan_work(
            need.manifest,
            nodes,
            context_tokens=need.least_tokens,
            sequences=1,
            step_tokens=self._settings.step_tokens,
        )

    def _gpu_share(self, stage: StagePlan, models: int) -> float:
        """A stage's part of the GPU's limits; over all stages of all models they never exceed the whole."""
        return min(1.0, (stage.node.bytes if models == 1 else stage.used) / self._ceiling_bytes)


def share_out(hot_bytes: int, plan: ShardPlan) -> tuple[int, ...]:
    """RAM for what is kept, in proportion to the stages' keys and values."""
    whole = sum(stage.kv for stage in plan.stages) or 1
    # A stage without caches counts a byte a block, and must not be full because of them.
    return tuple(hot_bytes * stage.kv // whole or min(hot_bytes, 2**20) for stage in plan.stages)
