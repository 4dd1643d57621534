"""From kubectl's options and environment to a client of the API server. Called by the command line alone.

Reads kubeconfigs; writes into a temporary folder that only the user may enter and that goes with the command.
"""

import os
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from lorafleet_cli.errors import CliError, Unavailable
from lorafleet_cli.kube import Kube

_DEFAULT = "~/.kube/config"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True, slots=True)
class Access:
    """Which cluster, as whom, and where: kubectl's options."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


@asynccontextmanager
async def connect(access: Access) -> AsyncIterator[Kube]:
    """The cluster of the kubeconfig, until the block ends.

    Raises:
        CliError: no usable kubeconfig, or the API server is away.
    """
    paths = _files(access)
    _spare_loopback_the_proxy()
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="lorafleet-") as folder:
        tempfile.tempdir = folder  # kr8s leaves the client's key in a temporary file
        try:
            api = await _open(access, paths)
            yield Kube(api, access.namespace or _namespace(api))
        finally:
            tempfile.tempdir = before


async def _open(access: Access, paths: list[Path]) -> Any:
    """kr8s' client; `paths` is empty in a pod without kubeconfig, which has a service account."""
    import kr8s.asyncio

    shown = ":".join(map(str, paths)) or "service account"
    where: dict[str, Any] = {"context": access.context}
    try:
        if paths:
            # Of two entries with one name kr8s takes the last, kubectl the first. The namespace is that of the current
            # context of the first file, whatever the context is: _namespace finds the right one.
            where = {"kubeconfig": ":".join(map(str, reversed(paths))), "namespace": "default",
                     "context": access.context or _current_context(paths)}  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of API servers newer than itself
            return await kr8s.asyncio.api(**where)
    except kr8s.ServerError as error:
        raise CliError("API server", shown, f"it refuses: {error}; log in again, or mend the file") from error
    except (httpx.TransportError, kr8s.APITimeoutError) as error:
        text = f"its API server does not answer ({error}); start it, or choose another --context"
        raise Unavailable("kubeconfig", shown, text) from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError, yaml.YAMLError) as error:
        raise CliError("kubeconfig", shown, f"it is not usable ({error}); mend it") from error


def _namespace(api: Any) -> str:
    """The context's namespace; kr8s itself takes that of the current context, whatever --context says."""
    if not api.auth.active_context:
        return str(api.auth.namespace)
    context = api.auth.kubeconfig.get_context(api.auth.active_context)
    return str(context.get("namespace") or "default")


def _files(access: Access) -> list[Path]:
    """The kubeconfigs that exist, the first one being the one that wins; none in a pod with a service account.

    Raises:
        CliError: there is neither.
    """
    if access.kubeconfig is not None:
        named = [access.kubeconfig]
    else:
        named = [Path(p).expanduser() for p in (os.environ.get("KUBECONFIG") or _DEFAULT).split(os.pathsep) if p]
    found = [path for path in named if path.is_file()]
    if not found and (access.kubeconfig is not None or not _SERVICE_ACCOUNT.exists()):
        text = "there is no such file; set KUBECONFIG, or pass --kubeconfig (after `make up`: .lorafleet/kubeconfig)"
        raise CliError("kubeconfig", ":".join(map(str, named)), text)
    return found


def _current_context(paths: list[Path]) -> str:
    """The first one that is named, as for kubectl; kr8s looks into the first file only."""
    for path in paths:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path} is no mapping")
        if content.get("current-context"):
            return str(content["current-context"])
    raise ValueError("it names no current-context; pass --context")


def _spare_loopback_the_proxy() -> None:
    """As kubectl does: what runs on this machine is not asked for through HTTPS_PROXY."""
    already = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, [already, "localhost,127.0.0.1,::1"]))
