"""The status fields beside the conditions: the runtime's figures, latched where they must not go back. Pure."""

import math
from typing import Any

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import AdapterView
from lorafleet_operator.reconcile import conditions
from lorafleet_operator.reconcile.observed import Observed
from lorafleet_operator.reconcile.state import FINISHED_ROWS, Row, State, start_seconds

Fields = dict[str, Any]

_LATCHED = (
    "bootEpoch", "weightVersion", "step", "startStep", "targetStep", "accumulatedGroups", "groupsPerStep",
    "lastStepTime", "rewardMean", "lr", "gradNorm", "mismatch", "evaluation", "dropped", "restarts", "artifact",
    "startTime", "completionTime", "usableRows", "skippedRows",
)  # fmt: skip
"""Kept from the stored status when the runtime says nothing."""


def fields(seen: Observed, state: State) -> Fields:
    """Every status field but conditions and observedGeneration; absent keys are to be removed."""
    old = seen.status
    out = {key: old[key] for key in _LATCHED if key in old}
    view = seen.view
    heard = view is not None and seen.link is not None and seen.link.ready
    fresh = heard and view is not None and view.outcome != "Deleted"
    was_finished = conditions.is_true(old, reasons.FINISHED)
    if view is not None and fresh and not was_finished:
        out |= _from_view(view)
        _latch(out, old, view)
        if view.registered:
            out |= _registration(seen, view)
    elif view is not None and heard and not was_finished and view.artifact is not None:
        out |= {"step": max(int(old.get("step", 0)), view.step), "artifact": view.artifact.to_wire()}
    started = start_seconds(seen)
    if started is not None:
        out.setdefault("startTime", conditions.timestamp(started))
    if state.row in FINISHED_ROWS:
        ended = view.completion_time if view is not None and view.completion_time is not None else seen.now
        out.setdefault("completionTime", conditions.timestamp(ended))
    if state.row not in (Row.TRAINING, Row.STUCK):
        for key in ("stepsPerMinute", "estimatedCompletionTime"):
            out.pop(key, None)
    return out


def _from_view(view: AdapterView) -> Fields:
    figures: Fields = {
        "accumulatedGroups": view.accumulated_groups,
        "groupsPerStep": view.groups_per_step,
        "buffered": view.buffered,
        "usableRows": view.usable_rows,
        "skippedRows": view.skipped_rows,
        "slot": view.slot,
        "weightVersion": view.weight_version or None,
        "queuePosition": view.queue_position,
        "dropped": view.dropped.to_wire(),
        "stepsPerMinute": _number(view.steps_per_minute, 3),
        "rewardMean": _number(view.reward_mean, 4),
        "lr": _number(view.lr, 6),
        "gradNorm": _number(view.grad_norm, 6),
        "mismatch": _number(view.mismatch, 3),
        "artifact": view.artifact.to_wire() if view.artifact is not None else None,
    }
    times = {"estimatedCompletionTime": view.estimated_completion_time, "lastStepTime": view.last_step_time}
    for key, seconds in times.items():
        figures[key] = conditions.timestamp(seconds) if seconds is not None and math.isfinite(seconds) else None
    return {key: value for key, value in figures.items() if value is not None}


def _latch(out: Fields, old: Fields, view: AdapterView) -> None:
    """Step, target and restarts: only a live registration may lower the step, nothing lowers the target."""
    out["step"] = view.step if view.registered else max(int(old.get("step", 0)), view.step)
    if view.target_step is not None:
        out["targetStep"] = max(int(old.get("targetStep", 0)), view.target_step)
    out["restarts"] = max(int(old.get("restarts", 0)), view.restarts)


def _registration(seen: Observed, view: AdapterView) -> Fields:
    epoch = seen.link.boot_epoch if seen.link is not None else None
    known = seen.status.get("bootEpoch")
    restarts = max(int(seen.status.get("restarts", 0)), view.restarts)
    if known is not None and epoch is not None and known != epoch and _was_live(seen):
        restarts = max(int(seen.status.get("restarts", 0)) + 1, view.restarts)
    out: Fields = {"restarts": restarts, "startStep": view.start_step}
    if epoch is not None:
        out["bootEpoch"] = epoch
    return out


def _was_live(seen: Observed) -> bool:
    registered = conditions.find(seen.status, reasons.REGISTERED) or {}
    return registered.get("status") == "True" or registered.get("reason") == reasons.RUNTIME_LOST


def _number(value: float | None, digits: int) -> float | None:
    """Rounded to significant digits for people; NaN and infinity, which JSON has no word for, become None."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
