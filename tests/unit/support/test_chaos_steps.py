"""The rule that no step is trained twice finds every way in which one can be."""

import pytest

from support.chaos_steps import Step, repeated_steps


def made(pid: int, time: float, number: int, before: str, after: str) -> Step:
    return Step(pid, time, "uid", number, before, after)


STRAIGHT = [made(1, 1.0, 1, "0", "a"), made(1, 2.0, 2, "a", "b"), made(1, 3.0, 3, "b", "c")]


def test_a_straight_run_repeats_nothing() -> None:
    assert repeated_steps(STRAIGHT, 3, "c") == []


def test_a_step_that_died_with_its_process_is_undone() -> None:
    lost = made(1, 2.0, 2, "a", "x")
    steps = [STRAIGHT[0], lost, made(2, 3.0, 2, "a", "b"), made(2, 4.0, 3, "b", "c")]
    assert repeated_steps(steps, 3, "c") == [lost]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([STRAIGHT[0], made(1, 1.5, 2, "a", "x"), made(1, 2.0, 2, "x", "b"), STRAIGHT[2]], "step 1"),
        ([STRAIGHT[0], STRAIGHT[2]], "step 2"),
        ([STRAIGHT[0], made(1, 2.0, 2, "z", "b"), STRAIGHT[2]], "step 1"),
        ([*STRAIGHT[:2], made(1, 2.5, 2, "a", "x"), STRAIGHT[2]], "step 2 twice"),
    ],
    ids=["number twice, weights once each", "missing", "from other weights", "thrown away by the same process"],
)
def test_anything_else_is_an_error(steps: list[Step], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        repeated_steps(steps, 3, "c")
