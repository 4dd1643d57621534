"""Reads AdapterRuns, AdapterPools and Secrets through the user's kubeconfig, and watches runs. Writes nothing.

Called by the commands. Everything that can go wrong comes out as a CliError.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any, Protocol

import httpx

from lorafleet_api.v1alpha1.names import API_VERSION, POOL_PLURAL, RUN_PLURAL
from lorafleet_cli.errors import CliError, Forbidden, Unauthorized, Unavailable, UnknownRun
from lorafleet_cli.facts import pool_ref
from lorafleet_cli.patience import Patience

Object = dict[str, Any]

_TIMEOUT_SECONDS = 10.0
_WATCH_SECONDS = 30
_RETRY_SECONDS = 1.0
_PAUSE_SECONDS = 0.1  # between two watches, should a proxy end each at once


class Api(Protocol):
    """What is used of kr8s' client."""

    auth: Any

    def call_api(self, method: str, **arguments: Any) -> Any:
        """One request, as an async context manager over an httpx.Response."""
        ...


class Kube:
    """A cluster, in the namespace that the user means.

    Args:
        api: kr8s' client.
        namespace: the user's.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def runs(self, *, everywhere: bool = False) -> list[Object]:
        """AdapterRuns of the namespace, or of all of them; by name."""
        return await self._list(RUN_PLURAL, None if everywhere else self.namespace)

    async def pools(self, *, everywhere: bool = False) -> list[Object]:
        """AdapterPools, likewise."""
        return await self._list(POOL_PLURAL, None if everywhere else self.namespace)

    async def run(self, name: str) -> Object:
        """One AdapterRun.

        Raises:
            UnknownRun: it does not exist; the text suggests names that are near.
        """
        found = await self._get(API_VERSION, RUN_PLURAL, self.namespace, name)
        if found is not None:
            return found
        raise unknown_run(name, self.namespace, [r["metadata"]["name"] for r in await self.runs()])

    async def pool(self, name: str, namespace: str) -> Object:
        """One AdapterPool.

        Raises:
            CliError: it does not exist.
        """
        found = await self._get(API_VERSION, POOL_PLURAL, namespace, name)
        if found is None:
            raise CliError("poolRef", f"{namespace}/{name}", "there is no such AdapterPool; create it, or mend poolRef")
        return found

    async def pool_of(self, run: Object) -> Object:
        """The pool that a run names."""
        namespace, name = pool_ref(run)
        return await self.pool(name, namespace)

    async def secret(self, name: str, namespace: str) -> dict[str, str] | None:
        """The data of a Secret, still in base64; None where there is none."""
        found = await self._get("v1", "secrets", namespace, name)
        return None if found is None else found.get("data") or {}

    async def service(self, name: str, namespace: str) -> Object | None:
        """One Service; None where there is none."""
        return await self._get("v1", "services", namespace, name)

    async def pods(self, labels: dict[str, str], namespace: str) -> list[Object]:
        """Pods with these labels."""
        params = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())}
        async with self._calling("list pods", namespace):
            found = await self._read(version="v1", url="pods", namespace=namespace, params=params)
        return list(found["items"])

    async def watch(self, name: str | None) -> AsyncIterator[tuple[list[Object], str | None]]:
        """Runs of the namespace (or the one run) whenever one changes, for ever.

        Yields the runs, and what keeps us from hearing news (None while we hear).

        Raises:
            CliError: the first reading failed, or the API server refuses us for long.
        """
        field = None if name is None else f"metadata.name={name}"
        runs: dict[str, Object] = {}
        patience: Patience | None = None
        while True:
            try:
                version, items = await self._listing(RUN_PLURAL, self.namespace, field)
                runs = {item["metadata"]["uid"]: item for item in items}
                yield _sorted(runs), None
                patience = patience or Patience()
                async for kind, item in self._events(version, field):
                    if kind == "DELETED":
                        runs.pop(item["metadata"]["uid"], None)
                    else:
                        runs[item["metadata"]["uid"]] = item
                    patience.heard()
                    yield _sorted(runs), None
                patience.heard()  # not before: who may list, but not watch, is told so
                await asyncio.sleep(_PAUSE_SECONDS)
            except CliError as error:
                if patience is None or not patience.bears(error):
                    raise
                yield _sorted(runs), str(error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _events(self, version: str, field: str | None) -> AsyncIterator[tuple[str, Object]]:
        """Changes since a version, until the server ends the watch."""
        params = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(_WATCH_SECONDS)}
        if field is not None:
            params["fieldSelector"] = field
        timeout = httpx.Timeout(_TIMEOUT_SECONDS, read=_WATCH_SECONDS + _TIMEOUT_SECONDS)
        call = {"version": API_VERSION, "url": RUN_PLURAL, "namespace": self.namespace, "params": params}
        async with self._calling(f"watch {RUN_PLURAL}", self.namespace):
            async with self.api.call_api("GET", stream=True, timeout=timeout, **call) as response:
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":  # the version is too old: list again
                        return
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]

    async def _get(self, version: str, plural: str, namespace: str, name: str) -> Object | None:
        try:
            async with self._calling(f"get {plural}/{name}", namespace):
                return await self._read(version=version, url=f"{plural}/{name}", namespace=namespace)
        except _NotFound:
            return None

    async def _list(self, plural: str, namespace: str | None) -> list[Object]:
        _, items = await self._listing(plural, namespace, None)
        return sorted(items, key=lambda i: (i["metadata"]["namespace"], i["metadata"]["name"]))

    async def _listing(self, plural: str, namespace: str | None, field: str | None) -> tuple[str, list[Object]]:
        call: dict[str, Any] = {"version": API_VERSION, "url": plural, "namespace": namespace}
        if field is not None:
            call["params"] = {"fieldSelector": field}
        try:
            async with self._calling(f"list {plural}", namespace):
                found = await self._read(**call)
        except _NotFound as error:
            text = "this cluster does not know lorafleet.dev/v1alpha1; install its CRDs, or choose another --context"
            raise CliError("API server", self.api.auth.server, text) from error
        return found["metadata"]["resourceVersion"], found["items"]

    async def _read(self, **call: Any) -> Object:
        async with self.api.call_api("GET", timeout=_TIMEOUT_SECONDS, **call) as response:
            found: Object = response.json()
            return found

    @asynccontextmanager
    async def _calling(self, what: str, namespace: str | None) -> AsyncIterator[None]:
        """Turns what kr8s and httpx raise into a CliError, or into _NotFound."""
        import kr8s

        server = self.api.auth.server
        try:
            yield
        except kr8s.ServerError as error:
            status = None if error.response is None else error.response.status_code
            where = f"{what} in namespace {namespace}" if namespace else f"{what} in all namespaces"
            if status == httpx.codes.NOT_FOUND:
                raise _NotFound from error
            if status == httpx.codes.FORBIDDEN:
                text = "you may not; ask for the role lorafleet-view there, or choose another --namespace or --context"
                raise Forbidden("permission", where, text) from error
            if status == httpx.codes.UNAUTHORIZED:
                text = "they are refused; log in again, or mend the kubeconfig"
                raise Unauthorized("credentials", server, text) from error
            if status is not None and status < httpx.codes.INTERNAL_SERVER_ERROR:
                raise CliError("API server", where, f"it refuses: {error}") from error
            raise Unavailable("API server", server, f"it fails ({error}); try again in a minute") from error
        except (httpx.TransportError, kr8s.APITimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            text = f"it does not answer ({why}); start it, or mend the kubeconfig"
            raise Unavailable("API server", server, text) from error


class _NotFound(Exception):
    """404."""


def unknown_run(name: str, namespace: str, known: list[str]) -> UnknownRun:
    """The error of a name that is not there, with names that are near, else all of a few."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        fix = f"did you mean {' or '.join(near)}?"
    elif 0 < len(known) <= 5:
        fix = f"there are {', '.join(sorted(known))}; choose one, or another --namespace"
    else:
        fix = "see `lorafleet status`, or choose another --namespace"
    return UnknownRun("run", name, f"there is no such AdapterRun in namespace {namespace}; {fix}")


def _sorted(runs: dict[str, Object]) -> list[Object]:
    return sorted(runs.values(), key=lambda r: (r["metadata"]["creationTimestamp"], r["metadata"]["name"]))
