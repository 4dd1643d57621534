"""A runtime whose host is inside the cluster is reached through a port-forward that the command opens by itself."""

import json

import pytest

from lorafleet_cli.errors import CliError
from lorafleet_cli.forward import named, target_port
from lorafleet_runtime.loop.journal import append
from support.cli_world import CliWorld, pool, run

_POD = {"spec": {"containers": [{"name": "head", "ports": [{"name": "http", "containerPort": 9000}]}]}}


@pytest.fixture
def inside(world: CliWorld) -> CliWorld:
    """The pool's endpoint is Service runtime:80 in namespace default; one ready pod behind it has the real port."""
    assert world.runtime is not None
    world.pools[:] = [pool("http://runtime.default.svc:80")]
    world.runs.append(run("json"))
    append(world.directory(world.runs[0]), json.dumps({"time": 1.0, "level": "INFO", "message": "through the tunnel"}))
    base = "/api/v1/namespaces/default"
    ports = [{"port": 80, "targetPort": world.runtime.port}]
    spec = {"selector": {"app": "runtime"}, "ports": ports}
    world.others[f"{base}/services/runtime"] = {"metadata": {"name": "runtime", "namespace": "default"}, "spec": spec}
    world.others[f"{base}/services"] = {"items": [world.others[f"{base}/services/runtime"]]}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "head", "namespace": "default"}, "spec": _POD["spec"],
        "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}]},
    }  # fmt: skip
    world.others[f"{base}/pods"] = {"items": [pod]}
    world.others[f"{base}/pods/head"] = pod
    return world


def test_logs_through_a_service_inside_the_cluster(inside: CliWorld) -> None:
    result = inside.call("logs", "json")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("through the tunnel")


def test_no_pod_is_ready(inside: CliWorld) -> None:
    inside.others["/api/v1/namespaces/default/pods"]["items"].clear()
    assert "no pod behind it is ready" in inside.error("logs", "json")


@pytest.mark.parametrize("host", ["runtime.default.svc", "gpu01.lan", "gpu01"])
def test_a_host_that_is_no_service_is_told_as_it_cannot_be_reached(inside: CliWorld, host: str) -> None:
    inside.others.clear()
    inside.pools[:] = [pool(f"http://{host}")]
    text = inside.error("logs", "json")
    assert text.startswith(f"error: runtime: http://{host}: it cannot be reached (")
    assert "Service" not in text


def test_a_bare_name_that_is_a_service_is_one(inside: CliWorld) -> None:
    inside.pools[:] = [pool("http://runtime:80")]
    result = inside.call("logs", "json")
    assert result.exit_code == 0, result.output


def test_services_may_not_be_read(inside: CliWorld) -> None:
    inside.forbidden = ("services",)
    text = inside.error("logs", "json")
    assert text.startswith("error: service: default/runtime: you may not get services/runtime in namespace default; ")
    inside.pools[:] = [pool("http://gpu01.lan")]
    assert inside.error("logs", "json").startswith("error: runtime: http://gpu01.lan: it cannot be reached (")


def test_pods_may_not_be_listed(inside: CliWorld) -> None:
    inside.forbidden = ("pods",)
    assert "you may not list pods in namespace default; ask for get on services" in inside.error("logs", "json")


def test_ports_of_services() -> None:
    service = {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80, "targetPort": "http"}, {"port": 81}]}}
    assert target_port(service, _POD, 80) == 9000
    assert target_port(service, _POD, 81) == 81
    with pytest.raises(CliError, match="has no such port, but 80, 81"):
        target_port(service, _POD, 82)


@pytest.mark.parametrize(
    ("host", "service"),
    [
        ("runtime", ("runtime", "pools", False)),
        ("runtime.team", ("runtime", "team", False)),
        ("runtime.team.svc", ("runtime", "team", True)),
        ("runtime.team.svc.cluster.local", ("runtime", "team", True)),
        ("runtime.team.svc.cluster.local.", ("runtime", "team", True)),
        ("runtime.team.svc.example.com", None),
        ("runtime.example.com", None),
        ("127.0.0.1", None),
        ("localhost", None),
    ],
)
def test_which_hosts_can_be_services(host: str, service: tuple[str, str, bool] | None) -> None:
    assert named(host, "pools") == service
