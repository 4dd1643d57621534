"""Batch-normalised advantages (REINFORCE++, Hu 2025): the mean and deviation of a step's whole batch. Pure.

Called by the train task for runs with algorithm.advantage reinforce. Their groups come with the reward as advantage;
once a step's whole batch is buffered, `whitening` fixes the figures for that step, and every slice of the batch that
goes to the trainer is changed by the same ones. The raw groups are kept, so a slice that is trained again after the
trainer died is the same slice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorafleet_runtime.rollout.advantages import STD_EPSILON
from lorafleet_runtime.types import PromptGroup


@dataclass(frozen=True, slots=True)
class Whitening:
    """What turns the rewards of one step's batch into advantages."""

    step: int
    """Steps that the run had made when this was fixed; of no use after the next one."""
    mean: float
    scale: float
    """1 / (standard deviation + 1e-6), or 1 without stdNorm; 0 for a batch of equal rewards, so that they give exact
    zeros."""

    def apply(self, group: PromptGroup) -> PromptGroup:
        """The group with advantages (reward - mean) x scale."""
        samples = tuple(replace(s, advantage=(s.reward - self.mean) * self.scale) for s in group.samples)
        return replace(group, samples=samples)


def whitening(step: int, groups: Sequence[PromptGroup], std_norm: bool) -> Whitening:
    """Fix the figures of a step.

    Args:
        step: steps that the run has made.
        groups: the whole batch, rolloutBatchSize groups of nSamplesPerPrompt samples; truncated ones count too.
        std_norm: divide by the unbiased standard deviation plus 1e-6.
    """
    rewards = [s.reward for group in groups for s in group.samples]
    mean = math.fsum(rewards) / len(rewards)
    if all(r == rewards[0] for r in rewards):
        return Whitening(step, mean, 0.0)
    if not std_norm:
        return Whitening(step, mean, 1.0)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return Whitening(step, mean, 1.0 / (std + STD_EPSILON))
