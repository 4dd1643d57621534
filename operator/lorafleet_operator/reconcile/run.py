"""The plan for one AdapterRun: (object, pool, what the runtime says, clock) in; calls, status and Events out. Pure.

One level-triggered function for every situation. Suspend, cancel and numStep need no step of their own: they travel to
the runtime as a new generation of the spec. A run is released (finalizer off) only when the trainer's and every
engine's own listing shows nothing of it, the pool is gone, or the user forces it.
"""

from dataclasses import dataclass
from typing import Any

from lorafleet_api.v1alpha1 import names, reasons
from lorafleet_api.v1alpha1.status import MAX_MESSAGE
from lorafleet_api.v1alpha1.wire import AdapterView, PutAdapter
from lorafleet_operator.reconcile import conditions, progress
from lorafleet_operator.reconcile.conditions import Wanted
from lorafleet_operator.reconcile.notices import notices_of
from lorafleet_operator.reconcile.observed import Observed
from lorafleet_operator.reconcile.plan import Notice, Plan
from lorafleet_operator.reconcile.state import FINISHED_ROWS, Row, State, next_deadline, state_of
from lorafleet_operator.settings import Settings

AFTER_A_FAILURE = "this object will not train again: delete it, then apply it corrected"
"""What the user does next, whatever the failure; the Failed condition has the cause alone."""

RETRY_DELETE_SECONDS = 5.0
"""A runtime that did not deregister a run yet is asked again this often."""


@dataclass(frozen=True, slots=True)
class Release:
    """Whether the run is deregistered, and on what evidence."""

    done: bool
    reason: str
    message: str


def plan_run(seen: Observed, settings: Settings) -> Plan:
    """Decides what to do for a run now."""
    if seen.deleting and not seen.has_finalizer:
        return Plan()
    state = state_of(seen, settings)
    release = release_of(seen, state)
    status = status_of(seen, state, release)
    notices = notices_of(seen, status)
    if seen.deleting:
        return _plan_deletion(seen, release, status, notices)
    if conditions.is_true(seen.status, reasons.FINISHED):
        return _plan_finished(seen, status, notices)
    put = _put(seen, state)
    waits = [seconds for seconds in (state.again_in, next_deadline(seen, settings)) if seconds is not None]
    return Plan(
        add_finalizer=put is not None and not seen.has_finalizer,
        status=status,
        put=put if seen.has_finalizer else None,
        notices=notices,
        again_in=0.0 if state.row in FINISHED_ROWS else min(waits, default=None),
    )


def _plan_deletion(seen: Observed, release: Release, status: dict[str, Any], notices: tuple[Notice, ...]) -> Plan:
    ask = seen.link is not None and seen.link.ready and not release.done
    if release.done:
        step = f"step {status.get('step', 0)}" + (f" of {status['targetStep']}" if "targetStep" in status else "")
        meta = seen.run["metadata"]
        where = f", artifact {status['artifact']['path']}" if "artifact" in status else ""
        text = f"AdapterRun {meta['namespace']}/{meta['name']} ({meta['uid']}) deregistered at {step}{where}"
        notices = (*notices, Notice("Normal", reasons.DEREGISTERED, text, on_pool=True))
    return Plan(
        status=status,
        delete=ask,
        notices=notices,
        remove_finalizer=release.done,
        again_in=None if release.done else RETRY_DELETE_SECONDS,
    )


def _plan_finished(seen: Observed, status: dict[str, Any], notices: tuple[Notice, ...]) -> Plan:
    """The end is in the stored status: never PUT again; have the runtime let go, then forget, then tidy the object."""
    released = conditions.is_true(seen.status, reasons.DEREGISTERED)
    view = seen.view
    reachable = seen.link is not None and seen.link.ready
    stray = view is None and bool(seen.holders)
    alive = view is not None and view.outcome in (None, "Suspended", "Deleted")
    ask = reachable and (stray or alive or (released and view is not None))
    ttl, overdue = seen.run["spec"].get("ttlSecondsAfterFinished"), None
    if released and ttl is not None and "completionTime" in seen.status:
        overdue = conditions.unix_seconds(seen.status["completionTime"]) + ttl - seen.now
    again = RETRY_DELETE_SECONDS if ask or not released else None
    if overdue is not None and overdue > 0:
        again = min(overdue + 0.05, again or overdue + 0.05)
    return Plan(
        status=status,
        delete=ask,
        notices=notices,
        remove_finalizer=released and seen.has_finalizer,
        delete_object=overdue is not None and overdue <= 0,
        again_in=again,
    )


def _put(seen: Observed, state: State) -> PutAdapter | None:
    """What the runtime must be told, or None when it knows, may not know, or need not know."""
    link, pool = seen.link, seen.pool
    if state.row in FINISHED_ROWS or pool is None or link is None or not link.ready or link.operator_epoch is None:
        return None
    if seen.refusal is not None and seen.refusal.generation == seen.generation:
        return None
    view = seen.view
    if view is not None and view.generation == seen.generation:
        return None
    spec, meta = seen.run["spec"], seen.run["metadata"]
    started = seen.status.get("startTime")
    return PutAdapter(
        namespace=meta["namespace"],
        name=meta["name"],
        spec=spec,
        generation=seen.generation,
        operator_epoch=link.operator_epoch,
        creation_timestamp=conditions.unix_seconds(meta["creationTimestamp"]),
        priority=int((spec.get("scheduling") or {}).get("priority", 0)),
        start_time=None if started is None else conditions.unix_seconds(started),
    )


def release_of(seen: Observed, state: State) -> Release:
    """Whether nobody holds the run any more. Only listings are believed, never the answer to a DELETE."""
    finished = state.row in FINISHED_ROWS
    if not finished and not seen.deleting:
        return _not_asked_for(state)
    if conditions.is_true(seen.status, reasons.DEREGISTERED):
        kept = conditions.find(seen.status, reasons.DEREGISTERED) or {}
        return Release(True, kept["reason"], kept["message"])
    if seen.deleting and (seen.run["metadata"].get("annotations") or {}).get(names.FORCE_RELEASE) == "true":
        return Release(True, reasons.FORCE_RELEASED, "force-release: the runtime was not asked whether it let go")
    if not seen.has_finalizer:
        return Release(True, reasons.VERIFIED, "the run was never sent to a runtime")
    link = seen.link
    if seen.pool is None and (link is None or not link.ready):
        return Release(True, reasons.POOL_GONE, "the pool does not exist any more")
    if link is None or not link.ready or link.listing is None:
        why = link.message if link is not None else "no connection to the pool's runtime"
        return Release(False, reasons.DEREGISTERING, f"cannot be verified: {why}")
    if not link.listing.listed:
        return Release(False, reasons.DEREGISTERING, "the trainer and the engines have not told yet what they hold")
    holders, view = seen.holders, seen.view
    if holders:
        lied = " although a DELETE was answered with success" if seen.delete_confirmed else ""
        return Release(False, reasons.DEREGISTERING, f"still listed by {', '.join(holders)}{lied}")
    if seen.deleting and not seen.delete_confirmed:
        return Release(False, reasons.DEREGISTERING, "the runtime was asked to let go")
    if seen.deleting and view is not None:
        return Release(False, reasons.DEREGISTERING, f"the runtime still has it as {view.state}")
    if view is not None and not _let_go(view):
        return Release(False, reasons.DEREGISTERING, view.message or f"the runtime has it as {view.state}")
    return Release(True, reasons.VERIFIED, "neither the trainer nor any engine lists the run")


def _let_go(view: AdapterView) -> bool:
    """The runtime itself says that it is through with the run."""
    return view.state in ("COMPLETED", "FAILED") and not view.presence.trainer and not view.presence.engines


def _not_asked_for(state: State) -> Release:
    if state.row in (Row.TRAINING, Row.STUCK, Row.STOPPING):
        return Release(False, reasons.IN_USE, "the run is registered")
    return Release(False, reasons.NOT_FINISHED, "the run has not ended")


def status_of(seen: Observed, state: State, release: Release) -> dict[str, Any]:
    """The whole desired status in wire form."""
    out = progress.fields(seen, state)
    if release.done:
        out.pop("slot", None)
    wanted = [*_table(seen, state), Wanted(reasons.DEREGISTERED, release.done, release.reason, release.message)]
    out["conditions"] = conditions.merge(seen.status, wanted, seen.generation, seen.now)
    out["observedGeneration"] = seen.generation
    return out


def _table(seen: Observed, state: State) -> list[Wanted]:
    """The state table: every condition but Deregistered."""
    row, reason, message = state.row, state.reason, state.message
    ready = row in (Row.TRAINING, Row.SUSPENDED, Row.COMPLETE, Row.CANCELLED)
    stalled = row in (Row.FAILED, Row.STUCK)
    settled = ready or stalled
    if row is Row.FAILED:
        message = f"{message[: MAX_MESSAGE - len(AFTER_A_FAILURE) - 2]}; {AFTER_A_FAILURE}"
    registered_reason = reasons.TRAINING if state.registered else reasons.FAILED if row is Row.FAILED else reason
    return [
        Wanted(reasons.REGISTERED, state.registered, registered_reason, message),
        Wanted(reasons.READY, ready, reason, message),
        Wanted(reasons.RECONCILING, not settled, reasons.SETTLED if settled else reason, message),
        Wanted(reasons.STALLED, stalled, reason if stalled else reasons.SETTLED, message if stalled else ""),
        *(_latching(seen, state, kind) for kind in _ENDS),
    ]


_ENDS = {
    reasons.SUSPENDED: (frozenset({Row.SUSPENDED}), reasons.NOT_SUSPENDED),
    reasons.COMPLETE: (frozenset({Row.COMPLETE}), reasons.NOT_FINISHED),
    reasons.FAILED: (frozenset({Row.FAILED}), reasons.NOT_FAILED),
    reasons.FINISHED: (FINISHED_ROWS, reasons.NOT_FINISHED),
}


def _latching(seen: Observed, state: State, kind: str) -> Wanted:
    rows, otherwise = _ENDS[kind]
    old = conditions.find(seen.status, kind)
    if state.row is Row.DELETING and old is not None:
        return Wanted(kind, old["status"] == "True", old["reason"], old["message"])
    if state.row in rows:
        return Wanted(kind, True, state.reason, state.message)
    return Wanted(kind, False, otherwise)
