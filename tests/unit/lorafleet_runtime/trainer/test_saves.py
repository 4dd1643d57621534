"""What the trainer's actor does about files: the lane of saves, and what it says of the storage after a load."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import CHECKPOINT_FILES, STATE_FILE
from lorafleet_runtime.trainer.actor import TrainerActor
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import Artifact, Cursor, Loaded, LoadRequest
from support.runs import pool_spec


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


def test_a_job_that_nobody_waits_for_keeps_its_place_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    saves, gate, done = Saves(), threading.Event(), []

    def hang() -> None:
        gate.wait()

    saves.defer(hang)
    saves.defer(lambda: done.append("record"))

    def fail() -> None:
        raise ValueError("a mistake")

    def write() -> Artifact:
        done.append("checkpoint")
        return Artifact("/path", 1, "digest")

    saves.defer(fail)
    ticket = saves.add(write)
    assert done == []
    gate.set()
    assert saves.result(ticket) is not None
    assert done == ["record", "checkpoint"]
    assert "a mistake" in caplog.text


def test_a_ticket_of_another_process_has_no_result() -> None:
    other = Saves().add(lambda: Artifact("/path", 1, "digest"))
    assert Saves().result(other) is None


def whole(path: Path) -> None:
    """Looks like a checkpoint."""
    path.mkdir(parents=True)
    names = sorted(CHECKPOINT_FILES - {STATE_FILE})
    for name in names:
        (path / name).touch()
    (path / STATE_FILE).write_text(json.dumps({"files": {name: {"bytes": 0} for name in names}}))


@pytest.mark.parametrize(
    ("names", "durable"),
    [
        ([], None),
        (["step_2", "step_10"], 10),
        (["step_2", ".damaged-step_10-1"], 2),
        ([".damaged-step_10-1"], None),
        ([".old-step_10"], None),
    ],
)
def test_a_load_tells_which_checkpoint_is_there_after_it(tmp_path: Path, names: list[str], durable: int | None) -> None:
    class Rank:
        def load(self, request: LoadRequest) -> Loaded:
            for name in names:
                whole(tmp_path / "team" / "run" / "a" / name)
            return Loaded("a", 10, Cursor())

    actor: Any = TrainerActor(pool_spec(), "/model", str(tmp_path), "team/pool")
    actor._rank = Rank()
    assert actor.load(LoadRequest("a", "team", "run", 0, {}, 10, "d", None)) == Loaded(
        "a", 10, Cursor(), durable_step=durable
    )
