"""/omlx/v1: the shard map, and orders to models and nodes, through the real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import httpx
import msgspec
import pytest

from omlx.cluster.offer import Offer
from omlx.errors import BadSetting, DoesNotFit, Full, OmlxError, SshFailed
from tests.api.fakes import KEY
from tests.control_server import MAP, MINI, OFFER, ScriptedControl, controlled

pytestmark = pytest.mark.anyio

LIMIT_S = 10.0


@asynccontextmanager
async def asking(control: ScriptedControl, api_key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        controlled(control, api_key=api_key) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/omlx/v1/", trust_env=False) as client,
    ):
        yield client


async def answered(path: str, body: Any = None, **control: Any) -> tuple[int, dict[str, Any], list[Any]]:
    """Status and body of one order, and what the control was asked."""
    scripted = ScriptedControl(**control)
    async with asking(scripted) as client:
        answer = await client.post(path, json={} if body is None else body)
    return answer.status_code, answer.json(), scripted.asked


async def test_the_shard_map_is_what_the_control_says() -> None:
    async with asking(ScriptedControl()) as client:
        said = (await client.get("cluster")).json()
    first, second = said["models"][0]["stages"]
    assert (said["cluster_id"], [node["name"] for node in said["nodes"]]) == ("c1", ["studio", "mini"])
    assert (first["start"], first["end"], second["node_id"]) == (0, 16, MINI)
    assert said["models"][1] == {**asdict(MAP.models[1]), "stages": []}


async def test_an_offer_is_what_a_plan_is_made_of_for_a_model_by_id_folder_or_none() -> None:
    control = ScriptedControl()
    async with asking(control) as client:
        answers = [
            await client.get("offer", params=asked) for asked in ({"model": "Org/Name"}, {"model": "/m"}, {})
        ]
    assert control.asked == [("offer", "Org/Name"), ("offer", "/m"), ("offer", None)]
    assert {msgspec.json.decode(answer.content, type=Offer) for answer in answers} == {OFFER}


async def test_orders_reach_the_control_with_ids_that_have_slashes() -> None:
    activated = await answered("models/Org/Name/activate")
    assert activated == (200, {"id": "Org/Name", "state": "idle"}, [("activate", "Org/Name")])
    assert (await answered("models/Org%2FName/activate"))[2] == [("activate", "Org/Name")]
    assert (await answered("models/tiny/deactivate"))[2] == [("deactivate", "tiny", 30.0)]
    assert (await answered("models/tiny/deactivate", {"within_s": 5}))[2] == [("deactivate", "tiny", 5.0)]
    status, said, asked = await answered("models/Org/Name/rebalance", {"dry_run": True})
    assert (status, said["moved"], said["gain"]) == (200, False, 1.5) and "+4 layers" in said["lines"][0]
    assert asked == [("rebalance", "Org/Name", True)]
    assert await answered(f"nodes/{MINI}/drain") == (
        200,
        {"node_id": MINI, "drained": True},
        [("drain", MINI)],
    )
    assert (await answered(f"nodes/{MINI}/undrain"))[2] == [("undrain", MINI)]


@pytest.mark.parametrize(
    ("path", "code", "names"),
    [
        ("models/Org/Other/activate", "model_not_found", "Org/Name"),
        ("models/Name/rebalance", "model_not_found", "tiny"),
        ("models/org/name/deactivate", "model_not_found", "tiny"),
        ("models//activate", "model_not_found", "tiny"),
        ("nodes/mini/drain", "node_not_found", MINI),
        (f"nodes/{MINI[:8]}/undrain", "node_not_found", "studio"),
        ("models/tiny/explode", "unknown_url", "explode"),
    ],
)
async def test_what_is_not_there_is_a_404_that_names_what_is(path: str, code: str, names: str) -> None:
    status, said, asked = await answered(path)
    assert said["error"].keys() == {"message", "type", "param", "code"}
    assert (status, said["error"]["code"], asked) == (404, code, [])
    assert names in said["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("models/tiny/activate", {"force": True}, "force"),
        ("models/tiny/deactivate", {"within_s": -1}, "within_s"),
        ("models/tiny/deactivate", {"within_s": 1e9}, "within_s"),
        ("models/tiny/rebalance", {"dry_run": "yes"}, "dry_run"),
        (f"nodes/{MINI}/drain", {"now": True}, "now"),
    ],
)
async def test_a_wrong_field_is_named_and_nothing_is_done(path: str, body: Any, param: str) -> None:
    status, said, asked = await answered(path, body)
    assert (status, said["error"]["param"], asked) == (400, param, [])


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (BadSetting("mini is the coordinator itself"), 409, "refused"),
        (DoesNotFit("the rest is 3 GB short", 3), 400, "model_does_not_fit"),
        (Full("another rebalance is under way"), 503, "overloaded"),
        (SshFailed("connection", "no route", "one", "plug it in"), 502, "not_done"),
        (OmlxError("something else went wrong"), 502, "not_done"),
    ],
)
async def test_whoever_runs_the_server_is_told_why_it_was_not_done(
    failure: OmlxError, status: int, code: str
) -> None:
    for path in (f"nodes/{MINI}/drain", "models/tiny/rebalance"):
        got, said, _ = await answered(path, failure=failure)
        assert (got, said["error"]["code"]) == (status, code)
        assert str(failure) in said["error"]["message"]


async def test_an_error_that_is_none_of_ours_tells_nothing() -> None:
    class Broken(ScriptedControl):
        async def drain(self, node_id: str) -> None:
            raise RuntimeError("a secret")

    async with asking(Broken()) as client:
        answer = await client.post(f"nodes/{MINI}/drain", json={})
    assert answer.status_code == 500 and "secret" not in answer.text


async def test_without_the_key_nothing_is_told_and_nothing_done() -> None:
    control = ScriptedControl()
    async with asking(control, api_key=KEY) as client:
        refused = [
            await client.get("cluster"),
            await client.get("offer"),
            await client.post("models/tiny/activate", json={}),
            await client.post(f"nodes/{MINI}/drain", json={}, headers={"authorization": "Bearer wrong-key"}),
        ]
        let_in = await client.get("cluster", headers={"authorization": f"Bearer {KEY}"})
    assert [answer.status_code for answer in refused] == [401] * 4
    assert not any("studio" in answer.text for answer in refused)
    assert control.asked == [] and let_in.status_code == 200


async def test_a_page_of_another_site_cannot_give_orders() -> None:
    control = ScriptedControl()
    async with asking(control) as client:
        answers = [
            await client.post("models/tiny/activate", json={}, headers={"origin": "http://evil.example"}),
            await client.post("models/tiny/activate", content=b"{}", headers={"content-type": "text/plain"}),
        ]
    assert [answer.status_code for answer in answers] == [403, 415] and control.asked == []


async def test_activation_answers_only_once_it_is_loaded() -> None:
    control = ScriptedControl(loading=asyncio.Event())
    assert control.loading is not None
    async with asking(control) as client, asyncio.timeout(LIMIT_S):
        asked = asyncio.create_task(client.post("models/tiny/activate", json={}))
        await control.began.wait()
        assert (await client.get("cluster")).status_code == 200 and not asked.done()
        control.loading.set()
        assert (await asked).status_code == 200


@pytest.mark.parametrize("path", ["models/tiny/activate", f"nodes/{MINI}/drain"])
async def test_a_client_that_goes_away_waits_no_more_for_a_load_or_a_drain(path: str) -> None:
    control = ScriptedControl(loading=asyncio.Event())
    async with asking(control) as client, asyncio.timeout(LIMIT_S):
        asked = asyncio.create_task(client.post(path, json={}))
        await control.began.wait()
        asked.cancel()
        await control.cancelled.wait()


async def test_a_server_without_control_has_no_such_routes() -> None:
    async with controlled(None) as port, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/omlx/v1/cluster")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
