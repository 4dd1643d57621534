"""When a status may be written: conditions at once, progress at an interval, nothing twice. Pure."""

from dataclasses import dataclass
from typing import Any

from lorafleet_operator.reconcile.conditions import flags

Status = dict[str, Any]

_AT_ONCE = ("observedGeneration", "slot", "bootEpoch", "targetStep", "startTime", "completionTime", "restarts")
FIRST_STEPS = 3
"""Steps that are shown about at once, so that a new run is seen to move."""
FIRST_STEPS_SECONDS = 1.0


def merge_patch(current: Status, desired: Status) -> Status:
    """The JSON merge patch from `current` to `desired`; empty when they are equal."""
    patch: Status = {}
    for key in current.keys() | desired.keys():
        if key not in desired:
            patch[key] = None
        elif key not in current:
            patch[key] = desired[key]
        elif current[key] != desired[key]:
            both = isinstance(current[key], dict) and isinstance(desired[key], dict)
            patch[key] = merge_patch(current[key], desired[key]) if both else desired[key]
    return patch


@dataclass(frozen=True, slots=True)
class Intervals:
    """Least seconds between two writes of one object's status, by what changed."""

    progress: float
    """Figures."""
    place: float
    """Nothing but a waiting run's place in the queue and the messages that tell it."""
    message: float
    """Nothing but messages."""


def is_place(current: Status, desired: Status) -> bool:
    """Whether the change is nothing but a waiting run's place in the queue and the messages that tell it."""
    changed = merge_patch(current, desired)
    only_words = changed.keys() <= {"queuePosition", "conditions"} and flags(current) == flags(desired)
    return only_words and "queuePosition" in changed and "queuePosition" in desired


def write_in(current: Status, desired: Status, since_last: float, intervals: Intervals) -> float | None:
    """Seconds until `desired` is to be written: 0.0 is now, None is never (nothing changed).

    Args:
        current: the stored status.
        desired: the status to be.
        since_last: seconds since this object's status was last written.
        intervals: of writes that can wait.
    """
    changed = merge_patch(current, desired)
    if not changed:
        return None
    if any(key in changed for key in _AT_ONCE) or flags(current) != flags(desired):
        return 0.0
    interval = intervals.progress
    if is_place(current, desired):
        interval = intervals.place
    elif changed.keys() <= {"queuePosition", "conditions"}:
        interval = intervals.message
    elif "step" in changed and desired.get("step", 0) <= FIRST_STEPS:
        interval = min(interval, FIRST_STEPS_SECONDS)
    return max(interval - since_last, 0.0)
