"""Parts of Kubernetes and the operator die: the training does not notice, and the objects catch up."""

import base64
import re

import httpx

from lorafleet_local.certs import ETCD_CLIENT, Pki
from lorafleet_local.controlplane import client_context
from support.chaos import Scenario, gone, supervisors_alive

API_SERVER = "/kube-apiserver"
OPERATOR = "bin/lorafleet-operator"


def unnoticed(scenario: Scenario) -> None:
    """Every step exactly once, and no run was loaded again."""
    scenario.finish()
    assert scenario.row.restarts == 0
    assert supervisors_alive(scenario.chaos)


def test_operator(scenario: Scenario) -> None:
    scenario.start()
    epoch = scenario.cluster.listing().operator_epoch
    scenario.kill("operator", OPERATOR)
    scenario.recover()
    unnoticed(scenario)
    assert scenario.cluster.listing().operator_epoch == epoch + 1


def test_apiserver(scenario: Scenario) -> None:
    scenario.start()
    scenario.kill("kube-apiserver", API_SERVER)
    scenario.recover()
    unnoticed(scenario)


def test_apiserver_with_a_compacted_history(scenario: Scenario) -> None:
    """The operator's watch cannot go on from where it was: 410, and it lists anew."""
    scenario.start()
    scenario.kill("kube-apiserver, etcd compacted meanwhile", API_SERVER)
    compact(scenario)
    scenario.recover()
    unnoticed(scenario)


def compact(scenario: Scenario) -> None:
    """Make etcd forget every older revision."""
    state = scenario.cluster.stack.state
    context = client_context(Pki(state.folder / "pki", (ETCD_CLIENT,)), ETCD_CLIENT)
    url = f"https://127.0.0.1:{state.ports['etcd']}"
    with httpx.Client(base_url=url, verify=context, trust_env=False) as etcd:
        key = base64.b64encode(b"/").decode()
        found = etcd.post("/v3/kv/range", json={"key": key, "limit": 1}).raise_for_status().json()
        body = {"revision": found["header"]["revision"], "physical": True}
        etcd.post("/v3/kv/compaction", json=body).raise_for_status()


def test_etcd(scenario: Scenario) -> None:
    scenario.start()
    scenario.kill("etcd", "--name=local")
    scenario.recover()
    unnoticed(scenario)


def test_controller_manager(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.kill("kube-controller-manager", "/kube-controller-manager")
    scenario.recover()
    unnoticed(scenario)
    assert gone(old)


def test_operator_and_runtime(scenario: Scenario) -> None:
    scenario.start()
    scenario.kill("operator and runtime process", OPERATOR, "lorafleet_runtime.cli serve")
    scenario.recover()
    scenario.finish(undone=1)


def test_apiserver_and_trainer(scenario: Scenario) -> None:
    scenario.start()
    scenario.kill("kube-apiserver and trainer actor", API_SERVER, "ray::TrainerActor")
    scenario.recover()
    scenario.finish(undone=1)


def test_kubectl_wait_of_a_user_outlives_the_apiserver(scenario: Scenario) -> None:
    scenario.start()
    waiting = scenario.user_waits(f"{scenario.name}-0")
    scenario.kill("kube-apiserver under `kubectl wait`", API_SERVER)
    scenario.recover()
    unnoticed(scenario)
    _, errors = waiting.communicate(timeout=30.0)
    said = [line for line in errors.splitlines() if not re.match(r"I\d{4} ", line)]  # but for klog's information
    assert (waiting.returncode, said) == (0, [])
