"""The token loss and its slope against values worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer.losses.policy import LossParams, PolicyTokens, policy_loss


def params(**algorithm: object) -> LossParams:
    spec = {"poolRef": {"name": "p"}, "data": "d", "rmType": "math", "algorithm": algorithm}
    return LossParams.from_spec(AdapterRunSpec.model_validate(spec | {"sampling": {"maxTokens": 50}}))


def one(p: LossParams, ratio: float, advantage: float, reference: float = 0.0) -> tuple[float, float]:
    """(loss, slope) of one token whose trainer probability is `ratio` times the sampler's."""
    lp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)

    def full(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    tokens = PolicyTokens(
        full(advantage), full(-1.0 - math.log(ratio)), full(1.0), full(p.clip_low), full(p.clip_high),
        full(p.dual_clip), full(p.tis_mode), full(p.tis_cap), full(p.kl_coef), full(p.kl_type), full(reference),
    )  # fmt: skip
    loss = policy_loss(lp, tokens)
    (slope,) = torch.autograd.grad(loss.sum(), lp)
    return loss.item(), slope.item()


CLIP, MASK, OFF = {"tisMode": "Clip"}, {"tisMode": "Mask"}, {"tisMode": "Off"}


@pytest.mark.parametrize(
    "algorithm, ratio, advantage, loss, slope",
    [
        (CLIP, 1.0, 2.0, -2.0, -2.0),  # -A
        (CLIP, 1.5, 2.0, -3.0, -3.0),  # mismatch weight 1.5
        (CLIP, 5.0, 2.0, -4.0, -4.0),  # capped at 2
        (CLIP, 0.1, -1.0, 0.1, 0.1),
        (MASK, 1.5, 2.0, -3.0, -3.0),
        (MASK, 5.0, 2.0, 0.0, 0.0),  # above the cap: dropped
        (OFF, 1.1, 1.0, -1.1, -1.1),  # inside the clip range
        (OFF, 1.5, 1.0, -1.28, 0.0),  # clipped above: 1 + 0.28
        (OFF, 0.5, 1.0, -0.5, -0.5),  # below the range, positive advantage: not clipped
        (OFF, 0.5, -1.0, 0.8, 0.0),  # clipped below: 1 - 0.2
        (OFF, 4.0, -1.0, 4.0, 4.0),
        (OFF | {"dualClip": 3.0}, 4.0, -1.0, 3.0, 0.0),  # bounded at 3 |A|
        (OFF | {"dualClip": 3.0}, 4.0, 1.0, -1.28, 0.0),  # no bound for positive advantages
        (OFF | {"clipLow": 0.0, "clipHigh": 0.0}, 1.0, 1.0, -1.0, -1.0),  # on-policy with an empty range still learns
    ],
)
def test_policy_term(algorithm: dict[str, object], ratio: float, advantage: float, loss: float, slope: float) -> None:
    assert one(params(**algorithm), ratio, advantage) == pytest.approx((loss, slope))


@pytest.mark.parametrize(
    "kind, loss, slope",
    [
        ("k1", 0.5, 1.0),  # lp - ref
        ("k2", 0.125, 0.5),  # gap^2 / 2
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),  # exp(-gap) - 1 + gap
    ],
)
def test_kl_term_for_a_gap_of_one_half(kind: str, loss: float, slope: float) -> None:
    found = one(params(klCoef=0.1, klType=kind), 1.0, 0.0, reference=-1.5)
    assert found == pytest.approx((0.1 * loss, 0.1 * slope))


@pytest.mark.parametrize("algorithm", [CLIP, MASK, OFF])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_mismatch_gives_a_finite_slope(algorithm: dict[str, object], advantage: float) -> None:
    for ratio in (1e-300, 1e300):
        loss, slope = one(params(**algorithm), ratio, advantage)
        assert math.isfinite(loss) and math.isfinite(slope)


def test_token_weight_by_reduction() -> None:
    assert params(lossReduction="sampleMean").token_weight(4) == 0.25
    assert params(lossReduction="tokenMean").token_weight(4) == 1.0
    assert params(lossReduction="constant").token_weight(4) == 0.02
