"""The weight that corrects for the sampler: trainer and engine give a token slightly different probabilities.

Called by policy.py; the weight has no gradient.
"""

import torch
from torch import Tensor

OFF, CLIP, MASK = 0, 1, 2
"""tisMode as PolicyTokens holds it."""
MODES = {"Off": OFF, "Clip": CLIP, "Mask": MASK}


def mismatch_weight(trainer: Tensor, sampler: Tensor, mode: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """Importance weight of each token, w = exp(trainer - sampler) bounded by the run's tisMode.

    Off: 1. Clip: w clamped to [floor, cap]: truncated importance sampling (Yao et al. 2025; slime's tis_clip and
    tis_clip_low). Mask: w where floor <= w <= cap, else 0, so the token leaves the numerator and stays in the
    denominator: IcePop (Ring-1T, 2025).

    Args:
        trainer: [N] log-probabilities of the sampled tokens by the trainer, at the sampler's temperature.
        sampler: [N] by the engine.
        mode: [N], OFF, CLIP or MASK.
        floor: [N], at least 0.
        cap: [N], at least floor.

    Returns:
        [N], finite also where exp overflows.
    """
    ratio = (trainer - sampler).detach().exp()
    clamped = torch.minimum(torch.maximum(ratio, floor), cap)
    masked = (mode == MASK) & _outside(ratio, floor, cap)
    weight = torch.where(masked, torch.zeros_like(clamped), clamped)
    return torch.where(mode == OFF, torch.ones_like(weight), weight)


def corrected(trainer: Tensor, sampler: Tensor, mode: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    """[N] bool: whose weight is not w, because Clip truncated or Mask zeroed it; arguments as for `mismatch_weight`."""
    return (mode != OFF) & _outside((trainer - sampler).exp(), floor, cap)


def _outside(ratio: Tensor, floor: Tensor, cap: Tensor) -> Tensor:
    return (ratio > cap) | (ratio < floor)
