"""A few kills of a trainer, two of them inside a write; `make test-durability` makes many."""

from pathlib import Path

import pytest

from support.kill_child import Catch
from support.kills import RUNS, Progress, Trainer, arrival, check, kill_over_and_over, make_place, recorded
from support.trainer import make_micro_model


def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = make_micro_model(tmp_path / "model")
    story = kill_over_and_over(make_place(tmp_path / "killed", model), kills=4, seed=3)
    assert [life.cause == "at a random moment" for life in story.lives] == [True, False, True, False]
    check(story, make_place(tmp_path / "whole", model))


@pytest.mark.parametrize("seam", ["half of snapshot", "before the snapshot's rename"])
def test_a_step_whose_snapshot_is_killed_was_not_told_of_and_held_up_nobody(tmp_path: Path, seam: str) -> None:
    place = make_place(tmp_path, make_micro_model(tmp_path / "model"))
    batches = {uid: [recorded(uid, arrival(number)) for number in range(RUNS[uid][0])] for uid in "ab"}
    trainer = Trainer(place, Catch(seam, 0), None)
    assert not trainer.call_at_the_seam("accumulate", batches["a"]).faults
    made = trainer.call_at_the_seam("step", "a", Progress("a", consumed=len(batches["a"])).cursor)
    assert made.step == 1
    assert not trainer.call_at_the_seam("accumulate", batches["b"]).faults  # its lane goes on
    assert trainer.call_at_the_seam("step", "b", Progress("b", consumed=len(batches["b"])).cursor).step == 1
    assert trainer.call_at_the_seam("snapshotted", made.snapshot) is None
    trainer.kill()
    again = Trainer(place, None, None)
    assert [(loaded.step, loaded.groups) for loaded in again.loaded] == [(0, 0)] * len(RUNS)
    again.kill()
