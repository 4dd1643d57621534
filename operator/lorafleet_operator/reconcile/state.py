"""Which row of the state table a run is in. Pure; `run.plan_run` turns the row into conditions and calls.

deleted? ─▶ Deleting
finished before? ─▶ latched: Complete, Failed or Cancelled
runtime's outcome ─▶ Complete, Failed, Cancelled, Suspended
pool missing, not allowed, spec refused, deadline passed ─▶ Failed (or Waiting, within a grace)
runtime silent or new ─▶ Waiting or Lost
else by the runtime's state ─▶ Waiting, Training, Stopping
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.status import REASON_PATTERN
from lorafleet_api.v1alpha1.wire import AdapterView
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.observed import Observed
from lorafleet_operator.settings import Settings


class Row(StrEnum):
    """Rows of the state table."""

    WAITING = "Waiting"
    """Not registered: queued, loading, or the pool is not ready."""
    TRAINING = "Training"
    """Registered, as the spec asks."""
    STOPPING = "Stopping"
    """On the way to suspended or cancelled."""
    STUCK = "Stuck"
    """Registered under an older spec; the runtime refused the edited one."""
    LOST = "Lost"
    """Was registered; the runtime went away and the run resumes when it is back."""
    SUSPENDED = "Suspended"
    """Gave its slot back."""
    COMPLETE = "Complete"
    """Reached its target."""
    FAILED = "Failed"
    """Ended before its target."""
    CANCELLED = "Cancelled"
    """Stopped for good by the user."""
    DELETING = "Deleting"
    """The object is being deleted."""


FINISHED_ROWS = frozenset({Row.COMPLETE, Row.FAILED, Row.CANCELLED})


@dataclass(frozen=True, slots=True)
class State:
    """A row, and the reason and message that go with it."""

    row: Row
    reason: str
    message: str
    again_in: float | None = None
    """Seconds until the clock alone may change the row."""
    registered: bool = False
    """Status of the Registered condition."""


def state_of(seen: Observed, settings: Settings) -> State:
    """The row that a run is in now."""
    if seen.deleting:
        return State(Row.DELETING, reasons.DELETED, "the object is being deleted; waiting until nobody holds the run")
    latched = _latched(seen)
    if latched is not None:
        return latched
    view = seen.view
    if view is not None and seen.link is not None and seen.link.ready:
        ended = _outcome(seen, view)
        if ended is not None:
            return ended
    return _overdue(seen, settings) or _by_pool(seen, settings)


def _latched(seen: Observed) -> State | None:
    if not conditions.is_true(seen.status, reasons.FINISHED):
        return None
    ends = ((reasons.COMPLETE, Row.COMPLETE), (reasons.FAILED, Row.FAILED), (reasons.FINISHED, Row.CANCELLED))
    for kind, row in ends:
        condition = conditions.find(seen.status, kind)
        if condition is not None and condition["status"] == "True":
            return State(row, condition["reason"], condition["message"])
    return None


def _outcome(seen: Observed, view: AdapterView) -> State | None:
    """An end that the runtime has decided; it stands whatever the pool or the spec say by now."""
    if view.outcome == "Complete":
        return State(Row.COMPLETE, reasons.COMPLETED, view.message or f"{view.step} of {view.target_step} steps done")
    if view.outcome == "Failed":
        reason = view.reason if view.reason in reasons.FAILURE_REASONS else reasons.FAILED
        prefix = "" if reason == view.reason else f"{view.reason}: "
        return State(Row.FAILED, reason, prefix + view.message)
    if view.outcome == "Cancelled":
        return State(Row.CANCELLED, reasons.CANCELLED, view.message or "spec.cancel was set")
    if view.outcome == "Suspended" and view.state == "SUSPENDED" and seen.run["spec"].get("suspend"):
        return State(Row.SUSPENDED, reasons.SUSPENDED_REASON, view.message or "spec.suspend is true")
    return None


def _overdue(seen: Observed, settings: Settings) -> State | None:
    """Deadlines, in case the runtime that should enforce them is away or was never reached."""
    spec = seen.run["spec"]
    started = start_seconds(seen)
    if started is None:
        limit = spec.get("registrationDeadlineSeconds")
        since = conditions.unix_seconds(seen.run["metadata"]["creationTimestamp"])
        field, what = "registrationDeadlineSeconds", "not registered within"
    else:
        limit, since = spec.get("activeDeadlineSeconds"), started
        field, what = "activeDeadlineSeconds", "not complete within"
    if limit is None or seen.now < since + limit + settings.deadline_grace_seconds:
        return None
    return State(Row.FAILED, reasons.DEADLINE_EXCEEDED, f"{field}: {what} {limit} s; raise it")


def next_deadline(seen: Observed, settings: Settings) -> float | None:
    """Seconds until a deadline of the spec would pass, or None."""
    spec = seen.run["spec"]
    started = start_seconds(seen)
    limit = spec.get("registrationDeadlineSeconds" if started is None else "activeDeadlineSeconds")
    if limit is None:
        return None
    since = conditions.unix_seconds(seen.run["metadata"]["creationTimestamp"]) if started is None else started
    return max(since + float(limit) + settings.deadline_grace_seconds - seen.now, 0.0) + 0.05


def start_seconds(seen: Observed) -> float | None:
    """Unix time of the first registration; latches."""
    if "startTime" in seen.status:
        return conditions.unix_seconds(seen.status["startTime"])
    view = seen.view
    if view is None:
        return None
    return view.start_time if view.start_time is not None else (seen.now if view.registered else None)


def _by_pool(seen: Observed, settings: Settings) -> State:
    pool, link = seen.pool, seen.link
    ref = seen.run["spec"]["poolRef"]
    if pool is None:
        return _without_pool(seen, settings)
    owner, user = pool["metadata"]["namespace"], seen.run["metadata"]["namespace"]
    allowed = (pool.get("spec") or {}).get("allowedNamespaces") or []
    if owner != user and user not in allowed:
        return State(
            Row.FAILED,
            reasons.POOL_NOT_ALLOWED,
            f"poolRef: {owner}/{ref['name']} does not allow namespace {user!r}; add it to the pool's allowedNamespaces",
        )
    if link is None or not link.ready:
        return _without_runtime(seen, settings)
    refusal = seen.refusal
    if refusal is not None and refusal.generation == seen.generation:
        if seen.view is None:
            return State(Row.FAILED, refusal.reason, refusal.message)
        if seen.view.registered:
            return State(Row.STUCK, refusal.reason, f"the edited spec was refused: {refusal.message}", registered=True)
    return _by_view(seen, seen.view)


def _without_pool(seen: Observed, settings: Settings) -> State:
    ref = seen.run["spec"]["poolRef"]
    namespace = ref.get("namespace") or seen.run["metadata"]["namespace"]
    message = (
        f"poolRef: no AdapterPool {ref['name']!r} in namespace {namespace!r}; create it, or apply the run anew with the"
        " right name and namespace"
    )
    if seen.run["spec"].get("cancel"):
        return State(Row.CANCELLED, reasons.CANCELLED, "spec.cancel was set")
    if start_seconds(seen) is not None:
        return State(Row.LOST, reasons.POOL_NOT_FOUND, message)
    created = conditions.unix_seconds(seen.run["metadata"]["creationTimestamp"])
    left = created + settings.pool_grace_seconds - seen.now
    if left > 0:
        return State(Row.WAITING, reasons.POOL_NOT_FOUND, message, again_in=left + 0.05)
    return State(Row.FAILED, reasons.POOL_NOT_FOUND, message)


def _without_runtime(seen: Observed, settings: Settings) -> State:
    link = seen.link
    message = link.message if link is not None else "the pool's runtime is being connected to"
    if seen.pool is not None and not (seen.pool.get("spec") or {}).get("endpoint"):
        message = "the pool has no endpoint, and making RayClusters is not available in this version"
    if seen.run["spec"].get("suspend") and conditions.is_true(seen.status, reasons.SUSPENDED):
        return State(Row.SUSPENDED, reasons.SUSPENDED_REASON, "spec.suspend is true")
    if start_seconds(seen) is None:
        return State(Row.WAITING, reasons.POOL_NOT_READY, message)
    left = 0.0
    if link is not None:
        left = link.since + settings.lost_grace_seconds - seen.now
    if left > 0 and conditions.is_true(seen.status, reasons.REGISTERED):
        kept = conditions.find(seen.status, reasons.READY) or {}
        row = Row.TRAINING if kept.get("status") == "True" else Row.STOPPING
        return State(row, kept.get("reason", reasons.TRAINING), kept.get("message", ""), left + 0.05, registered=True)
    return State(Row.LOST, reasons.RUNTIME_LOST, f"{message}; the run resumes from its last step")


def _by_view(seen: Observed, view: AdapterView | None) -> State:
    resuming = _lost_registration(seen)
    if view is None or view.outcome == "Deleted":
        if resuming:
            return State(Row.LOST, reasons.RUNTIME_LOST, "the runtime restarted; resuming from the last step")
        return State(Row.WAITING, reasons.PENDING, "being handed to the runtime")
    message = _queue_message(view)
    spec = seen.run["spec"]
    wants_stop = bool(spec.get("suspend") or spec.get("cancel"))
    if view.registered:
        if view.skipped_rows:
            message += f"; {view.skipped_rows} rows of {spec['data']!r} are skipped, their prompts are too long"
        reason = clean_reason(view.reason, reasons.TRAINING)
        if wants_stop and view.state == "ACTIVE":
            reason = reasons.SAVING
        return State(Row.STOPPING if wants_stop else Row.TRAINING, reason, message, registered=True)
    if wants_stop and view.state in ("RETIRING", "CLEANUP"):
        return State(Row.STOPPING, clean_reason(view.reason, reasons.DEREGISTERING), message)
    if resuming and view.reason != reasons.SLOTS_EXHAUSTED:
        text = f"resuming from the last step: {view.reason} {message}".strip()
        return State(Row.LOST, reasons.RUNTIME_LOST, text)
    if view.state == "SUSPENDED":
        return State(Row.WAITING, reasons.PENDING, "resuming")
    return State(Row.WAITING, clean_reason(view.reason, reasons.PENDING), message)


def _lost_registration(seen: Observed) -> bool:
    """The run was registered in an older boot epoch, and is not (yet) again in this one."""
    registered = conditions.find(seen.status, reasons.REGISTERED)
    if registered is None or seen.link is None or "bootEpoch" not in seen.status:
        return False
    was = registered["status"] == "True" or registered["reason"] == reasons.RUNTIME_LOST
    return was and bool(seen.status["bootEpoch"] != seen.link.boot_epoch)


def _queue_message(view: AdapterView) -> str:
    if view.queue_position is None:
        return view.message
    return f"position {view.queue_position} in the queue" if not view.message else view.message


def clean_reason(reason: str, fallback: str) -> str:
    """The runtime's reason where the CRD would accept it, else the fallback."""
    return reason if re.fullmatch(REASON_PATTERN, reason) and len(reason) <= 64 else fallback
