"""miles' /adapter_runs routes: what users of miles rely on, code by code, and where this runtime is stricter.

Numbers in comments: the conformance list that docs/adapter_runs.md gives.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from lorafleet_api.v1alpha1.wire import OPERATOR_EPOCH_HEADER
from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.types import PolicySums, RunFault
from support.miles import Miles, miles_config
from support.runs import DATASET, pool_spec, put


@pytest.fixture
async def miles(tmp_path: Path) -> AsyncIterator[Miles]:
    runtime = Miles.at(tmp_path)
    async with runtime.client:
        yield runtime


def problem(answer: httpx.Response, status: int, field: str) -> dict[str, Any]:
    """The problem JSON of a refusal that names its field and a fix."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["field"] == field
    assert body["fix"]
    return body


# --- off, and the token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/adapter_runs", "/adapter_runs/state", "/adapter_runs/x"])
async def test_switched_off_says_how_to_switch_on(tmp_path: Path, method: str, path: str) -> None:
    signal = Signal()
    view = FleetView(Registry(pool_spec(), 1, signal.set), signal, tmp_path)
    app = create_app(view, lambda: "secret", CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://runtime") as client:
        assert (await client.request(method, path)).status_code == 401
        answer = await client.request(method, path, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 404
    assert "adapterRunsApi: true" in answer.json()["detail"]


async def test_every_route_wants_the_token(miles: Miles) -> None:
    wrong = {"Authorization": "Bearer wrong"}
    body = {"name": "a", "config": miles_config()}
    assert (await miles.client.post("/adapter_runs", json=body, headers=wrong)).status_code == 401
    for method, path in (("GET", ""), ("GET", "/state?names=a"), ("GET", "/a"), ("DELETE", "/a")):
        assert (await miles.client.request(method, f"/adapter_runs{path}", headers=wrong)).status_code == 401
    assert miles.runs.runs() == []


# --- registering -------------------------------------------------------------------------------------------------


async def test_a_new_run_is_pending_and_flat(miles: Miles) -> None:  # 2, 14, 26
    answer = await miles.post("r_1", metadata={"split": "train"}, alpha=8)
    assert (answer.status_code, answer.json()["name"]) == (200, "r_1")
    status = (await miles.client.get("/adapter_runs/r_1")).json()
    shown = {k: status[k] for k in ("name", "state", "version", "step", "accumulated_groups", "rank", "alpha")}
    assert shown == {
        "name": "r_1", "state": "PENDING", "version": 0, "step": 0, "accumulated_groups": 0, "rank": 4, "alpha": 8,
    }  # fmt: skip
    assert (status["metadata"], status["input_key"], status["save"]) == ({"split": "train"}, "text", None)
    assert status["registration_id"] == answer.json()["registration_id"]
    assert (await miles.client.get("/adapter_runs")).json()["adapters"] == [status]


async def test_first_push_activates_with_version_1_and_the_lowest_slot(miles: Miles) -> None:  # 2
    await miles.post("a")
    miles.activate("a")
    status = (await miles.client.get("/adapter_runs/a")).json()
    assert (status["state"], status["version"], status["slot"]) == ("ACTIVE", 1, 0)


async def test_null_means_the_default(miles: Miles) -> None:  # 14: miles' own files write null
    await miles.post("a", alpha=None, num_epoch=None, metadata_key=None, n_samples_per_prompt=None)
    assert (miles.run("a").spec.lora_alpha, miles.run("a").spec.n_samples_per_prompt) == (4, 8)


async def test_rank_above_the_pool_is_400_and_a_valid_one_still_registers(miles: Miles) -> None:  # 15, 19
    told = problem(await miles.post("a", rank=16), 400, "rank")
    assert "maxRank 8" in told["detail"]
    assert miles.registry.runs == {}
    assert (await miles.post("a")).status_code == 200


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"num_step": 0}, 400, "num_step"),
        ({"num_epoch": 0}, 400, "num_epoch"),
        ({"rollout_batch_size": 0}, 400, "rollout_batch_size"),
        ({"alpha": 16.5}, 422, "alpha"),
        ({"rank": "many"}, 422, "rank"),
        ({"data": ...}, 422, "data"),
        ({"data": "missing.jsonl"}, 400, "data"),
        ({"data": "../../etc/passwd"}, 400, "data"),
        ({"data": "train.jsonl\x00"}, 400, "data"),
        ({"rm_type": ...}, 400, "rm_type, custom_rm_path, reward"),
        ({"rm_type": "unheard_of"}, 400, "rm_type"),
        ({"rm_type": ..., "custom_rm_path": "os.system"}, 400, "custom_rm_path"),
        ({"lora_rank": 8}, 422, "lora_rank"),
        ({"optimizer": {"learning_rate": 1}}, 422, "optimizer.learning_rate"),
        ({"optimizer": [1]}, 422, "optimizer"),
        ({"num_step": 2**63}, 400, "num_step"),
        ({"sampling": {"max_tokens": 10**30}}, 400, "sampling.max_tokens"),
        ({"pool_ref": {"name": "x"}}, 422, "pool_ref"),
        ({"suspend": True}, 422, "suspend"),
        ({"numStep": 3, "num_step": 3}, 422, "numStep"),
        ({"save": 7}, 422, "save"),
        ({"save": "/etc"}, 400, "save"),
        ({"save": "train.jsonl"}, 400, "save"),
        ({"save": ".lorafleet/x"}, 400, "save"),
    ],
    ids=str,
)  # fmt: skip
async def test_bad_configs_are_refused_by_name_and_leak_nothing(
    miles: Miles, change: dict[str, Any], status: int, field: str
) -> None:  # 15, 21-24, 26
    told = problem(await miles.post("a", **change), status, field)
    assert told["detail"].startswith(f"{field}: ")
    assert miles.registry.runs == {}
    assert miles.files == []
    assert (await miles.post("a")).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(miles: Miles, number: str) -> None:
    text = f'{{"name": "a", "config": {{"data": "train.jsonl", "rm_type": "math", "optimizer": {{"lr": {number}}}}}}}'
    answer = await miles.client.post("/adapter_runs", content=text, headers={"Content-Type": "application/json"})
    problem(answer, 422, "optimizer.lr")
    assert miles.registry.runs == {}


async def test_an_integer_of_five_thousand_digits_is_a_bad_body(miles: Miles) -> None:
    text = f'{{"name": "a", "config": {{"num_step": {"9" * 5000}}}}}'
    answer = await miles.client.post("/adapter_runs", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "name",
    ["a/b", "..", ".", "a::b", "a b", "", "a\n", "\na", "state", "a\x00", "\u00e9t\u00e9", "-a", "_a", ".a", "x" * 254],
    ids=repr,
)
async def test_unsafe_names_are_400(miles: Miles, name: str) -> None:  # 20
    told = problem(await miles.post(name), 400, "name")
    assert told["value"] == name[:200]
    assert miles.registry.runs == {}


@pytest.mark.parametrize("name", ["x" * 253, "a.b.c", "a__b", "A-1", "0"])
async def test_names_that_miles_takes_round_trip(miles: Miles, name: str) -> None:  # 1
    assert (await miles.post(name)).status_code == 200
    assert (await miles.client.get(f"/adapter_runs/{name}")).json()["name"] == name
    assert await miles.state(name) == "PENDING"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "a"}, 400),
        ({"name": "a", "config": {}, "yaml_path": "x.yaml"}, 400),
        ({"name": "a", "config": [1]}, 422),
        ({"name": "a", "config": "rank: 3"}, 422),
        ({"name": 7, "config": {}}, 422),
        ({"config": {}}, 422),
        ({"name": "a", "config": {}, "color": "red"}, 422),
        ([], 422),
    ],
    ids=str,
)
async def test_bad_bodies(miles: Miles, body: Any, status: int) -> None:  # 26
    answer = await miles.client.post("/adapter_runs", json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert miles.registry.runs == {}


async def test_yaml_path_reads_a_file_on_the_storage(miles: Miles) -> None:
    (miles.root / "adapter.yaml").write_text(
        "data: train.jsonl\nrm_type: math\nlabel_key: label\nrank: 4\nmax_staleness: 0\n"
    )
    answer = await miles.client.post("/adapter_runs", json={"name": "a", "yaml_path": "adapter.yaml"})
    assert answer.status_code == 200, answer.text
    assert miles.run("a").spec.rank == 4


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/etc/passwd", None),
        ("../secret.yaml", None),
        ("missing.yaml", None),
        ("list.yaml", "- 1"),
        ("broken.yaml", "a: [1"),
        ("bomb.yaml", "a: &a [1, 1]\nb: [*a, *a]"),
        ("binary.yaml", b"\xff\xfe\x00"),
    ],
    ids=str,
)
async def test_a_yaml_path_that_is_none_is_400(miles: Miles, path: str, content: str | bytes | None) -> None:
    if content is not None:
        (miles.root / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    answer = await miles.client.post("/adapter_runs", json={"name": "a", "yaml_path": path})
    problem(answer, 400, "yaml_path")
    assert miles.registry.runs == {}


async def test_a_live_name_is_400_until_it_has_ended(miles: Miles) -> None:  # 6, 27
    await miles.post("a")
    run = miles.activate("a")
    problem(await miles.post("a"), 400, "name")
    await miles.client.delete("/adapter_runs/a")
    problem(await miles.post("a"), 400, "name")  # RETIRING
    miles.save(run)
    problem(await miles.post("a"), 400, "name")  # CLEANUP
    miles.clear(run)
    again = await miles.post("a")
    assert again.status_code == 200
    assert again.json()["registration_id"] != run.uid
    assert await miles.state("a") == "PENDING"
    assert len((await miles.client.get("/adapter_runs")).json()["adapters"]) == 1
    assert len(miles.files) == 1


async def test_a_live_save_directory_is_400(miles: Miles) -> None:  # 21
    await miles.post("a", save="out/x")
    problem(await miles.post("b", save="out/../out/x"), 400, "save")
    assert (await miles.post("b", save="out/y")).status_code == 200


async def test_no_free_slot_is_409_until_cleanup_ends(miles: Miles) -> None:  # 16
    await miles.post("a")
    first = miles.activate("a")
    await miles.post("b")
    problem(await miles.post("c"), 409, "slots")
    await miles.client.delete("/adapter_runs/a")
    problem(await miles.post("c"), 409, "slots")
    miles.save(first)
    problem(await miles.post("c"), 409, "slots")
    miles.clear(first)
    assert (await miles.post("c")).status_code == 200
    assert miles.activate("c").slot == 0
    assert len(miles.files) == 3


async def test_operator_runs_that_wait_come_before_a_post(miles: Miles) -> None:
    miles.registry.sync([])
    for uid in ("u1", "u2"):
        put(miles.registry, uid)
    problem(await miles.post("a"), 409, "slots")


async def test_a_slot_that_a_post_was_answered_with_is_not_taken_by_an_operator_run(miles: Miles) -> None:
    miles.registry.sync([])
    put(miles.registry, "u1")
    miles.registry.checked("u1", DATASET)
    miles.registry.assign()
    await miles.post("a")
    put(miles.registry, "u2", created=-5.0, scheduling={"priority": 9})
    miles.registry.checked("u2", DATASET)
    assert miles.registry.assign() == []
    assert miles.activate("a").state == "ACTIVE"
    assert miles.registry.runs["u2"].queue_position == 1


async def test_the_example_in_the_docs_registers(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "adapter_runs.md").read_text()
    body = json.loads(text.split("/adapter_runs -d '", 1)[1].split("'\n", 1)[0])
    data = tmp_path / body["config"]["data"]
    data.parent.mkdir(parents=True)
    data.write_text("{}")
    runtime = Miles.at(tmp_path, rewardModules=["lorafleet_local.rewards"])
    answer = await runtime.client.post("/adapter_runs", json=body)
    assert answer.status_code == 200, answer.text
    assert list(answer.json()) == ["name", "slot", "registration_id"]


# --- states and the end ------------------------------------------------------------------------------------------


async def test_the_state_route_walks_all_five(miles: Miles) -> None:  # 7, 9, 25, 27
    await miles.post("a")
    assert await miles.state("a") == "PENDING"
    run = miles.activate("a")
    assert await miles.state("a") == "ACTIVE"
    miles.step(run)
    assert (await miles.client.delete("/adapter_runs/a")).json() == {"status": "ok", "name": "a"}
    assert await miles.state("a") == "RETIRING"
    assert run.version is not None  # it serves until it is cleared
    miles.save(run)
    assert await miles.state("a") == "CLEANUP"
    assert (await miles.client.get("/adapter_runs/a")).json()["step"] == 1
    miles.clear(run)
    assert await miles.state("a") == "COMPLETED"
    status = (await miles.client.get("/adapter_runs/a")).json()
    assert (status["version"], status["slot"], status["artifact"]["step"]) == (None, None, 1)


async def test_unknown_names(miles: Miles) -> None:  # 27
    assert await miles.state("nobody") is None
    problem(await miles.client.get("/adapter_runs/nobody"), 404, "name")
    problem(await miles.client.delete("/adapter_runs/nobody"), 404, "name")
    for odd in ("a%0A", "%00", "..%2f..", "%C3%A9"):
        assert (await miles.client.get(f"/adapter_runs/{odd}")).status_code == 404
    assert (await miles.client.get("/adapter_runs/state")).status_code == 422


async def test_delete_of_an_ended_run_changes_nothing(miles: Miles) -> None:  # 7
    await miles.post("a")
    run = miles.activate("a")
    for _ in range(2):
        assert (await miles.client.delete("/adapter_runs/a")).status_code == 200
    miles.save(run)
    miles.clear(run)
    assert (await miles.client.delete("/adapter_runs/a")).status_code == 200
    assert await miles.state("a") == "COMPLETED"


async def test_num_step_stops_exactly(miles: Miles) -> None:  # 8, 11
    await miles.post("a", num_step=2)
    run = miles.activate("a")
    miles.registry.commit(run.uid, 1, [], PolicySums())
    assert (await miles.client.get("/adapter_runs/a")).json()["accumulated_groups"] == 1
    miles.registry.commit(run.uid, 1, [], PolicySums())
    run.accumulated_groups = 0
    miles.step(run)
    assert await miles.state("a") == "ACTIVE"
    miles.step(run)
    assert (await miles.state("a"), run.step) == ("RETIRING", 2)


async def test_a_failed_run_is_completed_with_its_error(miles: Miles) -> None:
    await miles.post("a")
    run = miles.activate("a")
    miles.registry.fail(RunFault(run.uid, "RewardError", "customRmPath: raised; fix it"))
    status = (await miles.client.get("/adapter_runs/a")).json()
    assert "customRmPath: raised" in status["error"]
    miles.registry.saved(run.uid, None, 1.0)
    miles.clear(run)
    assert await miles.state("a") == "COMPLETED"


# --- beside the operator -----------------------------------------------------------------------------------------


async def test_the_operator_cannot_touch_an_api_owned_run(miles: Miles) -> None:
    await miles.post("a")
    run = miles.activate("a")
    before = (run.spec, run.generation, run.state)
    body = {
        "namespace": "team", "name": "x", "spec": miles_config(poolRef={"name": "p"}, numStep=9), "generation": 9,
        "operatorEpoch": 2, "creationTimestamp": 1.0, "priority": 0,
    }  # fmt: skip
    answers = [
        await miles.client.put(f"/v1/adapters/{run.uid}", json=body),
        await miles.client.delete(f"/v1/adapters/{run.uid}", headers={OPERATOR_EPOCH_HEADER: "2"}),
    ]
    assert [a.status_code for a in answers] == [409, 409]
    assert all("/adapter_runs" in a.json()["detail"] for a in answers)
    assert (await miles.client.put("/v1/pool", json={"operatorEpoch": 2, "uids": []})).status_code == 200
    assert (run.spec, run.generation, run.state) == before
    listed = (await miles.client.get("/v1/adapters?timeout=0")).json()["adapters"]
    assert [(a["uid"], a["owner"]) for a in listed] == [(run.uid, "api")]


async def test_the_operator_s_runs_are_not_told_by_these_routes(miles: Miles) -> None:
    put(miles.registry, "u1")
    assert (await miles.client.get("/adapter_runs")).json() == {"adapters": []}
    assert (await miles.client.delete("/adapter_runs/run-u1")).status_code == 404
