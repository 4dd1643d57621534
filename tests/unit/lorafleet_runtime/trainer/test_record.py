"""The recorder's files: what they hold, and what a crash or a full disk leaves."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer import record_files
from lorafleet_runtime.trainer.batch import Work, make_micro_batch, sample_values
from lorafleet_runtime.trainer.losses.policy import LossParams
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.record import StepRecorder, read_unfinished
from lorafleet_runtime.trainer.record_files import Start, StepFigures
from lorafleet_runtime.types import Cursor, PromptGroup, Sample, VersionId

ONE = Ranks(0, 1, 1)
START = Start({"format": 1}, {"peft_type": "LORA"}, {"a": torch.ones(2)})


def group(index: int, *responses: tuple[int, ...], truncated: bool = False) -> PromptGroup:
    samples = tuple(Sample(ids, tuple(-0.5 for _ in ids), 1.0, 0.25, truncated) for ids in responses)
    return PromptGroup("a", VersionId("a", "2.1", 3), index, (7, 8, index), samples)


def recorder(folder: Path, mask_truncated: bool = False) -> StepRecorder:
    made = StepRecorder("a", folder, torch.float32, mask_truncated)
    made.start(START, 0)
    return made


def add(to: StepRecorder, *groups: PromptGroup) -> None:
    """As computed by this rank; each token's log-probability is minus its id."""
    values: dict[tuple[int, int], Tensor] = {
        (id(g.prompt_ids), id(s)): -torch.tensor(s.token_ids, dtype=torch.float32) for g in groups for s in g.samples
    }
    to.add(groups, groups, values)


def figures(step: int) -> StepFigures:
    return StepFigures(step, 0.1, 2.5, 3, "2.1", Cursor(4, (6,)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("dtype", "per_token"), [(torch.float32, 12), (torch.float64, 20)])
def test_what_a_record_takes_on_the_disk(tmp_path: Path, dtype: torch.dtype, per_token: int) -> None:
    """As docs/replay.md says: per response token, per prompt token, per sample, per group and per step."""
    made = StepRecorder("a", tmp_path, dtype, False)
    made.start(START, 0)
    groups = [group(index, *[tuple(range(64))] * 8) for index in range(4)]
    add(made, *groups)
    assert made.write(figures(1), ONE) == ""
    taken = sum(path.stat().st_size for path in tmp_path.glob("step_*"))
    contents = per_token * 4 * 8 * 64 + 4 * 4 * 3 + (30 if dtype == torch.float32 else 34) * 4 * 8
    assert contents < taken < contents + 80 * 4 + 1500


def test_record_holds_every_sample_flat_with_offsets(tmp_path: Path) -> None:
    made = recorder(tmp_path, mask_truncated=True)
    add(made, group(5, (1, 2), (3,)), group(6, (4, 5, 6), truncated=True))
    assert made.write(figures(1), ONE) == ""
    arrays = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "step_00000001.safetensors").items()}
    assert arrays == {
        "group_index": [5, 6], "prompt_ids": [7, 8, 5, 7, 8, 6], "prompt_offsets": [0, 3, 6],
        "sample_offsets": [0, 2, 3], "token_ids": [1, 2, 3, 4, 5, 6], "token_offsets": [0, 2, 3, 6],
        "sampler_logprobs": [-0.5] * 6, "old_logprobs": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
        "old_offsets": [0, 2, 3, 6], "advantage": [0.25] * 3, "reward": [1.0] * 3, "truncated": [0, 0, 1],
        "loss_mask": [1, 1, 0],
    }  # fmt: skip
    about = json.loads((tmp_path / "step_00000001.json").read_text())
    assert len(about.pop("sha256")) == 64
    assert about == {
        "format": 1, "step": 1, "lr": 0.1, "gradNorm": 2.5, "denominator": 3, "groups": 2, "samples": 3, "tokens": 6,
        "rewardMean": 1.0, "incarnation": "2.1", "cursor": {"low": 4, "consumed": [6]},
        "versions": ["a@2.1.v3", "a@2.1.v3"],
    }  # fmt: skip


def test_load_removes_later_records_and_leftovers_and_keeps_the_beginning(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    for step in (1, 2, 3):
        add(made, group(step, (1,)))
        made.write(figures(step), ONE)
        made.discard()
    (tmp_path / ".tmp-step_00000004.safetensors").write_bytes(b"cut")
    StepRecorder("a", tmp_path, torch.float32, False).start(None, 2)
    kept = [f"step_0000000{step}.{suffix}" for step in (1, 2) for suffix in ("json", "safetensors")]
    assert names(tmp_path) == ["initial", "run.json", *kept]


def test_full_disk_leaves_no_record_and_not_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder(tmp_path)
    add(made, group(1, (1,)))
    made.write(figures(1), ONE)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_files, "save_file", full)
    told = made.write(figures(1), ONE)
    assert "the record of step 1 cannot be written" in told and "No space left on device" in told
    assert names(tmp_path) == ["initial", "run.json"]


def test_unfinished_step_comes_back_for_as_many_groups_as_the_checkpoint_has(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    add(made, group(5, (1, 2)), group(6, (3,)))
    pending = made.pending(4, ONE)
    assert pending is not None
    pending.write()
    again = StepRecorder("a", tmp_path, torch.float32, False)
    again.start(None, 3)
    again.restore(1, read_unfinished("a", tmp_path, 4, 1))
    add(again, group(9, (8, 8)))
    assert again.write(figures(4), ONE) == ""
    arrays = load_file(tmp_path / "step_00000004.safetensors")
    assert arrays["group_index"].tolist() == [5, 9]
    assert arrays["old_logprobs"].tolist() == [-1.0, -2.0, -8.0, -8.0]


def test_record_of_fewer_groups_than_the_checkpoint_has_is_not_taken(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    add(made, group(5, (1, 2)), group(6, (3,)))
    pending = made.pending(4, ONE)
    assert pending is not None
    pending.write()
    made.restore(3, read_unfinished("a", tmp_path, 4, 3))
    add(made, group(9, (8,)))
    assert "it holds 2 groups of step 4, not 3 of step 4" in made.write(figures(4), ONE)
    assert not (tmp_path / "step_00000004.json").exists()


def test_unfinished_steps_have_records_of_their_own_while_a_checkpoint_may_need_them(tmp_path: Path) -> None:
    records = tmp_path / "records"
    made = recorder(records)
    for step in (4, 6):
        add(made, group(step, (1,)))
        pending = made.pending(step, ONE)
        assert pending is not None
        pending.write()
        made.write(figures(step), ONE)
        made.discard()
    for name in ("step_3", "step_5"):
        (tmp_path / name).mkdir()
    record_files.clean_pending(records)
    assert [path.name for path in sorted(records.glob("pending_*.json"))] == [
        "pending_00000004.json", "pending_00000006.json",
    ]  # fmt: skip
    (tmp_path / "step_3").rmdir()
    record_files.clean_pending(records)
    assert [path.name for path in sorted(records.glob("pending_*"))] == [
        "pending_00000006.json", "pending_00000006.safetensors",
    ]  # fmt: skip
    (records / "step_00000006.json").unlink()
    (tmp_path / "step_5").rmdir()
    record_files.clean_pending(records)
    assert (records / "pending_00000006.json").exists()  # its step has no record yet


def test_rank_without_files_has_only_its_own_groups_log_probabilities(tmp_path: Path) -> None:
    made = StepRecorder("a", None, torch.float32, False)
    made.start(None, 0)
    mine, other = group(1, (1,)), group(2, (2,))
    values = {(id(mine.prompt_ids), id(mine.samples[0])): torch.tensor([-1.0])}
    made.add([other, mine], [mine], values)
    assert {place: [t.tolist() for t in kept] for place, kept in made._logprobs.items()} == {1: [[-1.0]]}
    assert made.write(figures(1), ONE) == ""


def test_values_of_a_pass_go_back_to_their_samples() -> None:
    """The labels' own ids, sent through the order of a pass and back."""

    params = LossParams.from_spec(AdapterRunSpec.model_validate({"poolRef": {"name": "p"}, "data": "d", "rmType": "m"}))
    groups = [group(1, (11, 12, 13), (14,)), group(2, (15, 16))]
    work = [Work(0, params, g.prompt_ids, g.samples) for g in groups]
    labels = make_micro_batch(work, torch.device("cpu"), torch.float32).head.label
    values = [[tuple(t.tolist()) for t in mine] for mine in sample_values(work, labels)]
    assert values == [[s.token_ids for s in g.samples] for g in groups]
