"""Advantages against values derived by hand."""

import pytest

from lorafleet_runtime.rollout.advantages import group_advantages


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # mean 0.25, centred (.75, -.25, -.25, -.25), sum of squares .75, variance .75 / 3 = .25, deviation .5
    got = group_advantages([1, 0, 0, 0], "grpo", True)
    assert got == pytest.approx([0.75 / 0.500001] + [-0.25 / 0.500001] * 3, rel=1e-12)


def test_grpo_without_deviation_only_centres() -> None:
    assert group_advantages([1, 0, 0, 0], "grpo", False) == (0.75, -0.25, -0.25, -0.25)


def test_rloo_uses_the_mean_of_the_others() -> None:
    # 4 - (1 + 1) / 2, 1 - (4 + 1) / 2, 1 - (4 + 1) / 2; stdNorm does not act
    for std_norm in (True, False):
        assert group_advantages([4, 1, 1], "rloo", std_norm) == (3.0, -1.5, -1.5)


def test_reinforce_is_the_reward() -> None:
    assert group_advantages([0.5, 0.5, -1], "reinforce", True) == (0.5, 0.5, -1.0)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 8, [1.0], [-2.0] * 2])
def test_a_constant_group_gives_exact_zeros(estimator: str, rewards: list[float]) -> None:
    got = group_advantages(rewards, estimator, True)  # type: ignore[arg-type]
    assert all(a == 0.0 for a in got) and len(got) == len(rewards)
