"""Write timing: conditions at once, progress at an interval, equal states never."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafleet_operator.reconcile.throttle import Intervals, merge_patch, write_in


def with_ready(status: str, message: str = "", **fields: object) -> dict[str, object]:
    """A status with one condition."""
    return {"conditions": [{"type": "Ready", "status": status, "reason": "R", "message": message}], **fields}


def due(current: dict[str, object], desired: dict[str, object], since: float = 4.0) -> float | None:
    """With 15 s between progress writes, 10 s between places and 60 s between messages."""
    return write_in(current, desired, since, Intervals(progress=15.0, place=10.0, message=60.0))


@pytest.mark.parametrize(
    ("current", "desired", "expected"),
    [
        (with_ready("True", step=9), with_ready("True", step=9), None),
        (with_ready("False"), with_ready("True"), 0.0),
        (with_ready("True", observedGeneration=1), with_ready("True", observedGeneration=2), 0.0),
        (with_ready("True", step=9), with_ready("True", step=10), 11.0),
        (with_ready("True", step=1), with_ready("True", step=2), 0.0),
        (with_ready("False", queuePosition=4), with_ready("False", queuePosition=3), 6.0),
        (with_ready("False", "4th", queuePosition=4), with_ready("False", "3rd", queuePosition=3), 6.0),
        (with_ready("False", queuePosition=4, step=1), with_ready("False", queuePosition=3, step=9), 11.0),
        (with_ready("False", queuePosition=4), with_ready("True"), 0.0),
        (with_ready("True", "disk full"), with_ready("True", "training"), 56.0),
        (with_ready("True", artifact={"step": 5}), with_ready("True", artifact={"step": 10}), 11.0),
        ({}, with_ready("False"), 0.0),
    ],
    ids=[
        "equal",
        "flip",
        "generation",
        "progress",
        "first steps",
        "place",
        "place and message",
        "place and progress",
        "place given up",
        "message",
        "artifact",
        "new",
    ],
)
def test_time_until_a_write(current: dict[str, object], desired: dict[str, object], expected: float | None) -> None:
    assert due(current, desired) == expected


def test_progress_is_due_once_the_interval_passed() -> None:
    assert due(with_ready("True", step=9), with_ready("True", step=10), since=15.0) == 0.0


JSON = st.recursive(
    st.integers() | st.sampled_from(["", "x"]) | st.booleans() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), JSON, max_size=4)


def apply_merge_patch(target: object, patch: object) -> object:
    """RFC 7396, as an independent reference."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply_merge_patch(result.get(key), value)
    return result


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(OBJECTS, OBJECTS)
def test_merge_patch_leads_from_one_to_the_other(current: dict[str, object], desired: dict[str, object]) -> None:
    assert apply_merge_patch(current, merge_patch(current, desired)) == desired
