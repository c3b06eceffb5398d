"""GET /v1/models, /v1/models/{id} and /health."""

import httpx
import openai
import pytest

from omlx.api.health import verdict
from omlx.ids import ModelId
from omlx.node.health import ModelHealth, ModelState
from tests.api.fakes import KEY, STOP, FakeModels, ScriptedModel, serving, talking

pytestmark = pytest.mark.anyio


async def test_the_list_states_each_models_true_limit() -> None:
    async with talking([STOP]) as (client, models):
        listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == ["tiny", "Org/Name"]
    assert listed[0].created == 1_700_000_000 and listed[0].owned_by == "omlx"
    assert listed[0].model_dump()["context_length"] == 4096
    assert models.loads == []


async def test_one_model_is_found_by_its_whole_id() -> None:
    async with talking([STOP]) as (client, _):
        assert (await client.models.retrieve("Org/Name")).id == "Org/Name"
        for wrong in ("Name", "org/name", "tiny/", "../tiny"):
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve(wrong)


async def test_an_unknown_route_and_a_wrong_method_answer_in_the_error_shape() -> None:
    async with serving(FakeModels(ScriptedModel([STOP]))) as url, httpx.AsyncClient() as client:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("HEAD", "/", 404),
            ("GET", "/docs", 404),
            ("GET", "/openapi.json", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models/tiny", 405),
        ):
            answer = await client.request(method, url + path)
            assert answer.status_code == status
            assert answer.headers["x-request-id"]
            if method != "HEAD":
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def health(*states: ModelState) -> tuple[ModelHealth, ...]:
    return tuple(ModelHealth(ModelId(str(i)), state, 0, 0, None) for i, state in enumerate(states))


@pytest.mark.parametrize(
    ("states", "word", "status"),
    [
        ((), "ok", 200),
        (("idle",), "ok", 200),
        (("ready", "loading"), "ok", 200),
        (("loading",), "loading", 200),
        (("recovering",), "degraded", 200),
        (("failed", "ready"), "degraded", 200),
        (("stalled", "idle"), "degraded", 200),
        (("failed", "loading"), "degraded", 200),
        (("failed",), "degraded", 503),
        (("failed", "stalled"), "degraded", 503),
    ],
)
def test_health_is_bad_only_when_nothing_can_serve(
    states: tuple[ModelState, ...], word: str, status: int
) -> None:
    assert verdict(health(*states)) == (word, status)


async def test_health_shows_the_progress_of_each_model() -> None:
    async with serving(FakeModels(ScriptedModel([STOP]))) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert answer.json()["models"] == [
        {"id": "tiny", "state": "ready", "running": 1, "waiting": 2, "seconds_since_progress": 0.5}
    ]


async def test_health_without_the_key_says_one_word() -> None:
    models = FakeModels(ScriptedModel([STOP]))
    models.states = health("failed")
    async with serving(models, api_key=KEY) as url, httpx.AsyncClient() as client:
        without = await client.get(f"{url}/health")
        wrong = await client.get(f"{url}/health", headers={"x-api-key": "wrong"})
        right = await client.get(f"{url}/health", headers={"x-api-key": KEY})
    assert (without.status_code, without.json()) == (503, {"status": "degraded"})
    assert wrong.json() == {"status": "degraded"}
    assert right.json()["models"][0]["state"] == "failed"
