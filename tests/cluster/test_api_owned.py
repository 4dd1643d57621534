"""Runs made through /adapter_runs beside the operator's, over SIGKILLs of the runtime."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cluster import Cluster

STEPS = 10


@pytest.fixture
def miles(cluster: Cluster) -> Cluster:
    """The stack with miles' routes on: the supervisor's next runtime reads the changed configuration."""
    path = cluster.stack.state.folder / "runtime.yaml"
    config = json.loads(path.read_text())
    if not config.get("adapterRunsApi"):
        assert cluster.runtime.get("/adapter_runs").status_code == 404
        path.write_text(json.dumps(config | {"adapterRunsApi": True}))
        restart(cluster)
    return cluster


def restart(cluster: Cluster) -> None:
    """SIGKILL of the runtime process; waits for the next one, and for the operator to speak to it."""
    boot = cluster.listing().boot_epoch
    cluster.kill("lorafleet_runtime.cli serve")
    cluster.until("the next runtime", lambda: ready(cluster) and cluster.listing().boot_epoch == boot + 1)


def ready(cluster: Cluster) -> bool:
    """The operator has spoken, trainer and engine answer."""
    try:
        return cluster.runtime.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def post(cluster: Cluster, name: str, **config: Any) -> str:
    """POST a run; returns its registration id."""
    body: dict[str, Any] = {
        "data": "train.jsonl", "input_key": "prompt", "label_key": "label", "rank": 4, "rollout_batch_size": 2,
        "custom_rm_path": "support.rewards.slow", "n_samples_per_prompt": 4, "num_step": STEPS, "max_staleness": 0,
        "sampling": {"max_tokens": 6}, "checkpoint": {"interval_steps": 2},
    } | config  # fmt: skip
    answer = cluster.runtime.post("/adapter_runs", json={"name": name, "config": body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["registration_id"])


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    """GET of one run; empty while the runtime is away."""
    try:
        found: dict[str, Any] = cluster.runtime.get(f"/adapter_runs/{name}").json()
    except httpx.HTTPError:
        return {}
    return found


def test_killed_runtime_brings_both_owners_runs_back(miles: Cluster) -> None:
    uid = post(miles, "mine", save="exports/mine")
    miles.apply("theirs", numStep=STEPS, customRmPath="support.rewards.slow")
    theirs = miles.wait_step("theirs", 3)
    miles.until("a checkpoint of mine", lambda: (status(miles, "mine").get("artifact") or {}).get("step", 0) >= 2)
    restart(miles)
    miles.until("the end of mine", lambda: status(miles, "mine").get("state") == "COMPLETED", 120)
    miles.wait("theirs", "Complete", 120)
    ended = status(miles, "mine")
    assert (ended["registration_id"], ended["step"], ended["error"]) == (uid, STEPS, None)
    assert miles.get("theirs")["status"]["step"] == STEPS
    assert (miles.traces(uid), miles.get("theirs")["metadata"]["uid"]) == ([], theirs)
    copy = miles.stack.storage / "exports" / "mine" / f"step_{STEPS}"
    miles.until("the export", lambda: status(miles, "mine").get("exported_step") == STEPS, 20)
    weights = Path(ended["artifact"]["path"]) / "adapter_model.safetensors"
    assert (copy / "adapter_model.safetensors").read_bytes() == weights.read_bytes()


def test_deleted_run_stays_deleted_over_a_kill(miles: Cluster) -> None:
    uid = post(miles, "gone", num_step=500)
    miles.until("training", lambda: status(miles, "gone").get("step", 0) >= 3)
    assert miles.runtime.delete("/adapter_runs/gone").status_code == 200
    restart(miles)
    ended = status(miles, "gone")
    assert (ended["state"], ended["registration_id"]) == ("COMPLETED", uid)
    miles.until("no trace", lambda: miles.traces(uid) == [], 60)
    assert miles.listing().slots.used == 0
