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
from lorafleet_runtime.trainer.checkpoint import find_latest, prune
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor
from support.trainer import load, make_groups, make_rank, make_request, train_step

SPEC: dict[str, Any] = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmupSteps": 2}}


def state(rank: TrainerRank, uid: str) -> list[Tensor]:
    return [rank.adapter(uid).master.clone(), *(m.clone() for m in rank._slot(uid).optimizer.moments)]


def saved(model: Path, storage: Path, steps: int = 2) -> tuple[TrainerRank, str]:
    rank = make_rank(model, storage)
    rank.load(make_request("a", **SPEC))
    for step in range(steps):
        train_step(rank, "a", make_groups("a", seed=step))
    return rank, rank.checkpoint("a", "runs/a", Cursor(5, (7, 9))).path


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


def test_find_latest_skips_what_is_not_whole(qwen3: Path, tmp_path: Path) -> None:
    rank, path = saved(qwen3, tmp_path)
    train_step(rank, "a", make_groups("a"))
    newest = Path(rank.checkpoint("a", "runs/a", Cursor()).path)
    directory = tmp_path / "runs/a"
    (directory / ".tmp-step_9-x").mkdir()
    (directory / "step_8").mkdir()
    assert find_latest(directory) == newest
    (newest / "optimizer.safetensors").unlink()
    assert find_latest(directory) == Path(path)
    assert find_latest(tmp_path / "nowhere") is None


def test_only_the_newest_are_kept(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", checkpoint={"keep": 2})
    (tmp_path / "runs/a/.tmp-step_1-crashed").mkdir(parents=True)
    for _ in range(4):
        train_step(rank, "a", make_groups("a"))
        rank.checkpoint("a", "runs/a", Cursor())
    assert sorted(p.name for p in (tmp_path / "runs/a").iterdir()) == ["step_3", "step_4"]
    prune(tmp_path / "runs/a", 1)
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_4"]


def test_checkpoint_of_the_same_step_replaces_the_old_one(qwen3: Path, tmp_path: Path) -> None:
    rank, path = saved(qwen3, tmp_path)
    again = rank.checkpoint("a", "runs/a", Cursor(6))
    assert again.path == path
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert make_rank(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC)).cursor == Cursor(6)


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
        rank.checkpoint("a", "runs/a", Cursor())
    assert [p.name for p in (tmp_path / "runs/a").iterdir()] == ["step_2"]
    assert find_latest(tmp_path / "runs/a") == Path(path)
