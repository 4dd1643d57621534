"""Records on their way from the trainer's node to storage: no step waits for it, and their order is kept."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafleet_runtime.trainer import record_files, record_moves
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.record import StepRecorder
from lorafleet_runtime.trainer.record_files import Start, StepFigures, recorded_steps
from lorafleet_runtime.trainer.record_moves import Outbox, clear_of_other_boots, forward
from lorafleet_runtime.types import Cursor, PromptGroup, Sample, VersionId

ONE = Ranks(0, 1, 1)
START = Start({"format": 1}, {"peft_type": "LORA"}, {"a": torch.ones(2)})


class Node:
    """A trainer's node with a writer thread that works when the test says so."""

    def __init__(self, root: Path) -> None:
        self.storage = root / "storage" / "team" / "run" / "a" / "records"
        self.waiting = root / "node" / "records-boot"
        self.folder = self.waiting / "team" / "run" / "a"
        self.jobs: list[Callable[[], None]] = []

    def load(self, step: int, start: Start | None = None) -> StepRecorder:
        outbox = Outbox("a", self.storage, self.folder, self.jobs.append)
        recorder = StepRecorder("a", self.storage, torch.float32, False, outbox)
        recorder.start(start, step)
        return recorder

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def stored(self) -> list[int]:
        return recorded_steps(self.storage)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def step(recorder: StepRecorder, number: int, lr: float = 0.1) -> str:
    group = PromptGroup("a", VersionId("a", "2.1", 3), number, (7, 8), (Sample((1,), (-0.5,), 1.0, 0.25, False),))
    recorder.add([group], [], {})
    told = recorder.write(StepFigures(number, lr, 2.5, 3, "2.1", Cursor()), ONE)
    recorder.discard()
    return told


def test_a_step_touches_no_storage_and_the_thread_brings_it_there(node: Node) -> None:
    recorder = node.load(0, START)
    assert [step(recorder, number) for number in (1, 2)] == ["", ""]
    assert not node.storage.exists()
    assert len(node.jobs) == 1  # it finds what came after it too: a queue that hangs does not grow
    node.work()
    assert node.stored() == [1, 2]
    assert sorted(path.name for path in node.storage.iterdir())[:2] == ["initial", "run.json"]
    about, tensors = record_files.read_pair(node.storage, "step_00000002")
    assert (about["step"], tensors["group_index"].tolist()) == (2, [2])
    recorder.close()
    node.work()
    assert not node.folder.exists()


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_refused_record_is_told_with_the_next_step_and_moved_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = node.load(0, START)
    node.work()
    step(recorder, 1)
    with monkeypatch.context() as broken:
        broken.setattr(record_files, "_sync", full)
        node.work()
    assert (node.stored(), recorded_steps(node.folder / "00000001")) == ([], [1])
    assert "No space left on device" in (told := step(recorder, 2)) and "tried again" in told
    node.work()
    assert (node.stored(), step(recorder, 3)) == ([1, 2], "")


def test_a_last_record_that_is_refused_is_told_when_the_run_leaves(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = node.load(0, START)
    step(recorder, 1)
    with monkeypatch.context() as broken:
        broken.setattr(record_files, "_sync", full)
        node.work()
    told = recorder.close()
    assert "No space left on device" in told and "tried once more" in told
    node.work()
    assert (node.stored(), node.load(1).close()) == ([1], "")


def test_of_a_storage_that_hangs_the_oldest_are_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_moves, "MOST_WAITING", 2)
    recorder = node.load(0, START)
    assert [step(recorder, 1), step(recorder, 2)] == ["", ""]
    assert "the record of step 1 is given up" in step(recorder, 3)
    node.work()
    assert node.stored() == [2, 3]


def test_a_load_moves_what_was_left_up_to_its_step_and_forgets_the_rest(node: Node) -> None:
    recorder = node.load(0, START)
    for number in (1, 2, 3):
        step(recorder, number)
    node.jobs.clear()  # the process died
    again = node.load(2)
    assert recorded_steps(node.folder / "00000001") == [1, 2]
    assert step(again, 3, lr=0.7) == ""
    assert not node.storage.exists()
    node.work()
    assert node.stored() == [1, 2, 3]
    assert record_files.read_pair(node.storage, "step_00000003")[0]["lr"] == 0.7
    assert (node.storage / "run.json").exists() and list(node.folder.iterdir()) == [node.folder / "00000002"]
    assert step(again, 4) == ""


def test_a_job_from_before_a_load_brings_nothing_that_the_load_forgets(node: Node) -> None:
    """The thread hung over the load: the jobs of both are run late, and the first must not take the new step."""
    recorder = node.load(0, START)
    step(recorder, 1)
    step(recorder, 2)
    again = node.load(1)
    step(again, 2, lr=0.7)
    node.work()
    assert node.stored() == [1, 2]
    assert record_files.read_pair(node.storage, "step_00000002")[0]["lr"] == 0.7


def test_a_load_removes_later_records_from_storage(node: Node) -> None:
    recorder = node.load(0, START)
    for number in (1, 2, 3):
        step(recorder, number)
    node.work()
    node.load(1)
    assert node.stored() == [1, 2, 3]
    node.work()
    assert node.stored() == [1]


def test_a_run_from_its_beginning_takes_over_nothing(node: Node) -> None:
    step(node.load(0, START), 1)
    node.jobs.clear()
    node.load(0, Start({"format": 1, "new": True}, {}, {"a": torch.zeros(2)}))
    node.work()
    assert node.stored() == []
    assert "new" in (node.storage / "run.json").read_text()


def test_a_damaged_record_on_the_node_does_not_hold_up_the_others(node: Node) -> None:
    recorder = node.load(0, START)
    step(recorder, 1)
    (node.folder / "00000001" / "step_00000001.safetensors").write_bytes(b"cut")
    step(recorder, 2)
    node.work()
    assert node.stored() == [2]
    assert "the record of step 1 is given up" in step(recorder, 3)


def test_records_of_a_run_that_ended_unseen_are_brought_to_storage(node: Node, tmp_path: Path) -> None:
    step(node.load(0, START), 1)
    node.jobs.clear()
    forward(node.waiting, tmp_path / "storage", ["a"], node.jobs.append)
    assert node.jobs == []
    forward(node.waiting, tmp_path / "storage", ["b"], node.jobs.append)
    node.work()
    assert node.stored() == [1] and not node.folder.exists()


def test_trouble_on_the_node_costs_the_record_and_not_the_step(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = node.load(0, START)
    monkeypatch.setattr(record_moves, "recorded_steps", full)
    assert "cannot be looked through (" in step(recorder, 1)
    node.work()
    monkeypatch.undo()
    node.folder.joinpath("00000001", "step_00000001.json").unlink()
    monkeypatch.setattr(record_files, "save_file", full)
    assert "the record of step 2 cannot be written" in step(recorder, 2)


def test_what_an_earlier_boot_left_is_removed(node: Node) -> None:
    old = node.waiting.with_name("records-older")
    old.mkdir(parents=True)
    step(node.load(0, START), 1)
    clear_of_other_boots(node.waiting)
    assert node.folder.exists() and not old.exists()
