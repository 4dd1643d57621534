"""What the trainer's actor does about files: the lanes of saves and of reads, and what it says of the storage."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import CHECKPOINT_FILES, STATE_FILE
from lorafleet_runtime.trainer.actor import TrainerActor
from lorafleet_runtime.trainer.prepare import _durable_step
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import Artifact, LoadRequest
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
def test_a_load_knows_which_checkpoint_is_there(tmp_path: Path, names: list[str], durable: int | None) -> None:
    for name in names:
        whole(tmp_path / name)
    assert _durable_step(tmp_path) == durable


class SlowRank:
    """Reads what it is told to, once it may; a load says what was prepared for it."""

    def __init__(self) -> None:
        self.reading, self.storage = threading.Event(), threading.Event()

    def prepare(self, request: LoadRequest) -> str:
        self.reading.set()
        assert self.storage.wait(30)
        return f"state for slot {request.slot}"

    def load(self, request: LoadRequest, prepared: str | None) -> str | None:
        return prepared

    def drop(self, uid: str, keep_snapshot: bool) -> str:
        return ""


def request(slot: int) -> LoadRequest:
    return LoadRequest("a", "team", "run", slot, {}, 10, "d", None)


@pytest.fixture
def actor() -> Any:
    made: Any = TrainerActor(pool_spec(), "/model", "/storage", "team/pool")
    made._rank = SlowRank()
    return made


def test_a_load_takes_what_was_prepared_for_it_once(actor: Any) -> None:
    actor._rank.storage.set()
    actor.prepare(request(0))
    assert [actor.load(request(0)) for _ in range(2)] == ["state for slot 0", None]
    actor.prepare(request(0))
    assert actor.load(request(1)) is None


def test_what_was_read_too_late_is_not_kept(actor: Any) -> None:
    """Its run was failed and dropped; another registration must not take it, nor the trainer its memory."""
    with ThreadPoolExecutor() as pool:
        late = pool.submit(actor.prepare, request(0))
        assert actor._rank.reading.wait(30)
        actor.drop("a")
        actor._rank.storage.set()
        late.result(30)
    assert actor._prepared == {}
