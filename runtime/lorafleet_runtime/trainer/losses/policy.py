"""The policy-gradient token loss: plain differentiable arithmetic on log-probabilities, every token with its own run's
parameters, so runs with different algorithms share a pass. Called by head.py inside each chunk.

Clipping follows PPO (Schulman 2017) with DAPO's asymmetric bounds and dual clip (Ye 2020); the sampler mismatch weight
is truncated importance sampling; KL estimators are Schulman's k1, k2, k3.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec

_NO_DUAL_CLIP = 1e30
_MAX_LOG_RATIO = 20.0
_KL_TYPES = {"k1": 1, "k2": 2, "k3": 3}
_TIS_MODES = {"Off": 0, "Clip": 1, "Mask": 2}


@dataclass(frozen=True, slots=True)
class LossParams:
    """One run's loss settings."""

    reduction: str
    max_tokens: int
    temperature: float
    clip_low: float
    clip_high: float
    dual_clip: float
    tis_mode: int
    tis_cap: float
    kl_coef: float
    kl_type: int
    mask_truncated: bool

    @classmethod
    def from_spec(cls, spec: AdapterRunSpec) -> "LossParams":
        """The settings in a resolved spec."""
        algorithm = spec.algorithm
        return cls(
            reduction=algorithm.loss_reduction,
            max_tokens=spec.sampling.max_tokens,
            temperature=spec.sampling.temperature,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=_NO_DUAL_CLIP if algorithm.dual_clip is None else algorithm.dual_clip,
            tis_mode=_TIS_MODES[algorithm.tis_mode],
            tis_cap=algorithm.tis_cap,
            kl_coef=algorithm.kl_coef,
            kl_type=_KL_TYPES[algorithm.kl_type],
            mask_truncated=algorithm.mask_truncated,
        )

    def token_weight(self, response_tokens: int) -> float:
        """Weight of each token of a response with this many tokens, before the step's denominator."""
        if self.reduction == "sampleMean":
            return 1.0 / response_tokens
        return 1.0 if self.reduction == "tokenMean" else 1.0 / self.max_tokens


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What the loss needs of each of N response tokens; every field is [N]."""

    advantage: Tensor
    sampler: Tensor
    """Log-probability under the sampler."""
    weight: Tensor
    clip_low: Tensor
    clip_high: Tensor
    dual_clip: Tensor
    tis_mode: Tensor
    tis_cap: Tensor
    kl_coef: Tensor
    kl_type: Tensor
    reference: Tensor
    """Log-probability under the base model; anything where kl_coef is 0."""

    def slice(self, start: int, end: int) -> "PolicyTokens":
        """Tokens start to end."""
        return PolicyTokens(*(getattr(self, f.name)[start:end] for f in fields(self)))

    def with_reference(self, reference: Tensor) -> "PolicyTokens":
        """The same tokens with base-model log-probabilities."""
        return replace(self, reference=reference)


def policy_loss(logprob: Tensor, tokens: PolicyTokens) -> Tensor:
    """The weighted loss of each token; sum it and divide by the run's denominator.

    With tisMode Off the ratio is taken against the sampler and clipped as in PPO. Otherwise it is taken against the
    trainer's own log-probability (value 1, with gradient), and the mismatch to the sampler enters as a detached weight.

    Args:
        logprob: [N], of the trainer, at the sampler's temperature, with gradient.
        tokens: the same N tokens.

    Returns:
        [N].
    """
    own = logprob.detach()
    off = tokens.tis_mode == _TIS_MODES["Off"]
    # exp of a gap beyond 20 would overflow and turn the clipped branch's zero gradient into NaN
    gap = (logprob - torch.where(off, tokens.sampler, own)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = gap.exp()
    clipped = ratio.clamp(1 - tokens.clip_low, 1 + tokens.clip_high)
    loss = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * clipped)
    bounded = torch.minimum(loss, -tokens.advantage * tokens.dual_clip)
    loss = torch.where(tokens.advantage < 0, bounded, loss)
    return tokens.weight * (_mismatch_weight(own, tokens, off) * loss + tokens.kl_coef * _kl(logprob, tokens))


def _mismatch_weight(own: Tensor, tokens: PolicyTokens, off: Tensor) -> Tensor:
    ratio = (own - tokens.sampler).exp()
    dropped = (tokens.tis_mode == _TIS_MODES["Mask"]) & (ratio > tokens.tis_cap)
    weight = torch.minimum(ratio, tokens.tis_cap)
    return torch.where(off, torch.ones_like(weight), torch.where(dropped, torch.zeros_like(weight), weight))


def _kl(logprob: Tensor, tokens: PolicyTokens) -> Tensor:
    """KL(policy || base) per token; 0 with zero gradient where it is off."""
    reference = torch.where(tokens.kl_coef > 0, tokens.reference, logprob.detach())
    gap = (logprob - reference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    k3 = (-gap).exp() - 1 + gap
    return torch.where(tokens.kl_type == 1, gap, torch.where(tokens.kl_type == 2, 0.5 * gap.square(), k3))
