"""The /v1 routes over a real registry."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from lorafleet_api.v1alpha1.wire import OPERATOR_EPOCH_HEADER, AdapterList
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import EngineStatus
from support.runs import DATASET, pool_spec, run_spec


@pytest.fixture
def view() -> FleetView:
    signal = Signal()
    return FleetView(Registry(pool_spec(), 4, signal.set), signal, lambda uid, step: [{"uid": uid, "step": step}])


@pytest.fixture
async def client(view: FleetView) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(view, lambda: "secret", CollectorRegistry(), adapter_runs=True)
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://runtime", headers=headers) as client:
        yield client


def body(**changes: Any) -> dict[str, Any]:
    return {
        "namespace": "team", "name": "run", "spec": run_spec(), "generation": 1, "operatorEpoch": 2,
        "creationTimestamp": 10.0, "priority": 0,
    } | changes  # fmt: skip


async def test_without_the_token_nothing_is_told(client: httpx.AsyncClient) -> None:
    for path in ("/v1/adapters", "/v1/pool", "/metrics", "/adapter_runs"):
        answer = await client.get(path, headers={"Authorization": "Bearer wrong"})
        assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
    assert (await client.get("/healthz", headers={"Authorization": ""})).status_code == 200


async def test_put_is_idempotent_and_returns_the_view(client: httpx.AsyncClient) -> None:
    first = await client.put("/v1/adapters/u1", json=body())
    second = await client.put("/v1/adapters/u1", json=body())
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.json()["state"] == "QUEUED"
    assert len((await client.get("/v1/adapters?timeout=0")).json()["adapters"]) == 1


async def test_a_bad_field_is_named_with_value_and_fix(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/adapters/u1", json=body(spec=run_spec(optimizer={"lr": -1})))
    problem = answer.json()
    assert answer.status_code == 422
    assert (problem["field"], problem["value"]) == ("optimizer.lr", -1)
    assert "greater than 0" in problem["fix"]


async def test_an_unknown_field_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/adapters/u1", json=body(spec=run_spec(lorarank=3)))
    assert answer.json()["field"] == "lorarank"


@pytest.mark.parametrize("name", ["a/b", "..", "E\n", "a::b", "", "A b", "x" * 300])
async def test_unsafe_names_are_refused(client: httpx.AsyncClient, view: FleetView, name: str) -> None:
    assert (await client.put("/v1/adapters/u1", json=body(name=name))).status_code == 422
    assert view.registry.runs == {}


async def test_an_older_operator_gets_409_on_every_call(client: httpx.AsyncClient) -> None:
    await client.put("/v1/pool", json={"operatorEpoch": 5, "uids": []})
    old = {OPERATOR_EPOCH_HEADER: "4"}
    answers = [
        await client.put("/v1/adapters/u1", json=body(operatorEpoch=4)),
        await client.put("/v1/pool", json={"operatorEpoch": 4, "uids": []}),
        await client.delete("/v1/adapters/u1", headers=old),
        await client.get("/v1/adapters", headers=old),
    ]
    assert [a.status_code for a in answers] == [409] * 4


async def test_ready_only_after_the_operator_has_spoken(client: httpx.AsyncClient, view: FleetView) -> None:
    assert (await client.get("/readyz")).status_code == 503
    await client.put("/v1/pool", json={"operatorEpoch": 1, "uids": []})
    assert (await client.get("/readyz")).status_code == 503  # no trainer yet
    assert view.registry.synced


async def test_a_long_poll_returns_on_the_next_change(client: httpx.AsyncClient, view: FleetView) -> None:
    await client.put("/v1/adapters/u1", json=body())
    after = f"4,{view.registry.revision}"
    poll = asyncio.create_task(client.get(f"/v1/adapters?after={after}&timeout=20"))
    await asyncio.sleep(0)
    view.registry.checked("u1", DATASET)
    answer = AdapterList.model_validate((await asyncio.wait_for(poll, 5)).json())
    assert answer.revision > int(after.split(",")[1])
    assert answer.adapters[0].target_step == 3


async def test_a_long_poll_of_another_boot_returns_at_once(client: httpx.AsyncClient) -> None:
    answer = await asyncio.wait_for(client.get("/v1/adapters?after=3,0&timeout=30"), 5)
    assert answer.json()["bootEpoch"] == 4


async def test_delete_says_202_until_it_is_gone(client: httpx.AsyncClient, view: FleetView) -> None:
    await client.put("/v1/pool", json={"operatorEpoch": 2, "uids": ["u1"]})
    await client.put("/v1/adapters/u1", json=body())
    view.registry.checked("u1", DATASET)
    view.registry.assign()
    assert (await client.delete("/v1/adapters/u1")).status_code == 202
    view.registry.saved("u1", None, 1.0)
    view.registry.cleaned("u1")
    assert (await client.delete("/v1/adapters/u1")).status_code == 202  # nobody has told yet what is held
    view.registry.observe_trainer({})
    view.registry.observe_engine(EngineStatus("engine-0", True, ("u1@4.1.v1",), 1.0))
    assert (await client.delete("/v1/adapters/u1")).status_code == 202  # an engine still holds it
    view.registry.observe_engine(EngineStatus("engine-0", True, (), 2.0))
    assert (await client.delete("/v1/adapters/u1")).status_code == 200
    assert (await client.get("/v1/adapters/u1")).status_code == 404


async def test_miles_routes_register_and_tell_states(client: httpx.AsyncClient) -> None:
    config = {"data": "x.jsonl", "rm_type": "math", "rank": 4, "rollout_batch_size": 2, "n_samples_per_prompt": 2,
              "max_staleness": 0, "sampling": {"max_tokens": 8}}  # fmt: skip
    assert (await client.post("/adapter_runs", json={"name": "r_1", "config": config})).status_code == 200
    assert (await client.post("/adapter_runs", json={"name": "r_1", "config": config})).status_code == 400
    assert (await client.post("/adapter_runs", json={"name": "r_2", "config": config})).status_code == 200
    assert (await client.post("/adapter_runs", json={"name": "r_3", "config": config})).status_code == 409
    states = (await client.get("/adapter_runs/state?names=r_1&names=nobody")).json()
    assert states == {"states": {"r_1": "PENDING", "nobody": None}}
    assert (await client.delete("/adapter_runs/nobody")).status_code == 404
    assert (await client.delete("/adapter_runs/r_1")).json() == {"status": "ok", "name": "r_1"}


@pytest.mark.parametrize("name", ["state", "E\n", "a/b", ".."])
async def test_miles_routes_refuse_unsafe_names(client: httpx.AsyncClient, name: str) -> None:
    config = {"data": "x.jsonl", "rm_type": "math"}
    assert (await client.post("/adapter_runs", json={"name": name, "config": config})).status_code == 400
