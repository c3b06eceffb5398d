"""GET /metrics: the figures under their names, read by Prometheus' own parser."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from omlx.node.costs import StageCost
from omlx.node.meters import ModelFigures, StageFigures
from tests.api.fakes import KEY, STOP, FakeModels, ScriptedModel, serving

pytestmark = pytest.mark.anyio

COST = StageCost(0.03, 0.001, 0.02, 0.0004, 2e-8, mixes=True)
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


async def test_a_server_with_nothing_loaded_has_metrics_without_samples() -> None:
    assert await scrape(FakeModels(ScriptedModel([STOP]))) == {}


async def test_with_a_key_the_metrics_ask_for_it() -> None:
    async with serving(FakeModels(ScriptedModel([STOP])), api_key=KEY) as url, httpx.AsyncClient() as client:
        assert (await client.get(url + "/metrics")).status_code == 401
        answer = await client.get(url + "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
