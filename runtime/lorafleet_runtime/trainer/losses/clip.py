"""The clipped policy term: PPO's ratio clip with its own bound on each side, and the dual clip.

Called by policy.py; plain differentiable arithmetic, no state.
"""

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
NO_DUAL_CLIP = 1e30
"""A dual clip that never acts."""


def clipped_loss(
    logprob: Tensor, old: Tensor, advantage: Tensor, clip_low: Tensor, clip_high: Tensor, dual_clip: Tensor
) -> Tensor:
    """Loss of each token, with gradient through `logprob`.

    With r = exp(logprob - old) it is max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)): PPO (Schulman et al. 2017,
    eq. 7), with different bounds as in DAPO (Yu et al. 2025, "clip higher"). Where A < 0 it is at most -A dual_clip
    (Ye et al. 2020, "dual-clip PPO"): a token that became much likelier although it is bad pulls no harder than that.

    Args:
        logprob: [N] under the policy in training.
        old: [N] under the policy that the ratio is taken against, without gradient.
        advantage: [N].
        clip_low: [N], at least 0.
        clip_high: [N], at least 0.
        dual_clip: [N], above 1; NO_DUAL_CLIP where it is off.

    Returns:
        [N]. |logprob - old| above 20 counts as 20 and has slope 0: exp would overflow, and the zero gradient of the
        clipped branch would become 0 x inf.
    """
    ratio = _ratio(logprob, old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    bounded = torch.minimum(loss, -advantage * dual_clip)
    return torch.where(advantage < 0, bounded, loss)


def stopped(
    logprob: Tensor, old: Tensor, advantage: Tensor, clip_low: Tensor, clip_high: Tensor, dual_clip: Tensor
) -> Tensor:
    """Which tokens have no gradient because of a clip; arguments as for `clipped_loss`.

    [N] bool: r > 1 + clip_high where A > 0; r < 1 - clip_low or r > dual_clip where A < 0. A token with A = 0 has no
    gradient that a clip could stop. These are the tokens of verl's actor/pg_clipfrac and actor/pg_clipfrac_lower
    together; without dual clip also those of TRL's clip_ratio/region_mean.
    """
    ratio = _ratio(logprob, old)
    above, below = ratio > 1 + clip_high, (ratio < 1 - clip_low) | (ratio > dual_clip)
    return (advantage > 0) & above | (advantage < 0) & below


def _ratio(logprob: Tensor, old: Tensor) -> Tensor:
    return (logprob - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
