"""`lorafleet replay` comes to the trainer's adapter by other means, after kills, suspensions and lost records, too."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor
from support.replay import DIRECTORY, edit_json, groups_of, recorded, request, run_replay, step_on
from support.trainer import make_rank, make_request, save
from support.trainer_group import running_group


def test_untied_embeddings_and_double_precision(llama: Path, tmp_path: Path) -> None:
    directory = recorded(llama, tmp_path)
    code, output = run_replay(directory, llama, "--dtype", "float64")
    assert code == 0, output


def test_adapter_that_a_run_started_from_keeps_its_rslora_scale(qwen3: Path, tmp_path: Path) -> None:
    """The scale is alpha / sqrt(rank): with alpha / rank the log-probabilities would differ at once."""
    recorded(qwen3, tmp_path, steps=1, saves=(1,))
    source = tmp_path / DIRECTORY / "step_1"
    edit_json(source / "adapter_config.json", use_rslora=True)
    rank = make_rank(qwen3, tmp_path)
    rank.load(replace(request(initFrom=f"{DIRECTORY}/step_1"), name="warm"))
    step_on(rank, groups_of(1))
    rank.checkpoint("a", "team/warm/a", Cursor())
    code, output = run_replay(tmp_path / "team/warm/a", qwen3)
    assert code == 0, output


def test_missing_tail_is_a_gap_when_a_checkpoint_tells_of_it(qwen3: Path, tmp_path: Path) -> None:
    directory = recorded(qwen3, tmp_path, saves=(1, 3))
    for path in [*directory.glob("records/step_00000002.*"), *directory.glob("records/step_00000003.*")]:
        path.unlink()
    code, output = run_replay(directory, qwen3)
    assert (code, "1 steps replayed, 1 checkpoints compared" in output) == (1, True), output
    assert "\nstep 2: its record is missing" in output


def test_without_a_checkpoint_only_a_range_that_was_asked_for_is_fine(qwen3: Path, tmp_path: Path) -> None:
    directory = recorded(qwen3, tmp_path, steps=1, saves=())
    code, output = run_replay(directory, qwen3)
    assert (code, "no adapter was compared; wait for one" in output) == (1, True), output
    code, output = run_replay(directory, qwen3, "--steps", ":")
    assert code == 0, output


@pytest.mark.parametrize("advantage", ["rloo", "reinforce"])
def test_other_estimators_replay(qwen3: Path, tmp_path: Path, advantage: str) -> None:
    directory = recorded(qwen3, tmp_path, steps=2, saves=(2,), algorithm={"advantage": advantage})
    code, output = run_replay(directory, qwen3)
    assert code == 0, output
    algorithm = json.loads((directory / "records/run.json").read_text())["algorithm"]
    edit_json(directory / "records/run.json", algorithm=algorithm | {"advantage": "grpo"})
    code, output = run_replay(directory, qwen3)
    assert code == 1
    assert re.search(r"\nstep 1: .*the advantage of group 0, sample 0 is .* by grpo", output), output


def test_replay_goes_on_from_a_kept_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    directory = recorded(qwen3, tmp_path, saves=(1, 3))
    (directory / "records/step_00000001.json").unlink()
    code, output = run_replay(directory, qwen3, "--steps", "2:3")
    assert (code, "2 steps replayed, 1 checkpoints compared" in output) == (0, True), output


def test_run_killed_after_a_step_redoes_it_and_its_record(qwen3: Path, tmp_path: Path) -> None:
    directory = recorded(qwen3, tmp_path, steps=3, saves=(2,))  # step 3 is lost with the trainer
    before = load_file(directory / "records/step_00000003.safetensors")
    rank = make_rank(qwen3, tmp_path)
    rank.load(request(str(directory / "step_2")))
    assert not (directory / "records/step_00000003.json").exists()
    step_on(rank, groups_of(7))
    rank.checkpoint("a", DIRECTORY, Cursor())
    after = load_file(directory / "records/step_00000003.safetensors")
    assert before["token_ids"].tolist() != after["token_ids"].tolist()
    code, output = run_replay(directory, qwen3)
    assert code == 0, output


def suspended(model: Path, storage: Path) -> Path:
    """One step, then one of two groups, then a checkpoint with its gradient."""
    rank = make_rank(model, storage)
    rank.load(request())
    step_on(rank, groups_of(1))
    rank.accumulate(groups_of(2)[:1])
    return Path(save(rank, Cursor(), partial=True, directory=DIRECTORY).path)


def test_groups_before_a_suspension_are_in_the_record_of_their_step(qwen3: Path, tmp_path: Path) -> None:
    checkpoint = suspended(qwen3, tmp_path)
    rank = make_rank(qwen3, tmp_path)
    assert rank.load(request(str(checkpoint))).groups == 1
    assert step_on(rank, groups_of(2)[1:]).unrecorded == ""
    rank.checkpoint("a", DIRECTORY, Cursor())
    code, output = run_replay(tmp_path / DIRECTORY, qwen3)
    assert code == 0, output
    assert "2 steps replayed, 2 checkpoints compared" in output


def test_log_probabilities_of_other_data_parallel_ranks_are_recorded(
    qwen3: Path, tmp_path: Path, ray_here: None
) -> None:
    """Also those of an unfinished step, which a trainer of one rank goes on with."""
    directory = tmp_path / DIRECTORY
    with running_group(qwen3, tmp_path, dp=2, tp=1) as group:
        group.call("load", request(rolloutBatchSize=3))
        group.call("accumulate", groups_of(1, count=3))
        assert group.call("step", "a", Cursor(3), "1.1").unrecorded == ""
        group.call("accumulate", groups_of(2))
        checkpoint = group.checkpoint("a", directory, partial=True).path
    rank = make_rank(qwen3, tmp_path)
    rank.load(request(checkpoint, rolloutBatchSize=3))
    assert step_on(rank, groups_of(3)[:1]).unrecorded == ""
    rank.checkpoint("a", DIRECTORY, Cursor())
    for step, samples in ((1, 9), (2, 9)):
        record = load_file(directory / f"records/step_{step:08d}.safetensors")
        assert len(record["advantage"]) == samples
        assert record["old_offsets"].tolist() == record["token_offsets"].tolist()
    code, output = run_replay(directory, qwen3)
    assert (code, "2 steps replayed, 2 checkpoints compared" in output) == (0, True), output


def test_a_later_unfinished_step_takes_nothing_from_an_earlier_one(qwen3: Path, tmp_path: Path) -> None:
    """Step 2 has a group when the run is suspended; so has step 4 later, but that checkpoint is lost."""
    checkpoint = suspended(qwen3, tmp_path)
    rank = make_rank(qwen3, tmp_path)
    rank.load(request(str(checkpoint)))
    step_on(rank, groups_of(2)[1:])
    step_on(rank, groups_of(3))
    rank.accumulate(groups_of(4)[:1])
    lost = rank.capture("a", DIRECTORY, Cursor(), partial=True)
    assert lost is not None and lost.pending is not None
    lost.pending.write()  # and then the disk was full
    again = make_rank(qwen3, tmp_path)
    assert again.load(request(str(checkpoint))).groups == 1
    assert step_on(again, groups_of(2)[1:]).unrecorded == ""
    again.checkpoint("a", DIRECTORY, Cursor())
    code, output = run_replay(tmp_path / DIRECTORY, qwen3)
    assert (code, "2 steps replayed, 2 checkpoints compared" in output) == (0, True), output


def trainer_of(node: Path, model: Path, storage: Path, jobs: list[Callable[[], None]]) -> TrainerRank:
    """With a thread that brings records to storage when the test calls `jobs`."""
    spec = {"baseModel": {"path": str(model), "dtype": "float32"}, "slots": 4, "maxRank": 16}
    pool = AdapterPoolSpec.model_validate(spec)
    return TrainerRank(pool, str(model), str(storage), snapshots=node, defer=jobs.append)


def test_steps_wait_for_no_storage_and_a_successor_brings_their_records(qwen3: Path, tmp_path: Path) -> None:
    jobs: list[Callable[[], None]] = []
    storage = tmp_path / "storage"
    rank = trainer_of(tmp_path / "node", qwen3, storage, jobs)
    rank.load(request())
    step_on(rank, groups_of(1))
    step_on(rank, groups_of(2))
    assert not storage.exists() and len(jobs) == 1
    late: list[Callable[[], None]] = []  # the first trainer is killed while its storage hangs
    again = trainer_of(tmp_path / "node", qwen3, storage, late)
    assert again.load(request()).step == 2
    step_on(again, groups_of(3))
    save = again.capture("a", DIRECTORY, Cursor())
    assert save is not None and not storage.exists()
    for job in late:
        job()
    save.write()
    again.drop("a")
    code, output = run_replay(storage / DIRECTORY, qwen3)
    assert (code, "3 steps replayed, 1 checkpoints compared" in output) == (0, True), output


def test_a_record_that_was_refused_is_tried_again_when_its_run_is_dropped(qwen3: Path, tmp_path: Path) -> None:
    jobs: list[Callable[[], None]] = []
    storage = tmp_path / "storage"
    rank = trainer_of(tmp_path / "node", qwen3, storage, jobs)
    rank.load(request())
    step_on(rank, groups_of(1))
    storage.write_text("a file where the folder should be")
    jobs.pop()()
    storage.unlink()
    assert "records cannot be written to" in rank.drop("a")  # nobody asks this trainer of this run any more
    assert rank.drop("a") == ""
    jobs.pop()()
    assert (storage / DIRECTORY / "records/step_00000001.json").exists()
    assert [path for path in (tmp_path / "node").rglob("*") if path.is_file()] == []


def test_records_of_a_run_that_ended_unseen_are_brought_to_storage(qwen3: Path, tmp_path: Path) -> None:
    rank = trainer_of(tmp_path / "node", qwen3, tmp_path / "storage", [])
    rank.load(request())
    step_on(rank, groups_of(1))
    jobs: list[Callable[[], None]] = []
    trainer_of(tmp_path / "node", qwen3, tmp_path / "storage", jobs).retain([])
    jobs.pop()()
    assert (tmp_path / "storage" / DIRECTORY / "records/step_00000001.json").exists()


def test_lost_record_of_an_unfinished_step_is_a_gap_and_said(qwen3: Path, tmp_path: Path) -> None:
    checkpoint = suspended(qwen3, tmp_path)
    (tmp_path / DIRECTORY / "records/pending_00000002.json").unlink()
    rank = make_rank(qwen3, tmp_path)
    rank.load(request(str(checkpoint)))
    assert "recordSteps: the record of step 2 cannot be written" in step_on(rank, groups_of(2)[1:]).unrecorded
    assert step_on(rank, groups_of(3)).unrecorded == ""
    code, output = run_replay(tmp_path / DIRECTORY, qwen3)
    assert code == 1
    assert "1 steps replayed" in output and "\nstep 2: its record is missing" in output


def test_storage_that_refuses_a_record_costs_the_record_and_not_the_step(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    blocked = tmp_path / DIRECTORY / "records"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the folder should be")
    rank.load(request())
    told = step_on(rank, groups_of(1))
    assert told.step == 1
    assert "run.json and the initial adapter cannot be written" in told.unrecorded
    assert "the record of step 1 cannot be written" in told.unrecorded
    blocked.unlink()
    assert step_on(rank, groups_of(2)).unrecorded == ""
    code, output = run_replay(tmp_path / DIRECTORY, qwen3)
    assert code == 1 and output.startswith("0 steps replayed, 0 checkpoints compared\nstep 1: its record is missing")
    initial = load_file(blocked / "initial/adapter_model.safetensors")
    assert all(not tensor.any() for key, tensor in initial.items() if "lora_B" in key)  # not that of step 1


def test_groups_that_take_no_pass_are_recorded_without_logprobs(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    rank.load(request())
    plain, other = groups_of(1)
    equal = replace(plain, samples=tuple(replace(s, reward=1.0, advantage=0.0) for s in plain.samples))
    step_on(rank, [equal, other])
    rank.checkpoint("a", DIRECTORY, Cursor())
    record = load_file(tmp_path / DIRECTORY / "records/step_00000001.safetensors")
    assert record["old_offsets"].tolist() == [0, 0, 0, 0, 5, 6, 14]
    assert record["token_offsets"].tolist() == [0, 5, 6, 14, 19, 20, 28]
    code, output = run_replay(tmp_path / DIRECTORY, qwen3)
    assert code == 0, output


def test_another_base_model_is_refused_by_its_digest(qwen3: Path, llama: Path, tmp_path: Path) -> None:
    directory = recorded(qwen3, tmp_path, steps=1, saves=(1,))
    code, output = run_replay(directory, llama)
    assert code == 1
    assert re.match(r"error: base-model: .*: its digest is \w{12}\.\.\., the run trained on ", output)


def test_run_that_does_not_record_leaves_nothing(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    rank.load(make_request("a"))
    step_on(rank, groups_of(1))
    assert not (tmp_path / DIRECTORY).exists()
