"""An API server in memory, behind httpx.MockTransport: objects with uid, resourceVersion, finalizers, /status, Events.

It keeps the rules that the operator relies on: 409 on a stale resourceVersion, status changed only through /status,
a deleted object with finalizers stays until they are gone. `on_call` may raise to play a crash or an outage.
"""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import httpx

from lorafleet_operator.kube.client import KubeClient

Object = dict[str, Any]

_PATH = re.compile(r"/apis/lorafleet\.dev/v1alpha1(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?(?:/(status))?$")


class FakeApi:
    """State and switches; `client()` is a KubeClient that talks to it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.events: list[Object] = []
        self.writes: list[tuple[str, str]] = []
        """Method and path of every write."""
        self.secrets: dict[tuple[str, str], dict[str, str]] = {}
        self.on_call: Callable[[str, str], None] = lambda method, path: None
        self.on_answer: Callable[[str, str], None] = lambda method, path: None
        """Like `on_call`, after the effect."""
        self.on_change: Callable[[str, str, Object], None] = lambda kind, event, obj: None
        """Kind, ADDED or MODIFIED or DELETED, object: what a watch would tell."""
        self.status_refusal: Object | None = None
        """Body of a 422 for the next status write."""
        self.lease: Object | None = None
        self._version = 100

    def client(self) -> KubeClient:
        """A client with this server behind it."""
        return KubeClient(httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(self._serve)))

    def add(self, kind: str, obj: Object) -> Object:
        """Creates an object."""
        stored = copy.deepcopy(obj)
        meta = stored["metadata"]
        self._version += 1
        meta["resourceVersion"] = str(self._version)
        self.objects[kind, meta["namespace"], meta["name"]] = stored
        self.on_change(kind, "ADDED", copy.deepcopy(stored))
        return stored

    def edit(self, kind: str, namespace: str, name: str, change: Callable[[Object], None]) -> Object:
        """What another writer does; a changed spec raises the generation."""
        obj = self.objects[kind, namespace, name]
        before = copy.deepcopy(obj.get("spec"))
        change(obj)
        if obj.get("spec") != before:
            obj["metadata"]["generation"] = obj["metadata"].get("generation", 0) + 1
        self._touch(obj)
        return obj

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """A user's delete."""
        obj = self.objects[kind, namespace, name]
        obj["metadata"]["deletionTimestamp"] = "2026-11-29T12:00:00Z"
        self._touch(obj)
        self._collect()

    def _touch(self, obj: Object) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        for (kind, _, _), stored in list(self.objects.items()):
            if stored is obj:
                self.on_change(kind, "MODIFIED", copy.deepcopy(obj))

    def _collect(self) -> None:
        for key, obj in list(self.objects.items()):
            if "deletionTimestamp" in obj["metadata"] and not obj["metadata"].get("finalizers"):
                del self.objects[key]
                self._version += 1
                gone = copy.deepcopy(obj)
                gone["metadata"]["resourceVersion"] = str(self._version)
                self.on_change(key[0], "DELETED", gone)

    def _serve(self, request: httpx.Request) -> httpx.Response:
        self.on_call(request.method, request.url.path)
        answer = self._answer(request)
        self.on_answer(request.method, request.url.path)
        return answer

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if request.method != "GET":
            self.writes.append((request.method, path))
        if path.endswith("/events"):
            self.events.append(body)
            return httpx.Response(201, json=body)
        if path.startswith("/apis/coordination.k8s.io/v1/"):
            return self._lease(request.method, body)
        secret = re.fullmatch(r"/api/v1/namespaces/([^/]+)/secrets/([^/]+)", path)
        if secret:
            data = self.secrets.get((secret[1], secret[2]))
            return _error(404, "no such secret") if data is None else httpx.Response(200, json={"data": data})
        match = _PATH.fullmatch(path)
        if match is None:
            return _error(404, path)
        namespace, kind, name, sub = match.groups()
        if name is None:
            return self._list(kind, namespace)
        obj = self.objects.get((kind, namespace, name))
        if obj is None:
            return _error(404, f"{kind} {name} not found")
        if request.method == "PATCH":
            return self._patch(obj, body, sub)
        if request.method == "DELETE":
            self.delete(kind, namespace, name)
        return httpx.Response(200, json=obj)

    def _lease(self, method: str, body: Object) -> httpx.Response:
        """The one Lease that operators take."""
        if method == "POST":
            if self.lease is not None:
                return _error(409, "already exists", "AlreadyExists")
            self.lease = copy.deepcopy(body)
        elif self.lease is None:
            return _error(404, "leases lorafleet-operator not found")
        elif method == "PATCH":
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                return _error(409, "the object has been modified", "Conflict")
            self.lease["spec"] = _merge(self.lease["spec"], body["spec"])
        if method != "GET":
            self._version += 1
            self.lease["metadata"]["resourceVersion"] = str(self._version)
        return httpx.Response(200, json=self.lease)

    def _list(self, kind: str, namespace: str | None) -> httpx.Response:
        found = [o for (k, ns, _), o in self.objects.items() if k == kind and namespace in (None, ns)]
        return httpx.Response(200, json={"metadata": {"resourceVersion": str(self._version)}, "items": found})

    def _patch(self, obj: Object, body: Object, sub: str | None) -> httpx.Response:
        sent = body.get("metadata", {})
        if "resourceVersion" in sent and sent["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            return _error(409, "the object has been modified", "Conflict")
        if sub == "status":
            if self.status_refusal is not None:
                refusal, self.status_refusal = self.status_refusal, None
                return httpx.Response(422, json=refusal)
            obj["status"] = _merge(obj.get("status") or {}, body.get("status") or {})
        else:
            finalizers = sent.get("finalizers", obj["metadata"].get("finalizers", []))
            added = set(finalizers) - set(obj["metadata"].get("finalizers", []))
            if added and "deletionTimestamp" in obj["metadata"]:
                return _error(422, "no new finalizers can be added if the object is being deleted", "Invalid")
            obj["metadata"]["finalizers"] = finalizers
        self._touch(obj)
        answer = copy.deepcopy(obj)
        self._collect()
        return httpx.Response(200, json=answer)


def _merge(target: Object, patch: Object) -> Object:
    merged = dict(target)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merge(merged.get(key) or {}, value)
        else:
            merged[key] = value
    return merged


def _error(code: int, message: str, reason: str = "") -> httpx.Response:
    return httpx.Response(code, json={"kind": "Status", "message": message, "reason": reason, "code": code})
