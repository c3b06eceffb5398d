"""GET /metrics: the figures under their names, read by Prometheus' own parser."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omlx.node.cache_figures import CacheFigures, cache_figures
from omlx.node.costs import StageCost
from omlx.node.meters import ModelFigures, StageFigures
from omlx.node.prefixes import nothing_kept
from tests.api.fakes import KEY, STOP, FakeModels, ScriptedModel, serving

pytestmark = pytest.mark.anyio

COST = StageCost(0.03, 0.001, 0.02, 0.0004, 2e-8, mixes=True)
CACHE = CacheFigures(
    lookups=9,
    hit_tokens=4096,
    missed_tokens=904,
    restored_blocks=16,
    fetched_blocks=5,
    spilled_blocks=7,
    evicted_blocks=3,
    dropped_writes=2,
    given_up_fetches=1,
    hot_blocks=(10, 11),
    hot_bytes=(1000, 1100),
    cold_blocks=(20, 21),
    cold_bytes=(2000, 2100),
)
FIGURES = ModelFigures(
    running=4,
    waiting=2,
    in_flight=3,
    groups=2,
    ahead=3,
    recoveries=1,
    plans=100,
    drawn_tokens=380,
    prompt_tokens=5000,
    stages=(StageFigures(12.5, COST), StageFigures(11.0, None)),
    rounds=((1, 0.08), (2, 0.07)),
    cache=CACHE,
)


async def scrape(models: FakeModels, headers: dict[str, str] | None = None) -> dict[tuple[str, ...], float]:
    """Every sample by its name and its labels' values."""
    async with serving(models) as url, httpx.AsyncClient() as client:
        answer = await client.get(url + "/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_what_a_model_does_and_decides_by_can_be_read() -> None:
    models = FakeModels(ScriptedModel([STOP]))
    models.measured = {"tiny": FIGURES}
    found = await scrape(models)
    assert found["omlx_requests_running", "tiny"] == 4
    assert found["omlx_groups", "tiny"] == 2
    assert found["omlx_drawn_tokens_total", "tiny"] == 380
    assert found["omlx_recoveries_total", "tiny"] == 1
    assert found["omlx_stage_busy_seconds_total", "tiny", "1"] == 11.0
    assert found["omlx_stage_cost_seconds", "tiny", "fixed", "0"] == 0.03
    assert found["omlx_stage_cost_seconds", "tiny", "pair", "0"] == 2e-8
    assert ("omlx_stage_cost_seconds", "tiny", "fixed", "1") not in found
    assert found["omlx_predicted_round_seconds", "2", "tiny"] == 0.07


async def test_what_is_kept_of_prompts_and_what_it_was_good_for_can_be_read() -> None:
    models = FakeModels(ScriptedModel([STOP]))
    models.measured = {"tiny": FIGURES}
    found = await scrape(models)
    assert found["omlx_prefix_lookups_total", "tiny"] == 9
    assert found["omlx_prefix_hit_tokens_total", "tiny"] == 4096
    assert found["omlx_prefix_missed_tokens_total", "tiny"] == 904
    assert found["omlx_kv_restored_blocks_total", "tiny"] == 16
    assert found["omlx_kv_fetched_blocks_total", "tiny"] == 5
    assert found["omlx_kv_spilled_blocks_total", "tiny"] == 7
    assert found["omlx_kv_evicted_blocks_total", "tiny"] == 3
    assert found["omlx_kv_dropped_writes_total", "tiny"] == 2
    assert found["omlx_kv_given_up_fetches_total", "tiny"] == 1
    gauges = {key: value for key, value in found.items() if key[0] in ("omlx_kv_blocks", "omlx_kv_bytes")}
    assert gauges == {
        ("omlx_kv_blocks", "tiny", "0", "hot"): 10,
        ("omlx_kv_blocks", "tiny", "1", "hot"): 11,
        ("omlx_kv_blocks", "tiny", "0", "cold"): 20,
        ("omlx_kv_blocks", "tiny", "1", "cold"): 21,
        ("omlx_kv_bytes", "tiny", "0", "hot"): 1000,
        ("omlx_kv_bytes", "tiny", "1", "hot"): 1100,
        ("omlx_kv_bytes", "tiny", "0", "cold"): 2000,
        ("omlx_kv_bytes", "tiny", "1", "cold"): 2100,
    }


def test_a_model_that_keeps_nothing_has_zeros_for_every_stage() -> None:
    figures = cache_figures(nothing_kept(stages=2))
    assert (figures.lookups, figures.hit_tokens, figures.dropped_writes) == (0, 0, 0)
    assert figures.hot_bytes == figures.cold_bytes == figures.hot_blocks == figures.cold_blocks == (0, 0)


async def test_a_server_with_nothing_loaded_has_metrics_without_samples() -> None:
    assert await scrape(FakeModels(ScriptedModel([STOP]))) == {}


async def test_with_a_key_the_metrics_ask_for_it() -> None:
    async with serving(FakeModels(ScriptedModel([STOP])), api_key=KEY) as url, httpx.AsyncClient() as client:
        assert (await client.get(url + "/metrics")).status_code == 401
        answer = await client.get(url + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
