"""A pool's runtime: where it is, how to get there, and what it tells of runs.

Called by logs, samples and download. `resolve` is the one place that knows how a pool names its runtime. A host inside
the cluster that cannot be reached from here is reached by a port-forward, which ends with the command.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lorafleet_api.v1alpha1 import reasons
from lorafleet_cli.errors import CliError, Forbidden, Unavailable
from lorafleet_cli.facts import condition, holds
from lorafleet_cli.forward import find_service, forward
from lorafleet_cli.kube import Kube, Object

_CONNECT_SECONDS = 3.0
_READ_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A runtime's address and bearer token."""

    url: httpx.URL
    token: str = field(repr=False)


async def resolve(kube: Kube, pool: Object) -> Endpoint:
    """How a pool's runtime is reached.

    Raises:
        CliError: the pool names none, or its token cannot be read.
    """
    name, namespace = pool["metadata"]["name"], pool["metadata"]["namespace"]
    endpoint = (pool.get("spec") or {}).get("endpoint")
    if endpoint is None:
        text = "it has no spec.endpoint, and runtimes that the operator makes are not reached in this version"
        raise CliError("pool", f"{namespace}/{name}", text)
    ref = endpoint["tokenSecretRef"]
    secret, key = f"{namespace}/{ref['name']}", ref.get("key") or "token"
    try:
        data = await kube.secret(ref["name"], namespace)
    except Forbidden as error:
        text = "you may not read it, and the runtime's token is in it; ask for get on this Secret"
        raise Forbidden("tokenSecretRef", secret, text) from error
    if data is None:
        text = "there is no such Secret; create it with the runtime's token under the key that the pool names"
        raise CliError("tokenSecretRef", secret, text)
    try:
        token = base64.b64decode(data[key], validate=True).decode().strip()
    except (KeyError, binascii.Error, UnicodeDecodeError) as error:
        raise CliError("tokenSecretRef.key", f"{secret}/{key}", "there is no usable token; put it there") from error
    return Endpoint(httpx.URL(endpoint["url"]), token)


class Runtime:
    """A client of one runtime.

    Args:
        client: sends the token.
        shown: the pool's address, for messages.
        trouble: what the pool's conditions say about the runtime; "" when nothing.
    """

    def __init__(self, client: httpx.AsyncClient, shown: str, trouble: str) -> None:
        self._client = client
        self._shown = shown
        self._trouble = trouble

    async def get(self, run: Object, what: str, **params: Any) -> dict[str, Any]:
        """One of a run's records as JSON: samples, log or artifacts.

        Raises:
            CliError: the runtime refuses; its own words.
            Unavailable: it does not answer.
        """
        async with self.stream(run, what, **params) as response:
            await response.aread()
            found: dict[str, Any] = response.json()
            return found

    @asynccontextmanager
    async def stream(self, run: Object, what: str, **params: Any) -> AsyncIterator[httpx.Response]:
        """The same, as it comes."""
        meta = run["metadata"]
        path = f"v1/runs/{meta['namespace']}/{meta['name']}/{meta['uid']}/{what}"
        query = {key: value for key, value in params.items() if value is not None}
        try:
            async with self._client.stream("GET", path, params=query) as response:
                if response.is_error:
                    await response.aread()
                    raise self._refusal(response)
                yield response
        except httpx.TransportError as error:
            why = self._trouble or str(error) or type(error).__name__
            text = f"it does not answer ({why}); it may be restarting: see `lorafleet status`, try again in a minute"
            raise Unavailable("runtime", self._shown, text) from error

    def _refusal(self, response: httpx.Response) -> CliError:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return CliError("token", self._shown, "the runtime refuses it; put its present one into the pool's Secret")
        try:
            problem = response.json()
        except json.JSONDecodeError:
            problem = {}
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            text = f"it failed ({response.status_code} {problem.get('detail', '')}); try again, or read its log"
            return Unavailable("runtime", self._shown, text)
        if problem.get("fix"):
            return CliError(problem.get("field") or "request", problem.get("value"), problem["fix"])
        detail = problem.get("detail") or response.reason_phrase
        return CliError("runtime", self._shown, f"{response.status_code} {detail}; is it as new as this command?")


@asynccontextmanager
async def open_runtime(kube: Kube, pool: Object) -> AsyncIterator[Runtime]:
    """A client of the pool's runtime until the block ends.

    Raises:
        CliError: it is not known how to reach it.
        Unavailable: it cannot be reached.
    """
    endpoint = await resolve(kube, pool)
    shown = str(endpoint.url)
    trouble = _trouble(pool)
    async with AsyncExitStack() as stack:
        base, extensions = endpoint.url, {}
        why = await _unreachable(endpoint.url)
        service = None if why is None else await find_service(kube, endpoint.url.host, pool["metadata"]["namespace"])
        if service is not None:
            port = await stack.enter_async_context(forward(kube, service, _port(endpoint.url)))
            extensions = {"sni_hostname": endpoint.url.host}  # its certificate is for the Service
            base = endpoint.url.copy_with(host="127.0.0.1", port=port)
        elif why is not None:
            text = f"it cannot be reached ({trouble or why}); it may be restarting: see `lorafleet status`, try again"
            raise Unavailable("runtime", shown, text)
        client = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {endpoint.token}", "Host": endpoint.url.netloc.decode()},
            timeout=httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
            transport=_Transport(extensions),
        )
        yield Runtime(await stack.enter_async_context(client), shown, trouble)


class _Transport(httpx.AsyncHTTPTransport):
    """Adds request extensions: the name that TLS must verify, when it is not the one that is connected to."""

    def __init__(self, extensions: dict[str, Any]) -> None:
        super().__init__()
        self._extensions = extensions

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send."""
        request.extensions = {**request.extensions, **self._extensions}
        return await super().handle_async_request(request)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


async def _unreachable(url: httpx.URL) -> str | None:
    """Why no connection can be made; None when one can."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(url.host, _port(url))
    except TimeoutError:
        return f"no connection within {_CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return None


def _trouble(pool: Object) -> str:
    found = condition(pool, reasons.RUNTIME_READY)
    return "" if holds(pool, reasons.RUNTIME_READY) or not found["reason"] else f"{found['reason']}: {found['message']}"
