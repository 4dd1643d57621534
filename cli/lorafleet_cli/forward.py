"""A port-forward to a Service through the API server, as `kubectl port-forward` does; ends with the block."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lorafleet_cli.errors import CliError, Forbidden, Unavailable
from lorafleet_cli.facts import holds
from lorafleet_cli.kube import Kube, Object

_SERVICE = re.compile(r"([a-z0-9-]+)(?:\.([a-z0-9-]+)(\.svc(?:\.cluster\.local)?)?)?\.?")


def named(host: str, namespace: str) -> tuple[str, str, bool] | None:
    """What a host is as a name inside the cluster: Service, namespace, and whether it can be nothing else.

    Args:
        host: NAME.NAMESPACE.svc or NAME.NAMESPACE.svc.cluster.local; or NAME or NAME.NAMESPACE, which can be a Service.
        namespace: that of a bare NAME.
    """
    match = _SERVICE.fullmatch(host)
    if match is None or host == "localhost" or host.replace(".", "").isdigit():
        return None
    return match[1], match[2] or namespace, match[3] is not None


async def find_service(kube: Kube, host: str, namespace: str) -> Object | None:
    """The Service that a host names; None when there is none.

    Raises:
        Forbidden: it is the name of a Service, and may not be read.
    """
    name = named(host, namespace)
    if name is None:
        return None
    service, where, certain = name
    try:
        return await kube.service(service, where)
    except Forbidden as error:
        if certain:
            raise _ask(f"{where}/{service}", error) from error
        return None  # it may just as well be a host outside the cluster


def _ask(shown: str, error: Forbidden) -> Forbidden:
    text = f"you may not {error.value}; ask for get on services, list on pods and create on pods/portforward"
    return Forbidden("service", shown, text)


@asynccontextmanager
async def forward(kube: Kube, service: Object, port: int) -> AsyncIterator[int]:
    """A local port that leads to a port of a Service.

    Raises:
        CliError: no such port, or its pods may not be read.
        Unavailable: no pod behind it is ready.
    """
    from kr8s.asyncio.objects import Pod
    from kr8s.asyncio.portforward import PortForward

    namespace = service["metadata"]["namespace"]
    shown = f"{namespace}/{service['metadata']['name']}:{port}"
    try:
        pods = await kube.pods(service["spec"].get("selector") or {}, namespace)
    except Forbidden as error:
        raise _ask(shown, error) from error
    ready = [pod for pod in pods if holds(pod, "Ready")]
    if not ready:
        raise Unavailable("service", shown, "no pod behind it is ready; see `lorafleet status`, try again in a minute")
    pod = Pod(ready[0], api=kube.api)  # type: ignore[arg-type]
    async with PortForward(pod, target_port(service, ready[0], port), local_port="auto") as local:
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
