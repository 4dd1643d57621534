"""The /v1 routes over a real registry."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from lorafleet_api.v1alpha1.reasons import REWARD_ERROR
from lorafleet_api.v1alpha1.wire import OPERATOR_EPOCH_HEADER, AdapterList
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import EngineStatus
from support.runs import DATASET, pool_spec, run_spec


@pytest.fixture
def view(tmp_path: Path) -> FleetView:
    signal = Signal()
    return FleetView(Registry(pool_spec(), 4, signal.set), signal, tmp_path)


@pytest.fixture
async def client(view: FleetView) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(view, lambda: "secret", CollectorRegistry())
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


async def test_a_list_of_some_namespaces_retires_only_their_runs(client: httpx.AsyncClient, view: FleetView) -> None:
    await client.put("/v1/adapters/u1", json=body())
    await client.put("/v1/adapters/u2", json=body(namespace="lab"))
    await client.put("/v1/pool", json={"operatorEpoch": 2, "uids": [], "namespaces": ["lab"]})
    assert list(view.registry.runs) == ["u1"]
    await client.put("/v1/pool", json={"operatorEpoch": 2, "uids": []})
    assert list(view.registry.runs) == []


async def test_the_pool_tells_how_long_the_newest_operator_was_silent(
    client: httpx.AsyncClient, view: FleetView
) -> None:
    await client.put("/v1/pool", json={"operatorEpoch": 5, "uids": []})
    view.heard -= 60.0
    assert (await client.get("/v1/adapters?timeout=0", headers={OPERATOR_EPOCH_HEADER: "4"})).status_code == 409
    assert (await client.get("/v1/adapters?timeout=0")).status_code == 200  # a user's
    assert (await client.get("/v1/pool")).json()["operatorSilentSeconds"] >= 60.0
    await client.get("/v1/adapters?timeout=0", headers={OPERATOR_EPOCH_HEADER: "5"})
    assert (await client.get("/v1/pool")).json()["operatorSilentSeconds"] < 60.0


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


@pytest.mark.parametrize(
    ("value", "field"),
    [("NaN", "optimizer.lr"), ("-Infinity", "optimizer.lr"), ("1e400", "optimizer.lr"), ('"\\ud800"', "optimizer.lr")],
)
async def test_a_value_that_json_has_no_word_for_is_refused_and_told(
    client: httpx.AsyncClient, view: FleetView, value: str, field: str
) -> None:
    text = json.dumps(body(spec=run_spec(optimizer={"lr": 1})))
    content = text.replace('{"lr": 1}', '{"lr": ' + value + "}")
    answer = await client.put("/v1/adapters/u1", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["field"]) == (422, field)
    assert view.registry.runs == {}


async def test_one_runs_odd_words_do_not_break_the_listing_of_all(client: httpx.AsyncClient, view: FleetView) -> None:
    await client.put("/v1/adapters/u1", json=body(spec=run_spec(sampleMetadata={"odd": "x"})))
    view.registry.fail(RunError(REWARD_ERROR, "customRmPath: it raised \ud800; correct it").fault("u1"))
    [told] = (await client.get("/v1/adapters?timeout=0")).json()["adapters"]
    assert told["message"] == "customRmPath: it raised ?; correct it"


@pytest.mark.parametrize("name", [f"{'team-' * 13}run.{'v' * 11}", ".".join(["a" * 63] * 3 + ["b" * 61])])
async def test_every_name_that_an_object_may_have_is_taken(client: httpx.AsyncClient, name: str) -> None:
    """Case 11 (kubernetes-sigs/kueue#13413), (a): 80 characters with a dot; and the longest, of 253."""
    assert len(name) in (80, 253)
    assert (await client.put("/v1/adapters/u1", json=body(name=name))).json()["name"] == name


@pytest.mark.parametrize("name", ["a/b", "..", "E\n", "a::b", "", "A b", "x" * 300, "a\0b", "\ud800"])
async def test_unsafe_names_are_refused(client: httpx.AsyncClient, view: FleetView, name: str) -> None:
    content = json.dumps(body(name=name))
    answer = await client.put("/v1/adapters/u1", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
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


async def test_an_older_operator_that_waits_in_a_long_poll_is_told_at_once(
    client: httpx.AsyncClient, view: FleetView
) -> None:
    await client.put("/v1/pool", json={"operatorEpoch": 4, "uids": []})
    after = f"4,{view.registry.revision}"
    old = {OPERATOR_EPOCH_HEADER: "4"}
    poll = asyncio.create_task(client.get(f"/v1/adapters?after={after}&timeout=60", headers=old))
    while not view.signal._waiters:  # the poll has passed its first check
        await asyncio.sleep(0)
    await client.put("/v1/pool", json={"operatorEpoch": 5, "uids": []})
    assert (await asyncio.wait_for(poll, 30)).status_code == 409


async def test_ready_only_after_the_operator_has_spoken(client: httpx.AsyncClient, view: FleetView) -> None:
    assert (await client.get("/readyz")).status_code == 503
    await client.put("/v1/pool", json={"operatorEpoch": 1, "uids": []})
    assert (await client.get("/readyz")).status_code == 503  # no trainer yet
    assert view.registry.synced


async def test_a_long_poll_returns_on_the_next_change(client: httpx.AsyncClient, view: FleetView) -> None:
    await client.put("/v1/adapters/u1", json=body())
    after = f"4,{view.registry.revision}"
    poll = asyncio.create_task(client.get(f"/v1/adapters?after={after}&timeout=60"))
    await asyncio.sleep(0)
    view.registry.checked("u1", DATASET)
    answer = AdapterList.model_validate((await asyncio.wait_for(poll, 30)).json())
    assert answer.revision > int(after.split(",")[1])
    assert answer.adapters[0].target_step == 3


async def test_a_long_poll_of_another_boot_returns_at_once(client: httpx.AsyncClient) -> None:
    answer = await asyncio.wait_for(client.get("/v1/adapters?after=3,0&timeout=60"), 30)
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
