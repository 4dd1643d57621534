"""The routes under /v1/runs: addressed by namespace, name and uid, for runs that no runtime of this boot has known."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.journal import append
from lorafleet_runtime.loop.samples import cut_samples, write_samples
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from support.runs import group, pool_spec

_RUN = "/v1/runs/team/json/u-1"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a runtime whose storage is tmp_path/storage; beside it lies what must never be served."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "adapter_config.json").write_text("outside")
    directory = tmp_path / "storage" / "team" / "json" / "u-1"
    for step in (1, 2):
        write_samples(directory, cut_samples(step, [group("u-1", step)]))
    append(directory, json.dumps({"time": 1.0, "level": "INFO", "message": "one"}))
    checkpoint(directory / "step_2", b"weights")
    app = create_app(FleetView(Registry(pool_spec(), 1), Signal(), tmp_path / "storage"), lambda: "secret",
                     CollectorRegistry())  # fmt: skip
    headers = {"Authorization": "Bearer secret"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://runtime", headers=headers) as client:
        yield client


def checkpoint(path: Path, weights: bytes) -> None:
    path.mkdir(parents=True)
    files = {"adapter_model.safetensors": weights, "adapter_config.json": b"{}", "optimizer.safetensors": b"moments"}
    for name, data in files.items():
        (path / name).write_bytes(data)
    about = {name: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in files.items()}
    (path / "state.json").write_text(json.dumps({"files": about}))


@pytest.mark.parametrize("what", ["samples", "log", "artifacts", "artifacts/2/adapter_config.json"])
async def test_nothing_without_the_token(client: httpx.AsyncClient, what: str) -> None:
    assert (await client.get(f"{_RUN}/{what}", headers={"Authorization": "Bearer wrong"})).status_code == 401


async def test_samples_of_a_step_and_of_the_newest(client: httpx.AsyncClient) -> None:
    first = (await client.get(f"{_RUN}/samples", params={"step": 1})).json()
    assert (first["step"], first["groups"], first["samples"], len(first["prompts"])) == (1, 1, 2, 1)
    assert (await client.get(f"{_RUN}/samples")).json()["step"] == 2


async def test_a_step_that_is_not_kept_is_a_problem_with_field_value_and_fix(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"{_RUN}/samples", params={"step": 9})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    problem = answer.json()
    assert (problem["field"], problem["value"]) == ("step", 9)
    assert "recorded are steps 1-2" in problem["fix"]


async def test_the_log_goes_on_behind_a_cursor(client: httpx.AsyncClient, tmp_path: Path) -> None:
    first = (await client.get(f"{_RUN}/log")).json()
    assert [entry["message"] for entry in first["entries"]] == ["one"]
    append(tmp_path / "storage" / "team" / "json" / "u-1", json.dumps({"time": 2.0, "level": "INFO", "message": "two"}))
    second = (await client.get(f"{_RUN}/log", params={"after": first["next"]})).json()
    assert [entry["message"] for entry in second["entries"]] == ["two"]
    assert (await client.get(f"{_RUN}/log", params={"after": "../x"})).status_code == 422


async def test_a_run_without_records_has_an_empty_log(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/runs/team/json/u-2/log")
    assert (answer.status_code, answer.json()["entries"]) == (200, [])


async def test_only_the_servable_files_of_whole_checkpoints(client: httpx.AsyncClient, tmp_path: Path) -> None:
    listed = (await client.get(f"{_RUN}/artifacts")).json()["artifacts"]
    assert [a["step"] for a in listed] == [2]
    names = [file["name"] for file in listed[0]["files"]]
    assert names == ["adapter_model.safetensors", "adapter_config.json"]
    weights = await client.get(f"{_RUN}/artifacts/2/adapter_model.safetensors")
    assert hashlib.sha256(weights.content).hexdigest() == listed[0]["files"][0]["sha256"]
    for name in ("optimizer.safetensors", "state.json"):
        assert (await client.get(f"{_RUN}/artifacts/2/{name}")).status_code == 404
    (tmp_path / "storage" / "team" / "json" / "u-1" / "step_2" / "optimizer.safetensors").unlink()
    assert (await client.get(f"{_RUN}/artifacts/2/adapter_config.json")).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/../../token/log",
        "/v1/runs/team/json/..%2f..%2f../samples",
        "/v1/runs/..%2f/json/u-1/log",
        "/v1/runs/%2e%2e/%2e%2e/%2e%2e/log",
        f"{_RUN}/artifacts/2/..%2f..%2ftoken",
        f"{_RUN}/artifacts/2/%2e%2e%2fstate.json",
        f"{_RUN}/artifacts/..%2f/adapter_config.json",
        "/v1/runs/team/json%00/u-1/log",
        "/v1/runs/team/json/u-1%0a/log",
        "/v1/runs/team/.hidden/u-1/log",
    ],
)
async def test_no_path_leads_out_of_a_runs_directory(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code in (404, 422), answer.text
    assert "secret" not in answer.text


async def test_a_link_that_leads_out_of_the_storage_is_not_followed(client: httpx.AsyncClient, tmp_path: Path) -> None:
    config = tmp_path / "storage" / "team" / "json" / "u-1" / "step_2" / "adapter_config.json"
    config.unlink()
    (tmp_path / "adapter_config.json").write_text("{}")  # as long as state.json says
    config.symlink_to(tmp_path / "adapter_config.json")
    answer = await client.get(f"{_RUN}/artifacts/2/adapter_config.json")
    assert (answer.status_code, "lies outside" in answer.json()["fix"]) == (404, True)
