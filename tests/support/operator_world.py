"""Builders of what the operator observes: objects, views, listings, links. Plain data with good defaults."""

from typing import Any

from lorafleet_api.v1alpha1 import names, reasons
from lorafleet_api.v1alpha1.wire import AdapterList, AdapterView, EngineView, SlotsView, TrainerView
from lorafleet_operator.reconcile.observed import Observed, PoolLink
from lorafleet_operator.settings import Settings

UID = "11111111-2222-3333-4444-555555555555"
CREATED = "2026-11-29T12:00:00Z"
T0 = 1795953600.0
"""CREATED in Unix seconds."""
SETTINGS = Settings()

Object = dict[str, Any]


def run_object(
    *, finalizer: bool = True, deleting: bool = False, status: Object | None = None, generation: int = 1, **spec: Any
) -> Object:
    """An AdapterRun as the API server would store it."""
    metadata: Object = {
        "name": "r",
        "namespace": "team",
        "uid": UID,
        "generation": generation,
        "resourceVersion": "10",
        "creationTimestamp": CREATED,
    }
    if finalizer:
        metadata["finalizers"] = [names.FINALIZER]
    if deleting:
        metadata["deletionTimestamp"] = CREATED
    full = {"poolRef": {"name": "demo"}, "data": "d.jsonl", "rmType": "math", "suspend": False, "cancel": False} | spec
    run: Object = {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND, "metadata": metadata, "spec": full}
    if status is not None:
        run["status"] = status
    return run


def pool_object(**spec: Any) -> Object:
    """An AdapterPool with an endpoint."""
    metadata = {
        "name": "demo",
        "namespace": "team",
        "uid": "pool-uid",
        "generation": 1,
        "resourceVersion": "5",
        "creationTimestamp": CREATED,
    }
    endpoint = {"url": "http://runtime", "tokenSecretRef": {"name": "tok", "key": "token"}}
    full = {"baseModel": {"name": "m"}, "endpoint": endpoint} | spec
    return {"apiVersion": names.API_VERSION, "kind": names.POOL_KIND, "metadata": metadata, "spec": full}


def view(state: str = "ACTIVE", **fields: Any) -> AdapterView:
    """The runtime's view of the run; registered in ACTIVE unless said otherwise."""
    full: Object = {
        "uid": UID,
        "namespace": "team",
        "name": "r",
        "owner": "operator",
        "generation": 1,
        "state": state,
        "reason": reasons.TRAINING if state == "ACTIVE" else reasons.PENDING,
        "message": "",
        "registered": state == "ACTIVE",
        "target_step": 15,
        "groups_per_step": 8,
    }
    return AdapterView.model_validate(full | fields)


def listing(
    *views: AdapterView, engine: tuple[str, ...] = (), trainer: dict[int, str] | None = None, boot_epoch: int = 1
) -> AdapterList:
    """A listing with one engine."""
    return AdapterList(
        listed=True,
        boot_epoch=boot_epoch,
        revision=7,
        synced=True,
        operator_epoch=3,
        slots=SlotsView(total=2, used=1, queued=0),
        trainer=TrainerView(ready=True, slots=trainer or {}),
        engines=[EngineView(engine="e0", ready=True, adapters=list(engine), listed_at=T0)],
        adapters=list(views),
    )


def link(listed: AdapterList | None = None, *, ready: bool = True, since: float = T0) -> PoolLink:
    """A connection to the pool's runtime."""
    reason = reasons.SYNCED if ready else reasons.RUNTIME_UNREACHABLE
    return PoolLink(
        ready=ready,
        reason=reason,
        message="boot epoch 1" if ready else "no answer",
        since=since,
        boot_epoch=None if listed is None else listed.boot_epoch,
        operator_epoch=3,
        listing=listed,
    )


def seen(run: Object, listed: AdapterList | None = None, **fields: Any) -> Observed:
    """What the reconciler sees: a ready link with `listed` (empty by default) unless said otherwise."""
    full: Object = {"pool": pool_object(), "link": link(listed or listing()), "now": T0 + 100.0}
    return Observed(run=run, **(full | fields))


def held() -> tuple[str, ...]:
    """The engine's listing while it holds a version of the run."""
    return (f"{UID}@1.1.v1",)


def flags(status: Object) -> dict[str, bool]:
    """Condition type to whether it is True."""
    return {c["type"]: c["status"] == "True" for c in status["conditions"]}


def condition(status: Object, kind: str) -> Object:
    """The condition of that type."""
    return next(c for c in status["conditions"] if c["type"] == kind)
