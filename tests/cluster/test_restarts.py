"""SIGKILL of one part after the other while a run trains: it completes, no step is trained twice, nothing leaks."""

import psutil

from support.cluster import Cluster

STEPS = 12


def start(cluster: Cluster, name: str) -> str:
    cluster.apply(name, numStep=STEPS, customRmPath="support.rewards.slow")
    return cluster.wait_step(name, 3)


def step(cluster: Cluster, uid: str) -> int:
    view = cluster.view(uid)
    assert view is not None
    return view.step


def finish(cluster: Cluster, name: str, uid: str) -> None:
    cluster.wait(name, "Complete", 240)
    cluster.wait(name, "Deregistered", 60)
    status = cluster.get(name)["status"]
    assert (status["step"], status["targetStep"]) == (STEPS, STEPS)
    assert cluster.traces(uid) == []


def test_operator_killed(cluster: Cluster) -> None:
    uid = start(cluster, "op-killed")
    before = cluster.view(uid)
    assert before is not None
    cluster.kill("bin/lorafleet-operator")
    finish(cluster, "op-killed", uid)
    epoch = cluster.listing().operator_epoch
    assert epoch >= 2


def test_trainer_killed(cluster: Cluster) -> None:
    uid = start(cluster, "trainer-killed")
    before = step(cluster, uid)
    cluster.kill("ray::TrainerActor")
    cluster.until("the run is loaded again", lambda: (v := cluster.view(uid)) is not None and v.restarts >= 1)
    assert step(cluster, uid) >= before
    finish(cluster, "trainer-killed", uid)


def test_engine_killed(cluster: Cluster) -> None:
    uid = start(cluster, "engine-killed")
    pid = cluster.kill("ray::EngineActor")
    finish(cluster, "engine-killed", uid)
    assert not psutil.pid_exists(pid)


def test_runtime_process_killed(cluster: Cluster) -> None:
    uid = start(cluster, "serve-killed")
    boot, before = cluster.listing().boot_epoch, step(cluster, uid)
    cluster.kill("lorafleet_runtime.cli serve")
    finish(cluster, "serve-killed", uid)
    assert cluster.listing().boot_epoch == boot + 1
    resumed_at = cluster.get("serve-killed")["status"]["startStep"]
    assert resumed_at >= before  # not the last checkpoint, which may be a step older
