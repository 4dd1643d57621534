"""The lane of saves: order, errors, and tickets of other processes."""

import threading

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import Artifact


def test_saves_are_written_one_after_the_other_in_order() -> None:
    saves, gate, written = Saves(), threading.Event(), []

    def write(n: int) -> Artifact:
        if n == 0:
            gate.wait()
        written.append(n)
        return Artifact("/path", n, "digest")

    tickets = [saves.add(lambda n=n: write(n)) for n in range(3)]  # type: ignore[misc]
    assert written == []  # adding waits for nothing
    gate.set()
    assert [saves.result(ticket) for ticket in reversed(tickets)] == [Artifact("/path", n, "digest") for n in (2, 1, 0)]
    assert written == [0, 1, 2]


def test_a_write_that_fails_is_raised_to_who_waits_for_it_and_the_next_goes_on() -> None:
    def full() -> Artifact:
        raise RunError(reasons.STORAGE_ERROR, "disk full")

    saves = Saves()
    failed, good = saves.add(full), saves.add(lambda: Artifact("/path", 1, "digest"))
    with pytest.raises(RunError, match="disk full"):
        saves.result(failed)
    assert saves.result(good) == Artifact("/path", 1, "digest")


def test_a_ticket_of_another_process_has_no_result() -> None:
    other = Saves().add(lambda: Artifact("/path", 1, "digest"))
    assert Saves().result(other) is None
