"""Group-relative advantages of REINFORCE-style estimators.

With reinforce (REINFORCE++) the baseline is the whole step's batch, which no rollout worker sees: the group leaves with
its rewards, and the loop puts the advantages in (loop/whiten.py).

Called by the rollout worker for each group; pure. Truncated samples keep their place in the group's baseline, also
with maskTruncated: their rewards were sampled from the same policy, and leaving them out would shift the baseline
towards short answers. maskTruncated acts in the loss alone, where the trainer drops their tokens.
"""

import math
from collections.abc import Sequence
from typing import Literal

STD_EPSILON = 1e-6
"""Added to the standard deviation, as in DeepSeekMath's GRPO implementations."""


def group_advantages(
    rewards: Sequence[float], estimator: Literal["grpo", "rloo", "reinforce"], std_norm: bool
) -> tuple[float, ...]:
    """The advantage of each sample of one group.

    grpo (Shao et al. 2024, DeepSeekMath): reward minus group mean, with std_norm divided by the unbiased standard
    deviation plus 1e-6. rloo (Ahmadian et al. 2024): reward minus the mean of the other samples. reinforce: the reward,
    for the loop to normalise.
    A group whose rewards are all equal, so also a group of one, gives exact zeros for grpo and rloo.

    Args:
        rewards: [G], finite.
        estimator: the run's algorithm.advantage.
        std_norm: the run's algorithm.stdNorm; acts on grpo here.

    Returns:
        [G]
    """
    if estimator == "reinforce":
        return tuple(float(r) for r in rewards)
    size = len(rewards)
    if all(r == rewards[0] for r in rewards):
        return (0.0,) * size
    mean = math.fsum(rewards) / size
    centred = [r - mean for r in rewards]
    if estimator == "rloo":  # r - (sum - r) / (G - 1) = (r - mean) * G / (G - 1)
        return tuple(c * size / (size - 1) for c in centred)
    if not std_norm:
        return tuple(centred)
    std = math.sqrt(math.fsum(c * c for c in centred) / (size - 1))
    return tuple(c / (std + STD_EPSILON) for c in centred)
