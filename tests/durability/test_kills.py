"""A trainer killed again and again trains what one that nobody kills trains. `make test-durability`."""

from pathlib import Path

from support.kills import check, kill_over_and_over, make_place, table
from support.trainer import make_micro_model

KILLS = 36


def test_a_trainer_killed_at_any_moment_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = make_micro_model(tmp_path / "model")
    story = kill_over_and_over(make_place(tmp_path / "killed", model), KILLS, seed=7)
    print("\n" + table(story.lives))
    assert len(story.lives) == KILLS >= 30
    check(story, make_place(tmp_path / "whole", model))
