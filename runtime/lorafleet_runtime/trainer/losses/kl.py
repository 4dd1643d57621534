"""Estimators of the KL divergence of the policy from the base model, per token (Schulman 2020).

Called by policy.py. The base model is the trainer's own with the run's slot off; there is no second one.
"""

import torch
from torch import Tensor

K1, K2, K3 = 1, 2, 3
"""klType as PolicyTokens holds it."""
TYPES = {"k1": K1, "k2": K2, "k3": K3}
_MAX_GAP = 20.0


def kl_penalty(logprob: Tensor, reference: Tensor, kind: Tensor) -> Tensor:
    """KL(policy || base) at the sampled tokens, with gradient through `logprob`.

    With d = logprob - reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d (never negative, low variance; the
    estimator of GRPO). k1's slope is 1 whatever d is, so as a term of the loss it has no direction in expectation;
    it is there because miles has it. k2 has the gradient of the true KL divergence on-policy.

    Args:
        logprob: [N] under the policy.
        reference: [N] under the base model, at the same temperature.
        kind: [N], K1, K2 or K3.

    Returns:
        [N]. |d| above 20 counts as 20 and has slope 0: exp would overflow.
    """
    gap = (logprob - reference).clamp(-_MAX_GAP, _MAX_GAP)
    k3 = (-gap).exp() - 1 + gap
    return torch.where(kind == K1, gap, torch.where(kind == K2, 0.5 * gap.square(), k3))
