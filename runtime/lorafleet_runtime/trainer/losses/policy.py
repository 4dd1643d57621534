"""The policy-gradient token loss put together from clip.py, mismatch.py and kl.py, every token with its own run's
parameters, so runs with different algorithms share a pass. Called by head.py inside each chunk.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer.losses import kl, mismatch, reduction
from lorafleet_runtime.trainer.losses.clip import NO_DUAL_CLIP, clipped_loss


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
    tis_floor: float
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
            dual_clip=NO_DUAL_CLIP if algorithm.dual_clip is None else algorithm.dual_clip,
            tis_mode=mismatch.MODES[algorithm.tis_mode],
            tis_floor=algorithm.tis_floor,
            tis_cap=algorithm.tis_cap,
            kl_coef=algorithm.kl_coef,
            kl_type=kl.TYPES[algorithm.kl_type],
            mask_truncated=algorithm.mask_truncated,
        )

    def token_weight(self, response_tokens: int) -> float:
        """Weight of each token of a response with this many tokens, before the step's denominator."""
        return reduction.token_weight(self.reduction, response_tokens, self.max_tokens)


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
    tis_floor: Tensor
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
    t = tokens
    loss = clipped_loss(logprob, compared_with(own, t), t.advantage, t.clip_low, t.clip_high, t.dual_clip)
    weight = mismatch.mismatch_weight(own, t.sampler, t.tis_mode, t.tis_floor, t.tis_cap)
    # without a KL term `reference` may be anything, so also what would make 0 x inf
    reference = torch.where(t.kl_coef > 0, t.reference, own)
    return t.weight * (weight * loss + t.kl_coef * kl.kl_penalty(logprob, reference, t.kl_type))


def compared_with(own: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N]: the log-probability that the policy ratio is taken against; `own` is the trainer's, without gradient."""
    return torch.where(tokens.tis_mode == mismatch.OFF, tokens.sampler, own)
