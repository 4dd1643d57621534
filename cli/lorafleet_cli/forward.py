"""A port-forward to a Service through the API server, as `kubectl port-forward` does; ends with the block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lorafleet_cli.errors import CliError, Forbidden, Unavailable
from lorafleet_cli.facts import holds
from lorafleet_cli.kube import Kube


@asynccontextmanager
async def forward(kube: Kube, service: str, namespace: str, port: int) -> AsyncIterator[int]:
    """A local port that leads to a port of a Service.

    Raises:
        CliError: no such Service, no such port, or it may not be read.
        Unavailable: no pod behind it is ready.
    """
    from kr8s.asyncio.objects import Pod
    from kr8s.asyncio.portforward import PortForward

    shown = f"{namespace}/{service}:{port}"
    try:
        found = await kube.service(service, namespace)
        pods = [] if found is None else await kube.pods(found["spec"].get("selector") or {}, namespace)
    except Forbidden as error:
        text = f"you may not {error.value}; ask for get on services, list on pods and create on pods/portforward"
        raise CliError("service", shown, text) from error
    if found is None:
        text = "the runtime's host is inside the cluster, but there is no such Service; mend the pool's endpoint.url"
        raise CliError("service", shown, text)
    ready = [pod for pod in pods if holds(pod, "Ready")]
    if not ready:
        raise Unavailable("service", shown, "no pod behind it is ready; see `lorafleet status`, try again in a minute")
    pod = Pod(ready[0], api=kube.api)  # type: ignore[arg-type]
    async with PortForward(pod, target_port(found, ready[0], port), local_port="auto") as local:
        yield local


def target_port(service: Any, pod: Any, port: int) -> int:
    """The pod's port behind a Service's port.

    Raises:
        CliError: the Service has no such port, or names one that the pod does not have.
    """
    name = service["metadata"]["name"]
    entry = next((p for p in service["spec"]["ports"] if p["port"] == port), None)
    if entry is None:
        ports = ", ".join(str(p["port"]) for p in service["spec"]["ports"])
        raise CliError("endpoint.url", port, f"Service {name} has no such port, but {ports}; mend the pool's endpoint")
    target = entry.get("targetPort", port)
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for offered in container.get("ports") or []:
            if offered.get("name") == target:
                return int(offered["containerPort"])
    raise CliError("targetPort", target, f"no container behind Service {name} has such a port; mend the Service")
