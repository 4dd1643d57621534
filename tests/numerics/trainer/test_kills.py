"""A few kills of a trainer, two of them inside a write; `make test-durability` makes many."""

from pathlib import Path

from support.kills import check, kill_over_and_over, make_place
from support.trainer import make_micro_model


def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = make_micro_model(tmp_path / "model")
    story = kill_over_and_over(make_place(tmp_path / "killed", model), kills=4, seed=3)
    assert [life.cause == "at a random moment" for life in story.lives] == [True, False, True, False]
    check(story, make_place(tmp_path / "whole", model))
