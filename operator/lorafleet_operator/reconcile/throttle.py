"""When a status may be written: conditions at once, progress at an interval, nothing twice. Pure."""

from typing import Any

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


def write_in(
    current: Status, desired: Status, since_last: float, progress_seconds: float, queue_seconds: float
) -> float | None:
    """Seconds until `desired` is to be written: 0.0 is now, None is never (nothing changed).

    Args:
        current: the stored status.
        desired: the status to be.
        since_last: seconds since this object's status was last written.
        progress_seconds: interval of progress writes.
        queue_seconds: interval of writes that bring nothing but a queue position or a message.
    """
    changed = merge_patch(current, desired)
    if not changed:
        return None
    if any(key in changed for key in _AT_ONCE) or _flags(current) != _flags(desired):
        return 0.0
    interval = progress_seconds
    if changed.keys() <= {"queuePosition", "conditions"}:
        interval = queue_seconds
    elif "step" in changed and desired.get("step", 0) <= FIRST_STEPS:
        interval = min(interval, FIRST_STEPS_SECONDS)
    return max(interval - since_last, 0.0)


def _flags(status: Status) -> list[tuple[str, str, str]]:
    return sorted((c["type"], c["status"], c["reason"]) for c in status.get("conditions") or [])
