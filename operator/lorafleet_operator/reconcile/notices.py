"""Events: one per transition of a condition, never per step. Pure."""

from typing import Any

from lorafleet_api.v1alpha1 import reasons
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.observed import Observed
from lorafleet_operator.reconcile.plan import Notice


def notices_of(seen: Observed, status: dict[str, Any]) -> tuple[Notice, ...]:
    """What the change from the stored to the desired status is worth telling."""
    old = seen.status
    notices = []
    for kind in (reasons.SUSPENDED, reasons.COMPLETE, reasons.FAILED, reasons.DEREGISTERED):
        if conditions.is_true(status, kind) and not conditions.is_true(old, kind):
            notices.append(_ended(kind, conditions.find(status, kind) or {}, status))
    ended = conditions.is_true(status, reasons.FINISHED) and not conditions.is_true(old, reasons.FINISHED)
    if ended and not any(conditions.is_true(status, kind) for kind in (reasons.COMPLETE, reasons.FAILED)):
        notices.append(Notice("Normal", reasons.CANCELLED, f"stopped at step {status.get('step', 0)}"))
    notices.extend(_registration(old, status))
    return tuple(notices)


def _ended(kind: str, condition: dict[str, Any], status: dict[str, Any]) -> Notice:
    message = condition.get("message") or condition.get("reason", "")
    if kind == reasons.FAILED:
        return Notice("Warning", condition["reason"], message)
    if kind == reasons.COMPLETE:
        artifact = status.get("artifact", {}).get("path")
        return Notice("Normal", reasons.COMPLETED, message + (f"; artifact {artifact}" if artifact else ""))
    if kind == reasons.DEREGISTERED and condition["reason"] == reasons.FORCE_RELEASED:
        return Notice("Warning", reasons.FORCE_RELEASED, message)
    return Notice("Normal", kind, message)


def _registration(old: dict[str, Any], status: dict[str, Any]) -> list[Notice]:
    before, after = conditions.find(old, reasons.REGISTERED), conditions.find(status, reasons.REGISTERED)
    if after is None:
        return []
    if after["status"] == "True":
        if before is not None and before["status"] == "True":
            return []
        if "startTime" in old:
            return [Notice("Normal", reasons.RESUMED, f"registered again at step {status.get('step', 0)}")]
        text = f"slot {status.get('slot')}, target step {status.get('targetStep')}"
        return [Notice("Normal", reasons.REGISTERED, text)]
    changed = before is None or before["reason"] != after["reason"]
    if changed and after["reason"] == reasons.RUNTIME_LOST:
        return [Notice("Warning", reasons.RUNTIME_LOST, after["message"])]
    if changed and after["reason"] == reasons.SLOTS_EXHAUSTED:
        return [Notice("Normal", reasons.SLOTS_EXHAUSTED, after["message"])]
    return []
