"""Checkpoints: a run that is killed and restored goes on bit for bit; what does not fit is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import checkpoints, latest_checkpoint
from lorafleet_runtime.trainer.checkpoint import prune
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, Retention
from support.trainer import load, make_groups, make_rank, make_request, save, train_step

SPEC: dict[str, Any] = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmupSteps": 2}}


def state(rank: TrainerRank, uid: str) -> list[Tensor]:
    return [rank.adapter(uid).master.clone(), *(m.clone() for m in rank._slot(uid).optimizer.moments)]


def saved(model: Path, storage: Path, steps: int = 2) -> tuple[TrainerRank, str]:
    rank = make_rank(model, storage)
    rank.load(make_request("a", **SPEC))
    for step in range(steps):
        train_step(rank, "a", make_groups("a", seed=step))
    return rank, save(rank, Cursor(5, (7, 9))).path


def test_restored_run_continues_bit_for_bit(qwen3: Path, tmp_path: Path) -> None:
    rank, path = saved(qwen3, tmp_path)
    rank.accumulate(make_groups("a", seed=7))  # lost with the kill
    whole = make_rank(qwen3, tmp_path)
    whole.load(make_request("a", **SPEC))
    results = [train_step(whole, "a", make_groups("a", seed=step)) for step in range(4)]

    restored = make_rank(qwen3, tmp_path)
    loaded = restored.load(make_request("a", slot=3, resume=path, **SPEC))
    assert (loaded.step, loaded.cursor) == (2, Cursor(5, (7, 9)))
    again = [train_step(restored, "a", make_groups("a", seed=step)) for step in (2, 3)]

    assert again == results[2:]
    assert all(torch.equal(x, y) for x, y in zip(state(restored, "a"), state(whole, "a"), strict=True))


def test_directory_is_a_complete_peft_adapter_and_leaves_no_temporary(qwen3: Path, tmp_path: Path) -> None:
    _, path = saved(qwen3, tmp_path)
    assert path == str(tmp_path / "runs/a/step_2")
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert {p.name for p in Path(path).iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json",
    }  # fmt: skip
    assert json.loads((Path(path) / "state.json").read_text())["identity"]["uid"] == "a"


@pytest.mark.parametrize(
    "field, change",
    [
        ("rank", {"rank": 8}),
        ("alpha", {"alpha": 16}),
        ("target_modules", {"targetModules": ["q_proj"]}),
    ],
)
def test_checkpoint_of_other_settings_is_refused_by_field(
    qwen3: Path, tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    _, path = saved(qwen3, tmp_path)
    fresh = make_rank(qwen3, tmp_path)
    with pytest.raises(RunError, match=field) as raised:
        fresh.load(make_request("a", resume=path, **(SPEC | change)))
    assert raised.value.reason == reasons.CHECKPOINT_MISMATCH
    assert fresh.slots() == {}


def test_checkpoint_of_another_run_data_or_base_is_refused_by_field(qwen3: Path, llama: Path, tmp_path: Path) -> None:
    _, path = saved(qwen3, tmp_path)
    request = make_request("a", resume=path, **SPEC)
    fresh = make_rank(qwen3, tmp_path)
    for field, wrong in (("uid", replace(request, uid="b")), ("data_digest", replace(request, data_digest="other"))):
        with pytest.raises(RunError, match=field):
            fresh.load(wrong)
    with pytest.raises(RunError, match="base_digest"):
        make_rank(llama, tmp_path).load(request)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "adapter_model.safetensors", "state.json"])
def test_damaged_file_is_found(qwen3: Path, tmp_path: Path, name: str) -> None:
    _, path = saved(qwen3, tmp_path)
    file = Path(path) / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(RunError) as raised:
        make_rank(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC))
    assert raised.value.reason == reasons.STORAGE_ERROR


@pytest.mark.parametrize("name", ["optimizer.safetensors", "adapter_model.safetensors", "adapter_config.json"])
def test_latest_checkpoint_skips_what_is_not_whole(qwen3: Path, tmp_path: Path, name: str) -> None:
    rank, path = saved(qwen3, tmp_path)
    train_step(rank, "a", make_groups("a"))
    newest = Path(save(rank, Cursor()).path)
    directory = tmp_path / "runs/a"
    (directory / ".tmp-step_9-x").mkdir()
    (directory / "step_8").mkdir()
    assert latest_checkpoint(directory) == newest
    assert checkpoints(directory) == [(2, Path(path)), (3, newest)]
    (newest / name).unlink()
    assert latest_checkpoint(directory) == Path(path)
    assert checkpoints(directory) == [(2, Path(path))]
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_only_the_newest_are_kept(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", checkpoint={"keep": 2})
    for left in (".tmp-step_1-crashed", "step_1", ".old-step_0"):  # from interrupted writes, none of them whole
        (tmp_path / "runs/a" / left).mkdir(parents=True)
    for _ in range(4):
        train_step(rank, "a", make_groups("a"))
        save(rank, Cursor())
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir()) == ["step_3", "step_4"]
    prune(tmp_path / "runs/a", 1)
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_4"]


def test_checkpoint_of_the_same_step_replaces_the_old_one(qwen3: Path, tmp_path: Path) -> None:
    rank, path = saved(qwen3, tmp_path)
    again = save(rank, Cursor(6))
    assert again.path == path
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert make_rank(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC)).cursor == Cursor(6)


def test_checkpoint_of_the_same_step_and_content_stays(qwen3: Path, tmp_path: Path) -> None:
    rank, path = saved(qwen3, tmp_path)
    before = (Path(path).stat().st_ino, latest_checkpoint(tmp_path / "runs/a"))
    restored = make_rank(qwen3, tmp_path)
    restored.load(make_request("a", resume=path, **SPEC))
    assert save(restored, Cursor(5, (7, 9))) == save(rank, Cursor(5, (7, 9)))
    assert (Path(path).stat().st_ino, latest_checkpoint(tmp_path / "runs/a")) == before
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]


def test_a_partial_batch_goes_on_bit_for_bit(qwen3: Path, tmp_path: Path) -> None:
    """Suspended after two of five groups; the cursor says so, and the step is that of a run that never stopped."""
    rank = make_rank(qwen3, tmp_path, deterministic=True)
    rank.load(make_request("a", **SPEC))
    train_step(rank, "a", make_groups("a"))
    groups = make_groups("a", count=5, seed=1)
    sums = rank.accumulate(groups[:2]).stats[0].policy
    path = save(rank, Cursor(4), True, 0.5).path
    rank.accumulate(groups[2:])
    whole = rank.step("a", Cursor(7), "1.1")

    resumed = make_rank(qwen3, tmp_path, deterministic=True)
    loaded = resumed.load(make_request("a", resume=path, **SPEC))
    assert (loaded.step, loaded.groups, loaded.cursor, loaded.samples) == (1, 2, Cursor(4), 6)
    assert loaded.policy == sums
    assert sums.tokens > 0
    resumed.accumulate(groups[2:])
    assert resumed.step("a", Cursor(7), "1.1") == whole
    assert all(torch.equal(x, y) for x, y in zip(state(resumed, "a"), state(rank, "a"), strict=True))


def test_what_is_saved_is_a_copy_of_that_moment(qwen3: Path, tmp_path: Path) -> None:
    """It is written on another thread while the run trains on."""
    rank, _ = saved(qwen3, tmp_path)
    rank.accumulate(make_groups("a", seed=8))
    late = rank.capture("a", "late/a", Cursor(9), True, None)
    at_once = rank.capture("a", "at_once/a", Cursor(9), True, None)
    assert late is not None
    assert at_once is not None
    expected = at_once.write().path
    rank.accumulate(make_groups("a", seed=9))
    train_step(rank, "a", make_groups("a", seed=10))
    found = late.write().path
    for name in ("optimizer.safetensors", "adapter_model.safetensors"):
        assert (Path(found) / name).read_bytes() == (Path(expected) / name).read_bytes()


def test_the_best_checkpoint_stays_when_the_run_asks_for_it(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", checkpoint={"keep": 1, "keepBest": True})
    for score in (0.1, 0.9, 0.3, 0.2):
        train_step(rank, "a", make_groups("a"))
        save(rank, Cursor(), False, score)
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir()) == ["step_2", "step_4"]


def test_which_checkpoints_stay_is_said_with_each_capture(qwen3: Path, tmp_path: Path) -> None:
    """The run's spec may have been edited since it was loaded."""
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", checkpoint={"keep": 1})
    for _ in range(3):
        train_step(rank, "a", make_groups("a"))
        save = rank.capture("a", "runs/a", Cursor(), False, Retention(2))
        assert save is not None
        save.write()
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir()) == ["step_2", "step_3"]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(qwen3: Path, tmp_path: Path) -> None:
    rank, _ = saved(qwen3, tmp_path)
    train_step(rank, "a", make_groups("a", seed=2))
    newest = Path(save(rank, Cursor(8)).path) / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    again = make_rank(qwen3, tmp_path)
    loaded = again.load(make_request("a", resume=str(newest.parent), **SPEC))
    assert (loaded.step, loaded.cursor) == (2, Cursor(5, (7, 9)))
    assert "step_3 is damaged" in loaded.passed_over[0]
    train_step(again, "a", make_groups("a", seed=2))
    assert all(torch.equal(x, y) for x, y in zip(state(again, "a"), state(rank, "a"), strict=True))


def fail_second_rename(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The old checkpoint has been set aside; the new one does not come into place."""
    rename = Path.rename

    def once(self: Path, target: Path) -> Path:
        if target.name == "step_2" and self.name.startswith(".tmp-"):
            monkeypatch.setattr(Path, "rename", rename)
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", once)


def test_kill_between_the_renames_leaves_a_checkpoint_to_resume_from(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = saved(qwen3, tmp_path)
    directory = tmp_path / "runs/a"
    fail_second_rename(monkeypatch, KeyboardInterrupt())  # as a kill: nothing is caught or cleaned up
    with pytest.raises(KeyboardInterrupt):
        save(rank, Cursor(6))
    kept = latest_checkpoint(directory)
    assert kept is not None and not (directory / "step_2").exists()
    prune(directory, 1)
    restored = make_rank(qwen3, tmp_path)
    assert restored.load(make_request("a", resume=str(kept), **SPEC)).cursor == Cursor(5, (7, 9))
    assert all(torch.equal(x, y) for x, y in zip(state(restored, "a"), state(rank, "a"), strict=True))

    save(restored, Cursor(6))
    assert [p.name for p in directory.iterdir()] == ["step_2"]


def test_rename_that_fails_puts_the_old_checkpoint_back(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, path = saved(qwen3, tmp_path)
    fail_second_rename(monkeypatch, OSError(5, "Input/output error"))
    with pytest.raises(RunError, match="Input/output error"):
        save(rank, Cursor(6))
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert make_rank(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC)).cursor == Cursor(5, (7, 9))


@pytest.mark.parametrize("end", ["linear", "cosine"])
def test_horizon_of_the_schedule_is_that_of_the_first_load(qwen3: Path, tmp_path: Path, end: str) -> None:
    spec: dict[str, Any] = {"optimizer": {"lr": 1e-2, "minLr": 1e-3, "schedule": end}}
    live = make_rank(qwen3, tmp_path)
    live.load(replace(make_request("a", **spec), target_step=3))
    results = [train_step(live, "a", make_groups("a", seed=step)) for step in range(2)]
    path = save(live, Cursor()).path
    results += [train_step(live, "a", make_groups("a", seed=step)) for step in (2, 3, 4)]

    resumed = make_rank(qwen3, tmp_path)
    resumed.load(replace(make_request("a", resume=path, **spec), target_step=5))  # numStep has grown
    assert [train_step(resumed, "a", make_groups("a", seed=step)) for step in (2, 3, 4)] == results[2:]
    assert [r.lr for r in results[3:]] == pytest.approx([1e-3] * 2)  # at the end of the first horizon
    assert results[2].lr > 1e-3


def test_paths_out_of_the_storage_are_refused(qwen3: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    _, path = saved(qwen3, tmp_path)
    fresh = make_rank(qwen3, root)
    for resume in (path, "../runs/a/step_2"):
        with pytest.raises(RunError, match="outside the pool's storage"):
            fresh.load(make_request("a", resume=resume, **SPEC))
    fresh.load(make_request("a", **SPEC))
    for directory in (str(tmp_path / "runs/b"), "../runs/b"):
        with pytest.raises(RunError, match="outside the pool's storage"):
            fresh.checkpoint("a", directory, Cursor())
    assert not (tmp_path / "runs/b").exists()


def test_storage_that_refuses_is_a_fault_of_the_run(qwen3: Path, tmp_path: Path) -> None:
    rank, _ = saved(qwen3, tmp_path)
    (tmp_path / "blocked").write_text("a file where the directory should be")
    before = state(rank, "a")
    with pytest.raises(RunError) as raised:
        rank.checkpoint("a", "blocked/a", Cursor())
    assert raised.value.reason == reasons.STORAGE_ERROR
    assert all(torch.equal(x, y) for x, y in zip(before, state(rank, "a"), strict=True))


def test_disk_that_fills_up_leaves_the_old_checkpoint_and_no_debris(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, path = saved(qwen3, tmp_path)
    train_step(rank, "a", make_groups("a"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lorafleet_runtime.trainer.checkpoint.os.fsync", full)
    with pytest.raises(RunError, match="No space left"):
        save(rank, Cursor())
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert latest_checkpoint(tmp_path / "runs/a") == Path(path)
