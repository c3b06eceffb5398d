"""GET /metrics: what the models do and by which measured figures they decide, in Prometheus' text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Callable, Iterator
from dataclasses import fields

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from omlx.api.models import Models
from omlx.node.costs import StageCost
from omlx.node.meters import ModelFigures

Reading = tuple[str, str, Callable[[ModelFigures], float]]
"""(name, what it says, the figure)"""
PARTS = tuple(field.name for field in fields(StageCost) if field.type is float)


def router(models: Models) -> APIRouter:
    """The route over `models`."""
    routes = APIRouter()
    registry = CollectorRegistry()
    registry.register(ModelsCollector(models))

    @routes.get("/metrics")
    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


class ModelsCollector(Collector):
    """Reads the figures of every loaded model when it is asked."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        """Nothing: or else the registry would collect once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        figures = self._models.figures()
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(f"omlx_{name}", text, labels=["model"])
            for model, own in figures.items():
                gauge.add_metric([model], value(own))
            yield gauge
        for name, text, value in COUNTERS:
            counter = CounterMetricFamily(f"omlx_{name}", text, labels=["model"])
            for model, own in figures.items():
                counter.add_metric([model], value(own))
            yield counter
        yield from _of_stages(figures)
        yield from _of_tiers(figures)
        rounds = GaugeMetricFamily(
            "omlx_predicted_round_seconds",
            "From one token of an answer to the next, with the running answers in so many groups",
            labels=["model", "groups"],
        )
        for model, own in figures.items():
            for groups, seconds in own.rounds:
                rounds.add_metric([model, str(groups)], seconds)
        yield rounds


GAUGES: tuple[Reading, ...] = (
    ("requests_running", "Requests that have a place", lambda own: own.running),
    ("requests_waiting", "Requests in the queue", lambda own: own.waiting),
    ("plans_in_flight", "Steps on their way through the stages", lambda own: own.in_flight),
    ("groups", "Groups that decoding requests are dealt into", lambda own: own.groups),
    ("look_ahead", "Steps of one group that may be on their way", lambda own: own.ahead),
)
COUNTERS: tuple[Reading, ...] = (
    ("plans", "Steps sent to the stages", lambda own: own.plans),
    ("drawn_tokens", "Tokens drawn, those thrown away behind a stop included", lambda own: own.drawn_tokens),
    ("prompt_tokens", "Prompt tokens computed, again after a lost stage", lambda own: own.prompt_tokens),
    ("recoveries", "Pipelines rebuilt after a lost stage", lambda own: own.recoveries),
    ("prefix_lookups", "Prompts that were looked up in the cache", lambda own: own.cache.lookups),
    ("prefix_hit_tokens", "Prompt tokens found there, not computed", lambda own: own.cache.hit_tokens),
    ("prefix_missed_tokens", "Prompt tokens not found there", lambda own: own.cache.missed_tokens),
    ("kv_restored_blocks", "Blocks laid back from RAM", lambda own: own.cache.restored_blocks),
    ("kv_fetched_blocks", "Blocks read from disk into RAM", lambda own: own.cache.fetched_blocks),
    ("kv_spilled_blocks", "Blocks written to disk", lambda own: own.cache.spilled_blocks),
    ("kv_evicted_blocks", "Blocks given up in RAM to make room", lambda own: own.cache.evicted_blocks),
    ("kv_dropped_writes", "Blocks that were not written to disk", lambda own: own.cache.dropped_writes),
    ("kv_given_up_fetches", "Reads given up for computing", lambda own: own.cache.given_up_fetches),
)


def _of_stages(figures: dict[str, ModelFigures]) -> Iterator[Metric]:
    busy = CounterMetricFamily(
        "omlx_stage_busy_seconds", "What steps took the stage's device", labels=["model", "stage"]
    )
    cost = GaugeMetricFamily(
        "omlx_stage_cost_seconds",
        "A step's fitted cost: fixed and each row when decoding; a prompt's chunk, token and pair",
        labels=["model", "stage", "part"],
    )
    for model, own in figures.items():
        for number, stage in enumerate(own.stages):
            busy.add_metric([model, str(number)], stage.busy_s)
            for part in PARTS if stage.cost is not None else ():
                cost.add_metric([model, str(number), part], getattr(stage.cost, part))
    yield from (busy, cost)


def _of_tiers(figures: dict[str, ModelFigures]) -> Iterator[Metric]:
    labels = ["model", "tier", "stage"]
    blocks = GaugeMetricFamily(
        "omlx_kv_blocks", "Blocks of keys and values that a stage keeps", labels=labels
    )
    sizes = GaugeMetricFamily("omlx_kv_bytes", "Bytes that they take, in RAM or on disk", labels=labels)
    for model, own in figures.items():
        for family, tier, numbers in (
            (blocks, "hot", own.cache.hot_blocks),
            (blocks, "cold", own.cache.cold_blocks),
            (sizes, "hot", own.cache.hot_bytes),
            (sizes, "cold", own.cache.cold_bytes),
        ):
            for stage, number in enumerate(numbers):
                family.add_metric([model, tier, str(stage)], number)
    yield from (blocks, sizes)
