"""The /v1 routes: what the operator calls. docs/interfaces.md section 3 is their contract."""

import re
import time
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lorafleet_api.v1alpha1.wire import (
    OPERATOR_EPOCH_HEADER,
    AdapterList,
    AdapterView,
    PoolView,
    PresenceView,
    PutAdapter,
    PutPool,
)
from lorafleet_runtime import __version__
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.registry.registry import Registry

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_SEGMENT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LONGEST_POLL_SECONDS = 60.0

Epoch = Annotated[int | None, Header(alias=OPERATOR_EPOCH_HEADER)]


def v1_router(view: FleetView) -> APIRouter:
    """The routes over one registry."""
    router = APIRouter(prefix="/v1")
    _pool_routes(router, view)
    _adapter_routes(router, view)
    return router


def _pool_routes(router: APIRouter, view: FleetView) -> None:
    registry = view.registry

    @router.put("/pool", response_model_exclude_none=True)
    async def put_pool(body: PutPool) -> PoolView:
        """The operator's full list of runs; ends SYNCING."""
        view.fence(body.operator_epoch)
        registry.sync(body.uids, body.namespaces)
        return _pool_view(view)

    @router.get("/pool", response_model_exclude_none=True)
    async def get_pool() -> PoolView:
        """The pool as this runtime was started."""
        return _pool_view(view)


def _pool_view(view: FleetView) -> PoolView:
    registry = view.registry
    return PoolView(
        boot_epoch=registry.boot_epoch,
        revision=registry.revision,
        synced=registry.synced,
        operator_epoch=registry.operator_epoch,
        spec=registry.pool.to_wire(),
        slots=registry.slots(),
        engines=registry.engine_views(),
        versions={"lorafleet": __version__},
        operator_silent_seconds=time.monotonic() - view.heard,
    )


def _adapter_routes(router: APIRouter, view: FleetView) -> None:
    registry = view.registry

    @router.put("/adapters/{uid}", response_model_exclude_none=True)
    async def put_adapter(uid: str, body: PutAdapter) -> AdapterView:
        """Make a run known, or apply a newer generation of its spec."""
        _check_names(uid, body.namespace, body.name)
        view.fence(body.operator_epoch)
        _check_owner(registry, uid)
        registry.put(
            uid,
            body.spec,
            namespace=body.namespace,
            name=body.name,
            generation=body.generation,
            created=body.creation_timestamp,
            priority=body.priority,
            start_time=body.start_time,
        )
        return registry.view(uid)

    @router.delete("/adapters/{uid}", response_model=None)
    async def delete_adapter(uid: str, epoch: Epoch = None) -> JSONResponse:
        """Take a run away; 202 while anything of it is left, or while nobody has told yet what is held."""
        if epoch is not None:
            view.fence(epoch)
        _check_owner(registry, uid)
        forgotten = registry.delete(uid)
        gone = forgotten and registry.listed and registry.presence(uid) == PresenceView()
        return JSONResponse({"gone": gone}, status_code=200 if gone else 202)

    @router.get("/adapters", response_model_exclude_none=True)
    async def list_adapters(
        after: Annotated[str | None, Query(pattern=r"^\d+,\d+$")] = None,
        timeout: Annotated[float, Query(ge=0, le=_LONGEST_POLL_SECONDS)] = 30.0,
        epoch: Epoch = None,
    ) -> AdapterList:
        """Every run; with `after`, waits until something changed since that boot epoch and revision."""
        if epoch is not None:
            view.fence(epoch)
        deadline = time.monotonic() + timeout
        while after == f"{registry.boot_epoch},{registry.revision}":
            left = deadline - time.monotonic()
            if left <= 0 or not await view.signal.wait(left):
                break
        if epoch is not None:
            view.fence(epoch)  # a newer operator may have spoken during the wait
        return registry.listing()

    @router.get("/adapters/{uid}", response_model_exclude_none=True)
    async def get_adapter(uid: str) -> AdapterView:
        """One run."""
        if uid not in registry.runs:
            raise HTTPException(404, f"uid: {uid} is not known here")
        return registry.view(uid)


def _check_owner(registry: Registry, uid: str) -> None:
    run = registry.runs.get(uid)
    if run is not None and run.owner != "operator":
        text = f"uid: {uid} is the run {run.name!r} made through /adapter_runs; only DELETE /adapter_runs/NAME ends it"
        raise HTTPException(409, text)


def _check_names(uid: str, namespace: str, name: str) -> None:
    for field, value, pattern in (("uid", uid, _UID), ("namespace", namespace, _SEGMENT), ("name", name, _SEGMENT)):
        if not pattern.fullmatch(value):
            raise HTTPException(422, f"{field}: {value!r} is no Kubernetes name; use lower-case letters, digits, '-'")
