"""What an AdapterRun's object says, in the words and figures that people are shown. Pure: the time comes in."""

import datetime
import re
from collections.abc import Sequence
from typing import Any

from lorafleet_api.v1alpha1 import reasons

Object = dict[str, Any]

UNSEEN_SECONDS = 30.0
"""An object without status for this long is looked after by nobody."""

_FULL, _EMPTY = "\u2588", "\u2591"
_SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def status_of(item: Object) -> Object:
    """The status; empty before there is one."""
    found: Object = item.get("status") or {}
    return found


def condition(item: Object, kind: str) -> Object:
    """One condition; status Unknown before it exists."""
    unknown = {"status": "Unknown", "reason": "", "message": ""}
    return next((c for c in status_of(item).get("conditions") or [] if c["type"] == kind), unknown)


def holds(item: Object, kind: str) -> bool:
    """Whether a condition is True."""
    return bool(condition(item, kind)["status"] == "True")


def pool_ref(run: Object) -> tuple[str, str]:
    """Namespace and name of the pool that a run names; the namespace is the run's own by default."""
    ref = run["spec"]["poolRef"]
    return ref.get("namespace") or run["metadata"]["namespace"], ref["name"]


def state(item: Object, now: float) -> str:
    """The run in one word: Ready's reason; "-" when no operator has given one for long."""
    if condition(item, reasons.READY)["reason"]:
        return str(condition(item, reasons.READY)["reason"])
    return "-" if unseen(item, now) else reasons.PENDING


def unseen(item: Object, now: float) -> str | None:
    """What to tell of a run that no operator has looked at, or None."""
    age = now - unix(item["metadata"]["creationTimestamp"])
    if status_of(item).get("conditions") or age < UNSEEN_SECONDS:
        return None
    namespace = item["metadata"]["namespace"]
    return (
        f"not seen by an operator for {duration(age)}; check that one runs and watches namespace {namespace} "
        "(kubectl get pods -n lorafleet-system; on one machine: make status)"
    )


def note(item: Object, now: float) -> str | None:
    """The one thing that a user should know of a run that is neither training nor done; None when there is nothing."""
    silent = unseen(item, now)
    if silent is not None:
        return silent
    if holds(item, reasons.FAILED):
        return str(condition(item, reasons.FAILED)["message"])
    if holds(item, reasons.FINISHED) or holds(item, reasons.READY):
        return None
    message = str(condition(item, reasons.READY)["message"])
    position = status_of(item).get("queuePosition")
    if position and "in the queue" not in message:
        return f"position {position} in the queue: {message}"
    return message or None


def progress(item: Object) -> tuple[int, int | None]:
    """Steps done, and the target where it is known."""
    status = status_of(item)
    return int(status.get("step") or 0), status.get("targetStep")


def eta_seconds(item: Object, now: float) -> float | None:
    """Seconds until the target at the present speed; None when it cannot be told."""
    until = status_of(item).get("estimatedCompletionTime")
    if until is None or holds(item, reasons.FINISHED):
        return None
    return max(0.0, unix(until) - now)


def age_seconds(item: Object, now: float) -> float:
    """Seconds since creation."""
    return max(0.0, now - unix(item["metadata"]["creationTimestamp"]))


def unix(timestamp: str) -> float:
    """Unix seconds of an RFC 3339 time."""
    return datetime.datetime.fromisoformat(timestamp).timestamp()


def duration(seconds: float | None) -> str:
    """As kubectl's ages: 45s, 3m20s, 2h5m, 3d4h; "-" for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    for unit, size, lower, below in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"


def number(value: float | None, digits: int = 4) -> str:
    """A figure with so many significant digits; "-" for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def printable(text: str) -> str:
    """Text from elsewhere, with control characters spelled out: a model must not drive the reader's terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def bar(done: int, total: int | None, width: int = 12) -> str:
    """A bar of `width` characters."""
    full = 0 if not total else min(width, done * width // total)
    return _FULL * full + _EMPTY * (width - full)


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """The newest `width` values, from their lowest to their highest."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = high - low
    return "".join(_SPARKS[int((v - low) / span * (len(_SPARKS) - 1)) if span else 3] for v in shown)
