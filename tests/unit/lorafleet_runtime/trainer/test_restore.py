"""Checkpoints as files: partial sums, scores, which ones stay, and what a run goes on from when files are damaged."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Damaged, RunError
from lorafleet_runtime.storage import latest_checkpoint, newest_step
from lorafleet_runtime.trainer import checkpoint as module
from lorafleet_runtime.trainer.checkpoint import Identity, Partial, Save, TrainState
from lorafleet_runtime.trainer.restore import newest_state, read_checkpoint
from lorafleet_runtime.types import Cursor, PolicySums

IDENTITY = Identity("uid-a", "base", "data", 4, 8, ("q_proj",))
SIZE = 300


def state(step: int, **changes: Any) -> TrainState:
    generator = torch.Generator().manual_seed(step)
    master, first, second = (torch.randn(SIZE, generator=generator) for _ in range(3))
    return replace(TrainState(step, 10, Cursor(2 * step), "1.1", False, master, first, second), **changes)


def partial(groups: int = 1) -> Partial:
    policy = PolicySums(tokens=7.0, entropy=0.1)
    return Partial(torch.arange(2.0 * SIZE).view(2, 1, SIZE), 3 * groups, groups, 1.5, 4 * groups, policy)


def save(directory: Path, step: int, keep: int = 5, best: bool = False, **changes: Any) -> Path:
    tensors = {"base_model.model.x.lora_A.weight": torch.full((4, 8), float(step))}
    return Path(Save(directory, IDENTITY, state(step, **changes), tensors, {"r": 4}, keep, best).write().path)


def same(found: TrainState | None, wanted: TrainState) -> bool:
    assert found is not None
    pairs = [(found.master, wanted.master), (found.exp_avg, wanted.exp_avg), (found.exp_avg_sq, wanted.exp_avg_sq)]
    if found.partial is not None and wanted.partial is not None:
        pairs.append((found.partial.grad, wanted.partial.grad))
    plain = {"master": None, "exp_avg": None, "exp_avg_sq": None, "partial": None}
    counts = [None if s.partial is None else replace(s.partial, grad=torch.empty(0)) for s in (found, wanted)]
    told = [c and (c.denominator, c.groups, c.reward_sum, c.samples, c.policy) for c in counts]
    assert told[0] == told[1]
    rest = replace(found, **plain) == replace(wanted, **plain)  # type: ignore[arg-type]
    return rest and all(torch.equal(a, b) for a, b in pairs)


def test_partial_sums_and_the_score_come_back_as_they_were(tmp_path: Path) -> None:
    path = save(tmp_path, 2, partial=partial(), score=0.25)
    assert same(read_checkpoint(path, IDENTITY), state(2, partial=partial(), score=0.25))


def test_an_ordinary_checkpoint_has_neither(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    assert not {"partial", "score"} & json.loads((path / "state.json").read_text()).keys()
    with safe_open(path / "optimizer.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"master", "exp_avg", "exp_avg_sq"}
    assert same(read_checkpoint(path, IDENTITY), state(2))


def test_a_partial_one_replaces_the_plain_one_of_its_step_and_keeps_its_score(tmp_path: Path) -> None:
    save(tmp_path, 2, score=0.5)
    path = save(tmp_path, 2, partial=partial(), cursor=Cursor(5))
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]
    assert same(read_checkpoint(path, IDENTITY), state(2, partial=partial(), cursor=Cursor(5), score=0.5))


@pytest.mark.parametrize("change", [{"partial": None}, {"partial": {"groups": 0}}, {"partial": {"denominator": -1}}])
def test_counts_that_do_not_fit_the_sums_are_found(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, 2, partial=partial())
    stored = json.loads((path / "state.json").read_text())
    counts = change["partial"]
    stored["partial"] = counts and stored["partial"] | counts
    (path / "state.json").write_text(json.dumps(stored))
    with pytest.raises(RunError, match="partial gradient") as raised:
        read_checkpoint(path, IDENTITY)
    assert raised.value.reason == reasons.STORAGE_ERROR


@pytest.mark.parametrize(
    ("scores", "left"),
    [
        ([0.1, 0.9, 0.3, 0.2], [2, 4]),
        ([0.9, 0.9, 0.3, 0.2], [2, 4]),  # of equal ones the newer
        ([0.1, 0.2, 0.3, 0.9], [4]),  # the newest is the best
        ([None, None, None, None], [4]),
        ([None, -3.0, None, -5.0], [2, 4]),
    ],
)
def test_the_best_stays_beside_the_newest(tmp_path: Path, scores: list[float | None], left: list[int]) -> None:
    for step, score in enumerate(scores, start=1):
        save(tmp_path, step, keep=1, best=True, score=score)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_{step}" for step in left]


def test_a_score_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1, best=True, score=0.5)
    save(tmp_path, 2, keep=1, best=True, score=float("nan"))
    save(tmp_path, 3, keep=1, best=True, score=0.1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1", "step_3"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def emptied(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda step: cut(step / "optimizer.safetensors"),
    "flipped bit": lambda step: flip(step / "optimizer.safetensors"),
    "flipped bit of the adapter": lambda step: flip(step / "adapter_model.safetensors"),
    "no adapter": lambda step: (step / "adapter_model.safetensors").unlink(),
    "state cut": lambda step: cut(step / "state.json"),
    "empty": emptied,
    "a file": lambda step: (shutil.rmtree(step), step.write_text("x"))[0],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_set_aside_and_told_of(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 2)
    DAMAGES[damage](save(tmp_path, 4))
    found, passed_over = newest_state(newest_step(tmp_path), None, IDENTITY)
    assert same(found, state(2))
    assert len(passed_over) == 1
    assert f"checkpoint {tmp_path}/step_4 is damaged" in passed_over[0]
    (aside,) = tmp_path.glob(".damaged-step_4-*")
    assert passed_over[0].endswith(f"set aside as {aside.name}")
    assert newest_step(tmp_path) == latest_checkpoint(tmp_path) == tmp_path / "step_2"

    save(tmp_path, 3, keep=1)  # the damaged step_4 must not count as the newest, and 4 is made again
    assert latest_checkpoint(tmp_path) == tmp_path / "step_3"
    assert same(read_checkpoint(save(tmp_path, 4), IDENTITY), state(4))
    assert aside.exists()


def test_a_snapshot_newer_than_the_good_checkpoint_is_taken_when_the_newest_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 2)
    DAMAGES["flipped bit"](save(tmp_path, 4))
    found, passed_over = newest_state(newest_step(tmp_path), state(3), IDENTITY)
    assert same(found, state(3))
    assert len(passed_over) == 1


@pytest.mark.parametrize(("made_by", "taken"), [("2.1", 9), ("10.1", 9), ("1.2", 10), ("1.1", 10)])
def test_a_snapshot_of_an_older_registration_than_the_checkpoint_is_left(
    tmp_path: Path, made_by: str, taken: int
) -> None:
    """The run went on from a checkpoint on another node: this node's later step is of a lineage that ended."""
    save(tmp_path, 9, incarnation=made_by)
    found, _ = newest_state(tmp_path / "step_9", state(10, incarnation="1.2"), IDENTITY)
    assert found is not None and found.step == taken


def test_a_snapshot_newer_than_a_damaged_checkpoint_never_looks_at_it(tmp_path: Path) -> None:
    DAMAGES["flipped bit"](save(tmp_path, 4))
    found, passed_over = newest_state(newest_step(tmp_path), state(5), IDENTITY)
    assert same(found, state(5))
    assert passed_over == ()


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_never_starts_afresh(tmp_path: Path) -> None:
    for path in [save(tmp_path, step) for step in (2, 4)]:
        DAMAGES["cut"](path)
    (tmp_path / "step_4" / "adapter_model.safetensors").unlink()
    files = r"step_4 is damaged \(adapter_model.safetensors, optimizer.safetensors: .*step_2 is damaged \(optimizer"
    for _ in range(2):  # the second time too
        with pytest.raises(Damaged, match=rf"{files}.*Restore .* or remove {tmp_path} to start afresh") as raised:
            newest_state(newest_step(tmp_path), None, IDENTITY)
        assert raised.value.reason == reasons.STORAGE_ERROR
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_4"]


def test_of_damaged_checkpoints_the_two_that_were_set_aside_last_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save(tmp_path, 2)
    for step in (8, 9, 4, 5):  # a later one of a lower step is the newer evidence
        DAMAGES["a file" if step == 8 else "cut"](save(tmp_path, step))
        newest_state(tmp_path / f"step_{step}", None, IDENTITY)
    save(tmp_path, 6)
    left = sorted(path.name.rpartition("-")[0] for path in tmp_path.glob(".damaged-*"))
    assert left == [".damaged-step_4", ".damaged-step_5"]
    told = [record.getMessage() for record in caplog.records if "is removed: it is damaged" in record.getMessage()]
    assert len(told) == 2 and all(f"{tmp_path}/.damaged-step_" in text for text in told)


def test_a_damaged_checkpoint_of_the_same_content_is_written_again(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    DAMAGES["flipped bit"](path)
    assert same(read_checkpoint(save(tmp_path, 2), IDENTITY), state(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uid": "uid-b"}, "uid is 'uid-a', the run's is 'uid-b'; move it out of this run's directory"),
        ({"base_digest": "x"}, "base_digest is 'base', the run's is 'x'; give the pool the base model"),
        ({"data_digest": "x"}, "data_digest is 'data', the run's is 'x'; restore the data file"),
        ({"rank": 16}, "rank is 4, the run's is 16; restore the setting"),
        ({"target_modules": ("k_proj",)}, "target_modules is ['q_proj'], the run's is ['k_proj']; restore the setting"),
    ],
)
def test_what_belongs_to_something_else_is_refused_and_nothing_older_is_taken(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    with pytest.raises(RunError) as raised:
        newest_state(newest_step(tmp_path), None, replace(IDENTITY, **change))
    assert raised.value.reason == reasons.CHECKPOINT_MISMATCH
    assert text in raised.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_4"]


def test_storage_that_cannot_be_read_now_costs_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    read = Path.read_text

    def failing(path: Path, *args: Any, **kwargs: Any) -> str:
        if "step_4" in path.parts:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", failing)
    with pytest.raises(RunError, match=r"Input/output error.*fix the storage"):
        newest_state(tmp_path / "step_4", None, IDENTITY)
    monkeypatch.undo()
    assert same(newest_state(newest_step(tmp_path), None, IDENTITY)[0], state(4))


def test_storage_that_cannot_be_read_now_is_no_reason_to_go_on_from_an_older_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is of the later step, and of a registration before the checkpoint's: only state.json says so."""

    def failing(path: Path, *_: Any, **__: Any) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    save(tmp_path, 9, incarnation="2.1")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        with pytest.raises(RunError, match=r"step_9 cannot be read .*Input/output error.*fix the storage") as raised:
            newest_state(tmp_path / "step_9", state(10, incarnation="1.2"), IDENTITY)
    assert raised.value.reason == reasons.STORAGE_ERROR
    found, _ = newest_state(tmp_path / "step_9", state(10, incarnation="1.2"), IDENTITY)
    assert found is not None and found.step == 9


WRITES = {"mkdir": Path, "write_text": Path, "rename": Path, "save_file": module, "fsync": os}
"""Every call of a save that can find the disk full, and where it is looked up."""


def run_full(monkeypatch: pytest.MonkeyPatch, name: str, nth: int, act: Callable[[], object]) -> int:
    """Act on a disk that is full at the nth such call (counted from 1) and after; returns the calls that were made."""
    original, calls = getattr(WRITES[name], name), 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(WRITES[name], name, full)
        act()
    return calls


@pytest.mark.parametrize("name", WRITES)
def test_a_disk_that_is_full_at_any_call_costs_that_save_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(tmp_path, 2)
    (tmp_path / "other").mkdir()
    calls = run_full(monkeypatch, name, 99, lambda: save(tmp_path / "other", 4))
    assert calls >= 1
    for nth in range(1, calls + 1):

        def refused() -> None:
            with pytest.raises(RunError, match=r"No space left.*free space") as raised:
                save(tmp_path, 4)
            assert raised.value.reason == reasons.STORAGE_ERROR

        run_full(monkeypatch, name, nth, refused)
        assert same(read_checkpoint(tmp_path / "step_2", IDENTITY), state(2))
        assert list(tmp_path.glob(".*")) == []
        found, passed_over = newest_state(newest_step(tmp_path), None, IDENTITY)
        assert found is not None
        assert passed_over == ()
        shutil.rmtree(tmp_path / "step_4", ignore_errors=True)  # the last fsync fails with it in place
    assert same(read_checkpoint(save(tmp_path, 4), IDENTITY), state(4))


@pytest.mark.parametrize("limit", [0, 64, 700, 3000])
def test_a_file_that_the_kernel_cuts_is_no_checkpoint(tmp_path: Path, limit: int) -> None:
    save(tmp_path, 2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))  # as a full disk: write() itself fails
    try:
        with pytest.raises(RunError, match="cannot be written") as raised:
            save(tmp_path, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert raised.value.reason == reasons.STORAGE_ERROR
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "step_2":
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert save(tmp_path, 4, keep=1).name == "step_4"
    monkeypatch.undo()
    save(tmp_path, 6, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_6"]
