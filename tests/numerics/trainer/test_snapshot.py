"""Snapshots: a trainer that dies between two checkpoints costs no step; what cannot be trusted is not read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, RunFault, StepResult
from support.trainer import make_groups, make_request, save

SPEC: dict[str, Any] = {"optimizer": {"lr": 1e-2, "schedule": "cosine", "warmupSteps": 2}}


def trainer(model: Path, folder: Path) -> TrainerRank:
    spec = {"baseModel": {"path": str(model), "dtype": "float32"}, "slots": 4, "maxRank": 16}
    return TrainerRank(AdapterPoolSpec.model_validate(spec), str(model), str(folder), snapshots=folder / "node")


def step(rank: TrainerRank, uid: str, number: int) -> StepResult:
    assert not rank.accumulate(make_groups(uid, seed=number)).faults
    result = rank.step(uid, Cursor(2 * number + 2, (2 * number + 5,)), "4.2")
    assert not isinstance(result, RunFault)
    assert rank.snapshotted(result.snapshot)
    return result


def state(rank: TrainerRank, uid: str) -> list[Tensor]:
    return [rank.adapter(uid).master, *rank._slot(uid).optimizer.moments]


def stepped(model: Path, folder: Path, steps: int = 3) -> TrainerRank:
    rank = trainer(model, folder)
    rank.load(make_request("a", **SPEC))
    for number in range(steps):
        step(rank, "a", number)
    return rank


def test_a_new_trainer_goes_on_bit_for_bit(qwen3: Path, tmp_path: Path) -> None:
    rank = stepped(qwen3, tmp_path / "killed")
    rank.accumulate(make_groups("a", seed=7))  # lost with the kill
    whole = stepped(qwen3, tmp_path / "whole", steps=5)

    again = trainer(qwen3, tmp_path / "killed")
    loaded = again.load(make_request("a", slot=2, **SPEC))
    assert (loaded.step, loaded.cursor, loaded.incarnation) == (3, Cursor(6, (9,)), "4.2")
    for number in (3, 4):
        step(again, "a", number)
    assert all(torch.equal(x, y) for x, y in zip(state(again, "a"), state(whole, "a"), strict=True))


@pytest.mark.parametrize(("saved_at", "resumed_at"), [(1, 3), (3, 3)])
def test_the_newer_of_snapshot_and_checkpoint_counts(
    qwen3: Path, tmp_path: Path, saved_at: int, resumed_at: int
) -> None:
    rank = trainer(qwen3, tmp_path)
    rank.load(make_request("a", **SPEC))
    for number in range(saved_at):
        step(rank, "a", number)
    path = save(rank, Cursor(77)).path
    for number in range(saved_at, 3):
        step(rank, "a", number)
    loaded = trainer(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC))
    assert loaded.step == resumed_at
    assert (loaded.cursor == Cursor(77)) == (saved_at == 3)  # the checkpoint of the same step is the durable one


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_snapshot_is_passed_over(qwen3: Path, tmp_path: Path, size: int) -> None:
    rank = trainer(qwen3, tmp_path)
    rank.load(make_request("a", **SPEC))
    step(rank, "a", 0)
    path = save(rank, Cursor()).path
    step(rank, "a", 1)
    snapshot = tmp_path / "node/a.safetensors"
    snapshot.write_bytes(snapshot.read_bytes()[:size])
    assert trainer(qwen3, tmp_path).load(make_request("a", resume=path, **SPEC)).step == 1


def test_a_snapshot_from_before_a_reboot_is_passed_over(qwen3: Path, tmp_path: Path) -> None:
    stepped(qwen3, tmp_path)
    path = tmp_path / "node/a.safetensors"
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    save_file(load_file(path), path, metadata={"about": json.dumps(about | {"boot": "another"})})
    assert trainer(qwen3, tmp_path).load(make_request("a", **SPEC)).step == 0


def test_a_snapshot_of_another_rank_is_refused_by_name(qwen3: Path, tmp_path: Path) -> None:
    stepped(qwen3, tmp_path)
    with pytest.raises(RunError, match="rank is 4, the run's is 8") as raised:
        trainer(qwen3, tmp_path).load(make_request("a", **SPEC, rank=8))
    assert raised.value.reason == reasons.CHECKPOINT_MISMATCH


def test_a_dropped_run_leaves_a_snapshot_only_when_it_comes_back_for_it(qwen3: Path, tmp_path: Path) -> None:
    rank = stepped(qwen3, tmp_path)
    rank.drop("a", keep_snapshot=True)
    assert rank.load(make_request("a", **SPEC)).step == 3
    rank.drop("a")
    assert rank.load(make_request("a", **SPEC)).step == 0


def test_retain_removes_what_is_not_named(qwen3: Path, tmp_path: Path) -> None:
    rank = stepped(qwen3, tmp_path)
    rank.load(make_request("b", slot=1, **SPEC))
    step(rank, "b", 0)
    rank.retain(["b", "unknown"])
    step(rank, "b", 1)  # files are removed and written in order
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["b.safetensors"]


def test_a_folder_that_cannot_be_written_costs_the_snapshot_and_not_the_step(
    qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = stepped(qwen3, tmp_path, steps=1)
    shutil.rmtree(tmp_path / "node")
    assert step(rank, "a", 1).step == 2
    assert "no snapshot of step 2" in caplog.text
