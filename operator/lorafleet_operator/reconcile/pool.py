"""The status of one AdapterPool, from its spec and the connection to its runtime. Pure."""

from typing import Any

from pydantic import ValidationError

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.conditions import Wanted
from lorafleet_operator.reconcile.observed import Object, PoolLink

NOT_COMPARED = frozenset({"endpoint", "env", "secretRefs", "allowedNamespaces", "suspend", "idleTimeoutSeconds", "ray"})
"""Pool fields that are the operator's business or that the runtime does not report."""


def pool_status(pool: Object, link: PoolLink | None, now: float) -> dict[str, Any]:
    """The whole desired status in wire form; operatorEpoch is carried over, `pool.connection` raises it."""
    old = pool.get("status") or {}
    generation = int(pool["metadata"].get("generation", 0))
    out: dict[str, Any] = {key: old[key] for key in ("slots", "bootEpoch", "operatorEpoch", "versions") if key in old}
    if link is not None and link.listing is not None:
        out["slots"] = link.listing.slots.to_wire()
        out["bootEpoch"] = link.listing.boot_epoch
        if link.versions:
            out["versions"] = dict(link.versions)
    if link is not None and link.operator_epoch is not None:
        out["operatorEpoch"] = max(link.operator_epoch, int(old.get("operatorEpoch", 0)))
    out["conditions"] = conditions.merge(old, _conditions(pool, link), generation, now)
    out["observedGeneration"] = generation
    return out


def _conditions(pool: Object, link: PoolLink | None) -> list[Wanted]:
    endpoint = (pool.get("spec") or {}).get("endpoint")
    if endpoint is None:
        message = "making RayClusters is not available in this version; set spec.endpoint to adopt a running runtime"
        reason = reasons.CLUSTER_UNSUPPORTED
        return [
            Wanted(reasons.READY, False, reason, message),
            Wanted(reasons.CLUSTER_READY, False, reason, message),
            Wanted(reasons.RUNTIME_READY, False, reason, message),
        ]
    adopted = Wanted(reasons.CLUSTER_READY, True, reasons.ADOPTED, f"adopts the runtime at {endpoint['url']}")
    if link is None:
        connecting = "connecting"
        return [
            Wanted(reasons.READY, False, reasons.SYNCING, connecting),
            adopted,
            Wanted(reasons.RUNTIME_READY, False, reasons.SYNCING, connecting),
        ]
    runtime = Wanted(reasons.RUNTIME_READY, link.ready, link.reason, link.message)
    if link.ready and link.mismatch:
        message = f"the runtime was started with other values of {', '.join(link.mismatch)}; the runtime's hold"
        return [Wanted(reasons.READY, False, reasons.CONFIG_MISMATCH, message), adopted, runtime]
    return [Wanted(reasons.READY, link.ready, link.reason, link.message), adopted, runtime]


def config_mismatch(pool_spec: Object, runtime_spec: Object) -> tuple[str, ...]:
    """Dotted names of fields that the pool's author wrote and that the runtime was started with otherwise.

    Fields that the author left out are the runtime's to choose.
    """
    try:
        full = AdapterPoolSpec.model_validate(runtime_spec).to_wire()
    except ValidationError:
        full = runtime_spec
    written = {key: value for key, value in pool_spec.items() if key not in NOT_COMPARED}
    return tuple(_differences(written, full, ""))


def _differences(written: Object, actual: Object, prefix: str) -> list[str]:
    found = []
    for key, value in sorted(written.items()):
        other = actual.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            found += _differences(value, other, f"{prefix}{key}.")
        elif value != other and value not in ({}, [], None):
            found.append(prefix + key)
    return found
