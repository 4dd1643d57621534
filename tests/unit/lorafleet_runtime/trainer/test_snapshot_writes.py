"""Snapshots on their way to the disk: order, failure, removal, memory, and a disk that hangs."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet_runtime.loop.trainer import _READS_AT_ONCE, _SAVES_AT_ONCE, _SNAPSHOTS_AT_ONCE
from lorafleet_runtime.trainer import snapshot
from lorafleet_runtime.trainer.actor import LANES
from lorafleet_runtime.trainer.checkpoint import Identity, TrainState
from lorafleet_runtime.trainer.snapshot import PLACES, Snapshots
from lorafleet_runtime.types import Cursor

SECONDS = 30.0
"""An event that should come has this long."""


def identity(uid: str) -> Identity:
    return Identity(uid, "base", "data", 4, 8, ("q_proj",))


def state(step: int, elements: int = 8) -> TrainState:
    """Tensors that say which step they are of."""
    master, exp_avg, exp_avg_sq = (torch.full((elements,), float(step + part)) for part in (0, 10, 20))
    return TrainState(step, 10, Cursor(step), "1.1", False, master, exp_avg, exp_avg_sq)


def keep(snapshots: Snapshots, uid: str, step: int, elements: int = 8) -> str:
    """As a step does."""
    places = snapshots.place(uid, step, elements, torch.float32)
    assert places is not None
    live = state(step, elements)
    master, exp_avg, exp_avg_sq = (next(places).copy_(own) for own in (live.master, live.exp_avg, live.exp_avg_sq))
    return snapshots.add(identity(uid), replace(live, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq))


def place(snapshots: Snapshots, uid: str, step: int) -> bool:
    """Whether a step of the run may be copied."""
    return snapshots.place(uid, step, 8, torch.float32) is not None


def settle(snapshots: Snapshots) -> None:
    """Wait until nothing is left to be written or removed."""
    while (worker := snapshots._worker) is not None:
        worker.join(SECONDS)


class Disk:
    """A file does not get its name before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        """Files, in order."""
        self.reached = threading.Event()
        monkeypatch.setattr(snapshot, "save_file", self._held)

    def _held(self, tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        self.begun.append(path.stem)
        self.reached.set()
        assert self.open.wait(SECONDS)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def beside() -> Any:
    """Runs a call beside the test, which sees whether it has returned."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


def returns(call: Future[Any], within: float = SECONDS) -> bool:
    return bool(wait_for([call], within).done)


def test_a_step_waits_for_no_write_and_a_ticket_does(tmp_path: Path, disk: Disk, beside: Any) -> None:
    snapshots = Snapshots(tmp_path)
    ticket = keep(snapshots, "a", 1)
    other = keep(snapshots, "b", 5)
    assert disk.reached.wait(SECONDS)
    answer = beside(snapshots.written, ticket)
    assert not returns(answer, 0.1)
    assert list(tmp_path.glob("*.safetensors")) == []
    disk.open.set()
    assert answer.result(SECONDS) is True
    assert load_file(tmp_path / "a.safetensors")["exp_avg"].tolist() == [11.0] * 8  # of then, not what the slot has now
    assert snapshots.written(other)
    assert disk.begun == ["a", "b"]


def test_a_ticket_of_another_process_is_not_known(tmp_path: Path) -> None:
    ticket = keep(Snapshots(tmp_path), "a", 1)
    assert not Snapshots(tmp_path).written(ticket)


def test_no_more_than_the_places_are_staged_and_the_trainer_waits_for_none(tmp_path: Path, disk: Disk) -> None:
    snapshots = Snapshots(tmp_path)
    tickets = [keep(snapshots, f"run-{number}", 1) for number in range(PLACES)]
    assert not place(snapshots, "late", 1)
    disk.open.set()
    assert all(map(snapshots.written, tickets))
    assert place(snapshots, "late", 1)


def test_the_loop_asks_for_no_more_than_there_is_room_for() -> None:
    assert min(PLACES, LANES["snapshots"]) >= _SNAPSHOTS_AT_ONCE
    assert LANES["saves"] >= _SAVES_AT_ONCE and LANES["reads"] >= _READS_AT_ONCE


def test_a_copy_that_cannot_be_allocated_costs_the_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots(tmp_path)

    def full(*_: object, **__: object) -> Tensor:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        assert not place(snapshots, "a", 3)
    assert "run a: no snapshot of step 3" in caplog.text
    assert place(snapshots, "a", 4)


def test_what_is_read_is_the_newest_state_also_before_it_is_written(tmp_path: Path, disk: Disk) -> None:
    snapshots = Snapshots(tmp_path)
    disk.open.set()
    assert snapshots.written(keep(snapshots, "a", 1))
    disk.open.clear()
    keep(snapshots, "a", 2)
    found = snapshots.read(identity("a"))
    assert found is not None
    assert (found.step, found.cursor, found.master.tolist()) == (2, Cursor(2), [2.0] * 8)
    disk.open.set()


@pytest.mark.parametrize("forget", [lambda s: s.remove("a"), lambda s: s.retain(["b"])], ids=["remove", "retain"])
@pytest.mark.parametrize("first", ["a", "b"], ids=["writing", "waiting"])
def test_a_removed_run_does_not_come_back_with_the_write_under_way(
    tmp_path: Path, disk: Disk, forget: Callable[[Snapshots], None], first: str
) -> None:
    snapshots = Snapshots(tmp_path)
    disk.open.set()
    assert snapshots.written(keep(snapshots, "a", 1))
    disk.open.clear()
    disk.reached.clear()
    tickets = [keep(snapshots, uid, 2) for uid in (first, "b" if first == "a" else "a")]
    assert disk.reached.wait(SECONDS)
    forget(snapshots)
    assert snapshots.read(identity("a")) is None
    disk.open.set()
    assert all(map(snapshots.written, tickets))
    settle(snapshots)
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]
    assert Snapshots(tmp_path).read(identity("a")) is None


@pytest.mark.parametrize("what", [lambda s: s.remove("done"), lambda s: s.retain(["a"])], ids=["remove", "retain"])
def test_a_removal_that_hangs_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Any, what: Callable[[Snapshots], None]
) -> None:
    """It is made by the thread that writes: not by the trainer's, nor with the lock that everybody needs."""
    snapshots = Snapshots(tmp_path)
    assert snapshots.written(keep(snapshots, "done", 1))
    reached, mended, unlink = threading.Event(), threading.Event(), Path.unlink

    def held(path: Path, missing_ok: bool = False) -> None:
        reached.set()
        assert mended.wait(SECONDS)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", held)
    removal = beside(what, snapshots)
    assert reached.wait(SECONDS)
    assert returns(removal)
    assert snapshots.read(identity("done")) is None
    ticket = beside(keep, snapshots, "a", 1).result(SECONDS)
    monkeypatch.setattr(snapshot, "PATIENCE_SECONDS", 0.05)
    assert beside(snapshots.written, ticket).result(SECONDS)
    assert not beside(place, snapshots, "b", 1).result(SECONDS)
    monkeypatch.setattr(snapshot, "PATIENCE_SECONDS", SECONDS)
    mended.set()
    assert snapshots.written(ticket)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_another_process_left_in_its_writes_is_removed_and_an_own_write_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors writes a file of its own beside the one that it was told to write."""
    child = subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    child.kill()
    child.communicate()
    assert [path.name.startswith(".writing-") for path in tmp_path.iterdir()] == [True]
    snapshots = Snapshots(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def swept(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        snapshots._remove(snapshot._Removal(frozenset({"a"}), others=True))

    monkeypatch.setattr(snapshot, "save_file", swept)
    assert snapshots.written(keep(snapshots, "a", 1))
    assert load_file(tmp_path / "a.safetensors")["master"].tolist() == [1.0] * 8


_WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
import torch
from lorafleet_runtime.trainer import snapshot
from lorafleet_runtime.trainer.checkpoint import Identity, TrainState
from lorafleet_runtime.types import Cursor

def never(tensors, path, metadata):
    path.with_name(".tmpAbCdEf").write_bytes(b"half")
    print("begun", flush=True)
    time.sleep(600)

snapshot.save_file = never
zeros = [torch.zeros(8)] * 3
state = TrainState(1, 10, Cursor(1), "1.1", False, *zeros)
snapshots = snapshot.Snapshots(Path(sys.argv[1]))
snapshots.written(snapshots.add(Identity("a", "base", "data", 4, 8, ("q_proj",)), state))
"""


def test_a_run_that_comes_back_after_its_removal_leaves_its_new_snapshot(tmp_path: Path, disk: Disk) -> None:
    snapshots = Snapshots(tmp_path)
    keep(snapshots, "a", 7)
    assert disk.reached.wait(SECONDS)
    snapshots.remove("a")
    disk.open.set()
    assert snapshots.written(keep(snapshots, "a", 1))
    found = Snapshots(tmp_path).read(identity("a"))
    assert found is not None
    assert found.step == 1


def test_a_write_that_fails_is_told_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = Snapshots(tmp_path)
    assert snapshots.written(keep(snapshots, "a", 1))

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    for error in (full, lambda *_, **__: 1 / 0):
        monkeypatch.setattr(snapshot, "save_file", error)
        assert snapshots.written(keep(snapshots, "a", 2))
    assert caplog.text.count("run a: no snapshot of step 2") == 2
    assert "no space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    monkeypatch.setattr(snapshot, "save_file", save_file)
    assert snapshots.written(keep(snapshots, "a", 3))
    assert load_file(tmp_path / "a.safetensors")["master"].tolist() == [3.0] * 8


def test_a_disk_that_hangs_holds_up_no_step(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot, "PATIENCE_SECONDS", 0.05)
    snapshots = Snapshots(tmp_path)
    ticket = keep(snapshots, "a", 1)
    assert disk.reached.wait(SECONDS)
    assert snapshots.written(ticket)
    assert "run a goes on without its snapshot" in caplog.text
    assert not place(snapshots, "a", 2)
    assert "run a: no snapshot of step 2" in caplog.text
    monkeypatch.setattr(snapshot, "PATIENCE_SECONDS", SECONDS)
    disk.open.set()
    assert snapshots.written(keep(snapshots, "a", 3))  # it is mended
    assert load_file(tmp_path / "a.safetensors")["master"].tolist() == [3.0] * 8
