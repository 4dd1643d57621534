"""A small async client of the API server: get, list, merge patch, delete, Events, Secrets.

Callers: the status writer, the controller and the pool connections. It knows paths and errors, no policy: no retries,
no caching. Watches are kopf's.
"""

import base64
import json
import logging
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from lorafleet_api.v1alpha1 import names
from lorafleet_operator.errors import ApiRefused, ApiUnavailable, Conflict, Invalid, NotFound
from lorafleet_operator.kube.access import ApiAccess

logger = logging.getLogger(__name__)

Object = dict[str, Any]

TIMEOUT = httpx.Timeout(30.0, connect=5.0)
PAGE = 500


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind at one moment."""

    items: list[Object]
    version: int
    """resourceVersion of the list."""


class BearerToken(httpx.Auth):
    """Sends the token of the moment, since projected tokens rotate."""

    def __init__(self, access: ApiAccess) -> None:
        self._access = access

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Adds the Authorization header."""
        token = self._access.token
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        yield request


class KubeClient:
    """Calls the API server.

    Args:
        http: client with base_url and credentials; `open_client` makes it, tests pass one with a MockTransport.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.last_success: float | None = None
        """Unix time of the last answer that was no error of the server."""
        self.may_write: Callable[[], None] = lambda: None
        """Asked before every write of an object or Event; raises ApiUnavailable where this process must not write."""

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def ping(self, namespace: str | None) -> None:
        """A cheap request that shows whether the API server answers."""
        await self.call("GET", _path(names.POOL_PLURAL, namespace, None), params={"limit": 1})

    async def get(self, plural: str, namespace: str, name: str) -> Object:
        """Reads one object.

        Raises:
            NotFound, ApiRefused, ApiUnavailable: see errors.
        """
        return await self.call("GET", _path(plural, namespace, name))

    async def list(self, plural: str, namespace: str | None) -> Listing:
        """Reads every object of a kind, of one namespace or (None) of all, page by page."""
        items: list[Object] = []
        proceed, version = "", 0
        while True:
            params: dict[str, Any] = {"limit": PAGE} | ({"continue": proceed} if proceed else {})
            answer = await self.call("GET", _path(plural, namespace, None), params=params)
            items.extend(answer.get("items") or [])
            meta = answer.get("metadata") or {}
            version = version or int(meta.get("resourceVersion") or 0)
            proceed = meta.get("continue") or ""
            if not proceed:
                return Listing(items, version)

    async def patch(self, plural: str, namespace: str, name: str, body: Object, *, subresource: str = "") -> Object:
        """Applies a JSON merge patch; put metadata.resourceVersion into it to guard against lost updates.

        Raises:
            Conflict: the object changed since that resourceVersion.
            Invalid: the schema or a CEL rule refuses the outcome.
        """
        self.may_write()
        path = _path(plural, namespace, name) + (f"/{subresource}" if subresource else "")
        headers = {"Content-Type": "application/merge-patch+json"}
        params = {"fieldManager": names.FIELD_MANAGER}
        return await self.call("PATCH", path, body=body, headers=headers, params=params)

    async def delete(self, plural: str, namespace: str, name: str, uid: str) -> None:
        """Deletes this very object (by uid); one that is gone is fine."""
        self.may_write()
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.call("DELETE", _path(plural, namespace, name), body=body)
        except (NotFound, Conflict):
            return

    async def secret_value(self, namespace: str, name: str, key: str) -> str:
        """One value of a Secret, decoded.

        Raises:
            NotFound: no such Secret, or no such key in it.
        """
        secret = await self.call("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        data = secret.get("data") or {}
        if key not in data:
            raise NotFound(404, f"Secret {namespace}/{name} has no key {key!r}; it has {sorted(data)}")
        return base64.b64decode(data[key]).decode("utf-8").strip()

    async def create_event(self, about: Object, kind: str, reason: str, message: str) -> None:
        """Records a core/v1 Event about an object.

        Args:
            about: the object; the Event goes into its namespace.
            kind: Normal or Warning.
            reason: CamelCase.
            message: for people; cut at 1024 characters.
        """
        self.may_write()
        meta = about["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        stem = meta["name"][:200].rstrip(".-")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{stem}.{uuid.uuid4().hex[:16]}", "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": about.get("kind", names.RUN_KIND),
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": names.FIELD_MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.call("POST", f"/api/v1/namespaces/{meta['namespace']}/events", body=event)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        params: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Object:
        """One request as it is; does not ask `may_write`.

        Raises:
            ApiRefused, ApiUnavailable, Conflict: see errors.
        """
        content = None if body is None else json.dumps(body).encode("utf-8")
        sent = {"Accept": "application/json", "Content-Type": "application/json"} | (headers or {})
        try:
            answer = await self._http.request(method, path, content=content, params=params, headers=sent)
        except httpx.HTTPError as error:
            raise ApiUnavailable(f"{method} {path}: {type(error).__name__} {error}") from error
        _raise_for(answer, f"{method} {path}")
        decoded = _decoded(answer, f"{method} {path}")
        self.last_success = datetime.now(UTC).timestamp()
        return decoded


def open_client(access: ApiAccess) -> KubeClient:
    """A client for a real API server."""
    auth = BearerToken(access)
    context = access.ssl_context()
    return KubeClient(
        httpx.AsyncClient(base_url=access.server, verify=context, auth=auth, timeout=TIMEOUT, trust_env=False)
    )


def _path(plural: str, namespace: str | None, name: str | None) -> str:
    path = f"/apis/{names.API_VERSION}"
    if namespace is not None:
        path += f"/namespaces/{namespace}"
    path += f"/{plural}"
    return path if name is None else f"{path}/{name}"


def _decoded(answer: httpx.Response, what: str) -> Object:
    """The JSON object of a good answer; a proxy in between may have put something else there."""
    try:
        decoded = answer.json()
    except ValueError as error:
        raise ApiUnavailable(f"{what}: {answer.status_code}, but no JSON: {answer.text[:100]!r}") from error
    if not isinstance(decoded, dict):
        raise ApiUnavailable(f"{what}: {answer.status_code}, but no JSON object: {answer.text[:100]!r}")
    return decoded


def _raise_for(answer: httpx.Response, what: str) -> None:
    if answer.is_success:
        return
    try:
        status = answer.json()
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    message = f"{what}: {status.get('message') or answer.text[:300]}"
    code = answer.status_code
    if code == 429 or code >= 500:
        raise ApiUnavailable(message)
    if code == 404:
        raise NotFound(code, message)
    if code == 409:
        raise Conflict(message)
    causes = tuple(
        f"{cause.get('field', '')}: {cause.get('message', '')}"
        for cause in (status.get("details") or {}).get("causes") or []
    )
    raise (Invalid if code == 422 else ApiRefused)(code, message, causes)
