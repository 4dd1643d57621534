"""The process around it: imports, flags, probes, metrics."""

import json
import subprocess
import sys
import time

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lorafleet_operator import metrics
from lorafleet_operator.__main__ import main, parse
from lorafleet_operator.health import Health, serve
from lorafleet_operator.metrics import RunCollector
from lorafleet_operator.store import Key, Store
from support.operator_world import UID, run_object


def test_operator_imports_no_heavy_package_and_no_kubernetes_client() -> None:
    code = "import json, sys, lorafleet_operator.app; print(json.dumps([m for m in sys.modules if '.' not in m]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "ray", "vllm", "megatron", "transformers", "kubernetes", "lorafleet_runtime", "numpy"}


def test_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = parse(["--namespace", "team", "--metrics-port", "0", "--kubeconfig", "k"])
    assert (settings.namespace, settings.metrics_port, settings.kubeconfig) == ("team", 0, "k")
    monkeypatch.setenv("LORAFLEET_PROGRESS_SECONDS", "2")
    monkeypatch.setenv("LORAFLEET_NAMESPACE", "team")
    settings, _ = parse([])
    assert (settings.progress_seconds, settings.namespace) == (2.0, "team")
    assert parse(["--all-namespaces"])[0].namespace is None


def test_namespace_and_all_namespaces_exclude_each_other() -> None:
    with pytest.raises(SystemExit):
        parse(["--namespace", "a", "--all-namespaces"])


def test_bad_kubeconfig_is_exit_code_2_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kubeconfig", "/nowhere", "--metrics-port", "0", "--health-port", "0"]) == 2
    assert "lorafleet-operator: kubeconfig /nowhere" in capsys.readouterr().err


def test_probes_tell_stuck_loop_ended_watch_and_unlisted_start() -> None:
    health = Health(watching=lambda: True)
    server = serve("127.0.0.1", 0, health, CollectorRegistry())
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503
        health.ready = True
        assert httpx.get(f"{url}/readyz").status_code == 200
        health.watching = lambda: False
        assert "watches have ended" in httpx.get(f"{url}/healthz").text
        health.watching = lambda: True
        health.heartbeat = time.monotonic() - 60.0
        stuck = httpx.get(f"{url}/healthz")
        assert (stuck.status_code, "event loop" in stuck.text) == (503, True)
    finally:
        server.shutdown()
        server.server_close()


def test_an_operator_that_stands_by_is_ready_and_a_fenced_one_is_not_but_lives() -> None:
    health = Health()
    assert health.readiness() == (False, "not everything was listed yet")
    health.standing_by = lambda: "standing by: a holds the lease"
    assert health.readiness() == (True, "standing by: a holds the lease")
    health.fenced = "a newer one"
    assert health.readiness() == (False, "fenced: a newer one")
    assert health.problems() == []


def scrape(store: Store) -> str:
    """What a scrape of the store's series gives."""
    registry = CollectorRegistry()
    registry.register(RunCollector(store, lambda: [("team", "demo", True)]))
    return generate_latest(registry).decode()


def test_series_of_a_run_come_from_the_store_and_leave_with_it() -> None:
    store, key = Store(), Key("adapterruns", "team", "r")
    ready = {"type": "Ready", "status": "True", "reason": "Training", "message": "", "lastTransitionTime": "x"}
    store.put(key, run_object(rank=8, status={"conditions": [ready]}))
    text = scrape(store)
    assert 'lorafleet_run_condition{name="r",namespace="team",pool="demo",status="True",type="Ready"} 1.0' in text
    assert f'pool="demo",rank="8",reason="Training",uid="{UID}"' in text
    assert 'lorafleet_operator_runtime_connected{namespace="team",pool="demo"} 1.0' in text
    store.remove(key)
    assert UID not in scrape(store)


def test_documented_operator_metrics_exist() -> None:
    text = generate_latest(metrics.REGISTRY).decode()
    for name in ("status_write_errors_total", "reconcile_seconds", "event_loop_lag_seconds", "queue_length", "leading"):
        assert f"# HELP lorafleet_operator_{name.removesuffix('_total')}" in text
