"""Conditions: the table of DESIGN as code, and the rule that lastTransitionTime moves only on flips. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lorafleet_api.v1alpha1.status import MAX_MESSAGE

Condition = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One condition as it should be."""

    type: str
    status: bool
    reason: str
    message: str = ""


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC with whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix_seconds(text: str) -> float:
    """The inverse of `timestamp`; also takes fractions and offsets."""
    return datetime.fromisoformat(text).timestamp()


def find(status: dict[str, Any], kind: str) -> Condition | None:
    """The condition of that type, or None."""
    return next((c for c in status.get("conditions") or [] if c["type"] == kind), None)


def flags(status: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Type, status and reason of every condition, sorted: what a message alone does not change."""
    return sorted((c["type"], c["status"], c["reason"]) for c in status.get("conditions") or [])


def is_true(status: dict[str, Any], kind: str) -> bool:
    """Whether the condition is there and True."""
    condition = find(status, kind)
    return condition is not None and condition["status"] == "True"


def merge(status: dict[str, Any], wanted: list[Wanted], generation: int, now: float) -> list[Condition]:
    """The wanted conditions, in order, with transition times carried over, then those of other writers untouched."""
    merged = []
    for want in wanted:
        old = find(status, want.type)
        flag = "True" if want.status else "False"
        flipped = old is None or old["status"] != flag
        merged.append(
            {
                "type": want.type,
                "status": flag,
                "observedGeneration": generation,
                "lastTransitionTime": timestamp(now) if old is None or flipped else old["lastTransitionTime"],
                "reason": want.reason,
                "message": want.message[:MAX_MESSAGE],
            }
        )
    ours = {want.type for want in wanted}
    return merged + [c for c in status.get("conditions") or [] if c["type"] not in ours]
