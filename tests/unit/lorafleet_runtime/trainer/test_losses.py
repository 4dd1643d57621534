"""Each part of the loss by itself: value and slope in closed form."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.trainer.losses.clip import NO_DUAL_CLIP, clipped_loss
from lorafleet_runtime.trainer.losses.kl import K1, K2, K3, kl_penalty
from lorafleet_runtime.trainer.losses.mismatch import CLIP, MASK, OFF, mismatch_weight
from lorafleet_runtime.trainer.losses.reduction import denominator, kept, token_weight
from lorafleet_runtime.types import Sample


def full(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def value_and_slope(function: Callable[[Tensor], Tensor], at: float) -> tuple[float, float]:
    x = full(at).requires_grad_(True)
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return y.item(), slope.item()


@pytest.mark.parametrize(
    "ratio, advantage, dual, loss, slope",
    [  # d(-A r) / d logprob = -A r; the bounds are constants; range 0.8 to 1.5
        (1.0, 2.0, None, -2.0, -2.0),
        (1.4, 2.0, None, -2.8, -2.8),
        (1.6, 2.0, None, -3.0, 0.0),
        (0.5, 2.0, None, -1.0, -1.0),
        (1.6, -2.0, None, 3.2, 3.2),
        (0.9, -2.0, None, 1.8, 1.8),
        (0.5, -2.0, None, 1.6, 0.0),
        (2.9, -2.0, 3.0, 5.8, 5.8),
        (3.1, -2.0, 3.0, 6.0, 0.0),
        (0.5, -2.0, 3.0, 1.6, 0.0),
        (3.1, 2.0, 3.0, -3.0, 0.0),
        (1.7, 0.0, 3.0, 0.0, 0.0),
    ],
)
def test_clipped_loss(ratio: float, advantage: float, dual: float | None, loss: float, slope: float) -> None:
    bound = full(dual or NO_DUAL_CLIP)
    old = full(-1.0 - math.log(ratio))
    found = value_and_slope(lambda x: clipped_loss(x, old, full(advantage), full(0.2), full(0.5), bound), -1.0)
    assert found == pytest.approx((loss, slope), rel=1e-12)


@pytest.mark.parametrize("gap", [25.0, -25.0, 800.0, -800.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_clipped_loss_of_an_absurd_gap_is_finite_and_flat(gap: float, advantage: float) -> None:
    bounds = full(0.2), full(0.28), full(NO_DUAL_CLIP)
    loss, slope = value_and_slope(lambda x: clipped_loss(x, full(-gap), full(advantage), *bounds), 0.0)
    assert math.isfinite(loss) and slope == 0.0


@pytest.mark.parametrize(
    "mode, ratio, weight",
    [
        (OFF, 5.0, 1.0),
        (OFF, 0.01, 1.0),
        (CLIP, 0.01, 0.5),
        (CLIP, 0.75, 0.75),
        (CLIP, 5.0, 2.0),
        (MASK, 0.49, 0.0),
        (MASK, 0.51, 0.51),
        (MASK, 1.99, 1.99),
        (MASK, 2.01, 0.0),
        (CLIP, 1e300, 2.0),
        (MASK, 1e300, 0.0),
        (MASK, 1e-300, 0.0),
    ],
)
def test_mismatch_weight_between_one_half_and_two(mode: int, ratio: float, weight: float) -> None:
    found = mismatch_weight(full(-1.0), full(-1.0 - math.log(ratio)), full(mode), full(0.5), full(2.0))
    assert found.item() == pytest.approx(weight, rel=1e-12)


def test_mismatch_weight_has_no_gradient_and_survives_overflow() -> None:
    trainer = full(-1.0).requires_grad_(True)
    weight = mismatch_weight(trainer, full(-2000.0), full(CLIP), full(0.0), full(2.0))
    assert not weight.requires_grad and weight.item() == 2.0


@pytest.mark.parametrize(
    "kind, gap, penalty, slope",
    [
        (K1, 0.7, 0.7, 1.0),
        (K1, -0.7, -0.7, 1.0),
        (K2, 0.7, 0.245, 0.7),
        (K2, -0.7, 0.245, -0.7),
        (K3, math.log(2.0), math.log(2.0) - 0.5, 0.5),  # e^-d - 1 + d = 1/2 - 1 + ln 2; slope 1 - e^-d
        (K3, -math.log(2.0), 1.0 - math.log(2.0), -1.0),
        (K3, 0.0, 0.0, 0.0),
    ],
)
def test_kl_penalty(kind: int, gap: float, penalty: float, slope: float) -> None:
    found = value_and_slope(lambda x: kl_penalty(x, full(-1.0 - gap), full(kind)), -1.0)
    assert found == pytest.approx((penalty, slope), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", [K1, K2, K3])
def test_kl_estimators_have_the_mean_of_the_divergence(kind: int) -> None:
    """Over the policy's own distribution: exactly KL for k1 and k3; k2 to second order in a small gap."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    base = torch.tensor([0.48, 0.31, 0.21], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), base.tolist(), strict=True))
    mean = (policy * kl_penalty(policy.log(), base.log(), torch.full((3,), float(kind)))).sum().item()
    assert mean == pytest.approx(exact, rel=0.02 if kind == K2 else 1e-9)


def response(tokens: int, truncated: bool = False) -> Sample:
    return Sample((1,) * tokens, (-1.0,) * tokens, 0.0, 0.0, truncated)


@pytest.mark.parametrize(
    "reduction, mean",
    [
        ("sampleMean", 2.0),  # (1 + 3) / 2
        ("tokenMean", 1.5),  # (3 x 1 + 1 x 3) / 4
        ("constant", 0.3),  # (3 x 1 + 1 x 3) / 10 / 2
    ],
)
def test_reduction_of_three_tokens_of_loss_1_and_one_of_loss_3(reduction: str, mean: float) -> None:
    samples = [response(3), response(1)]
    total = sum(
        token_weight(reduction, len(s.token_ids), 10) * loss * len(s.token_ids)
        for s, loss in zip(samples, (1.0, 3.0), strict=True)
    )
    assert total / denominator(reduction, samples) == pytest.approx(mean, rel=1e-15)


@pytest.mark.parametrize("reduction, counted", [("sampleMean", 1), ("tokenMean", 3), ("constant", 1)])
def test_masked_truncated_responses_do_not_count(reduction: str, counted: int) -> None:
    samples = [response(3), response(5, truncated=True)]
    assert denominator(reduction, kept(samples, mask_truncated=True)) == counted
    assert denominator(reduction, kept(samples[1:], mask_truncated=True)) == 0
    assert kept(samples, mask_truncated=False) == samples
    assert kept([replace(samples[1], truncated=False)], mask_truncated=True)
