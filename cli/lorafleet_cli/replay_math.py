"""The arithmetic of an optimizer step, written out anew for `lorafleet replay`: token loss, advantages, learning rate.

Called by replay_model.py and replay_checks.py. Plain torch on one response at a time; shares no code with what it
checks.
"""

import math
import statistics
from typing import Any

import torch
from torch import Tensor

_MOST = 20.0
"""Log-ratios beyond +-20 count as 20: part of the loss' definition."""


def learning_rate(optimizer: dict[str, Any], step: int, target_step: int) -> float:
    """Learning rate of step `step` (from 1): linear warm-up, then constant, linear or half a cosine.

    Args:
        optimizer: of run.json.
        step: the step.
        target_step: horizon of the decay; later steps have minLr.
    """
    top, bottom, warmup = optimizer["lr"], optimizer["minLr"], optimizer["warmupSteps"]
    schedule = optimizer["schedule"]
    if schedule == "constant":
        return float(top * min(1.0, step / warmup) if warmup else top)
    if step > target_step:
        return float(bottom)
    if step <= warmup:
        return float(top * step / warmup)
    done = (step - 1 - warmup) / (target_step - warmup)
    if schedule == "linear":
        return float(top + (bottom - top) * done)
    return float(bottom + (top - bottom) * (1 + math.cos(math.pi * done)) / 2)


def advantages(rewards: list[float], estimator: str, std_norm: bool, eps: float) -> tuple[list[float], float]:
    """Advantages of rewards that share a baseline: of a group, with reinforce of the step's batch.

    grpo and reinforce: reward - mean, with std_norm divided by the unbiased deviation + 1e-6. rloo: reward - mean of
    the others. Equal rewards give zeros.

    Args:
        rewards: of all samples.
        estimator: grpo, rloo or reinforce.
        std_norm: of the run; not for rloo.
        eps: relative rounding of the recorded advantages; rewards are recorded as they were.

    Returns:
        (advantages, how far rounding may take one from what was trained).
    """
    count, total = len(rewards), math.fsum(rewards)
    if len(set(rewards)) == 1:
        return [0.0] * count, 0.0
    if estimator == "rloo":
        values = [r - (total - r) / (count - 1) for r in rewards]
        scale = 2.0
    else:
        scale = 1 / (statistics.stdev(rewards) + 1e-6) if std_norm else 1.0
        values = [(r - total / count) * scale for r in rewards]
    return values, 4 * eps * max(map(abs, values)) + 1e-14 * scale * max(map(abs, rewards))


def token_weight(algorithm: dict[str, Any], max_tokens: int, tokens: int) -> float:
    """Weight of each token of a response with `tokens` tokens, before the step's denominator."""
    return {"sampleMean": 1 / tokens, "tokenMean": 1.0, "constant": 1 / max_tokens}[algorithm["lossReduction"]]


def response_loss(
    logprob: Tensor, sampler: Tensor, reference: Tensor | None, advantage: float, algorithm: dict[str, Any]
) -> Tensor:
    """Sum of one response's token losses, unweighted.

    Args:
        logprob: [R] of the policy at the sampler's temperature, with gradient.
        sampler: [R].
        reference: [R] of the base model, for the KL term.
        advantage: of the response.
        algorithm: of run.json.
    """
    now = logprob.detach()
    if algorithm["tisMode"] == "Off":
        ratio, weight = (logprob - sampler).clamp(-_MOST, _MOST).exp(), torch.ones_like(now)
    else:
        ratio, weight = (logprob - now).exp(), (now - sampler).exp()
        low, high = algorithm["tisFloor"], algorithm["tisCap"]
        if algorithm["tisMode"] == "Mask":
            inside = (weight >= low) & (weight <= high)
            weight = torch.where(inside, weight, torch.zeros_like(weight))
        else:
            weight = weight.clamp(low, high)
    clipped = ratio.clamp(1 - algorithm["clipLow"], 1 + algorithm["clipHigh"])
    objective = torch.minimum(advantage * ratio, advantage * clipped)
    if algorithm["dualClip"] is not None and advantage < 0:
        objective = objective.clamp(min=advantage * algorithm["dualClip"])
    total = -(weight * objective).sum()
    if reference is not None:
        total = total + algorithm["klCoef"] * _kl(logprob, reference, algorithm["klType"]).sum()
    return total


def _kl(logprob: Tensor, reference: Tensor, kind: str) -> Tensor:
    gap = (logprob - reference).clamp(-_MOST, _MOST)
    if kind == "k1":
        return gap
    return gap.square() / 2 if kind == "k2" else torch.expm1(-gap) + gap
