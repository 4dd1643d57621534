"""A run's life through the real API server, operator and runtime."""

import json
from pathlib import Path

from peft import PeftConfig

from support.cluster import Cluster


def test_create_train_complete_deregister(cluster: Cluster) -> None:
    cluster.apply("happy", numStep=4)
    for condition in ("Registered", "Complete", "Deregistered"):
        if condition == "Registered":
            cluster.until("Registered was True", lambda: _was_registered(cluster, "happy"))
        else:
            cluster.wait("happy", condition)
    item = cluster.get("happy")
    status = item["status"]
    conditions = {c["type"]: c for c in status["conditions"]}
    assert {kind: condition["status"] for kind, condition in conditions.items()} == {
        "Ready": "True", "Registered": "False", "Complete": "True", "Failed": "False", "Finished": "True",
        "Deregistered": "True", "Stalled": "False", "Suspended": "False", "Reconciling": "False",
    }  # fmt: skip
    assert (status["step"], status["targetStep"], status["observedGeneration"]) == (4, 4, 1)
    assert conditions["Registered"]["reason"] == "Completed"
    artifact = Path(status["artifact"]["path"])
    assert PeftConfig.from_pretrained(str(artifact)).r == 4
    assert cluster.traces(item["metadata"]["uid"]) == []


def _was_registered(cluster: Cluster, name: str) -> bool:
    mine = f"involvedObject.kind=AdapterRun,involvedObject.name={name},reason=Registered"
    return bool(json.loads(cluster.kubectl("get", "events", f"--field-selector={mine}", "-o", "json"))["items"])


def test_columns_show_status_step_and_target(cluster: Cluster) -> None:
    cluster.apply("shown")
    cluster.wait("shown", "Deregistered")
    header, row = cluster.kubectl("get", "adapterruns").splitlines()
    assert header.split()[:4] == ["NAME", "STATUS", "STEP", "TARGET"]
    assert row.split()[:4] == ["shown", "Completed", "3", "3"]


def test_delete_midway_leaves_no_trace(cluster: Cluster) -> None:
    cluster.apply("doomed", numStep=500, customRmPath="support.rewards.slow")
    uid = cluster.wait_step("doomed", 2)
    assert cluster.traces(uid) != []
    cluster.kubectl("delete", "adapterrun", "doomed", "--timeout=60s", timeout=70.0)
    assert cluster.traces(uid) == []
    assert cluster.view(uid) is None


def test_more_runs_than_slots_queue_with_a_position_and_all_complete(cluster: Cluster) -> None:
    names = [f"many-{number}" for number in range(5)]
    for name in names:
        cluster.apply(name, customRmPath="support.rewards.slow")

    def message(name: str) -> str:
        return str(cluster.condition(name, "Registered")["message"])

    cluster.until("a run waits", lambda: any("position" in message(name) for name in names))
    for name in names:
        cluster.wait(name, "Complete", 180)


def test_suspend_frees_the_slot_and_resume_continues(cluster: Cluster) -> None:
    cluster.apply("pause", numStep=8, customRmPath="support.rewards.slow")
    uid = cluster.wait_step("pause", 2)
    cluster.kubectl("patch", "adapterrun", "pause", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    cluster.wait("pause", "Suspended")
    assert cluster.traces(uid) == []
    step = cluster.get("pause")["status"]["step"]
    cluster.kubectl("patch", "adapterrun", "pause", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    cluster.wait("pause", "Complete", 120)
    assert 2 <= step < 8
    assert cluster.get("pause")["status"]["step"] == 8
