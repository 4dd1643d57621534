"""The token loss put together: values worked out by hand, and each formula written out for one token."""

import math
import random
from collections.abc import Sequence

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
        full(p.dual_clip), full(p.tis_mode), full(p.tis_floor), full(p.tis_cap), full(p.kl_coef), full(p.kl_type),
        full(reference),
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
        (CLIP | {"tisFloor": 0.5}, 0.1, -1.0, 0.5, 0.5),  # raised to the floor
        (MASK, 1.5, 2.0, -3.0, -3.0),
        (MASK | {"tisFloor": 0.5}, 0.1, -1.0, 0.0, 0.0),  # below the floor: dropped
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


def by_the_formulas(p: LossParams, lp: Tensor, advantage: float, sampler: float, reference: float) -> Tensor:
    """The loss of one token with an `if` for every choice."""
    off = p.tis_mode == 0
    ratio = torch.exp(lp - (sampler if off else lp.item()))
    loss = -advantage * ratio
    if (advantage > 0 and ratio.item() > 1 + p.clip_high) or (advantage < 0 and ratio.item() < 1 - p.clip_low):
        loss = torch.tensor(-advantage * (1 + p.clip_high if advantage > 0 else 1 - p.clip_low), dtype=lp.dtype)
    if advantage < 0 and loss.item() > -advantage * p.dual_clip:
        loss = torch.tensor(-advantage * p.dual_clip, dtype=lp.dtype)
    if not off:
        weight = math.exp(lp.item() - sampler)
        if p.tis_mode == 1:
            weight = max(p.tis_floor, min(p.tis_cap, weight))
        elif not p.tis_floor <= weight <= p.tis_cap:
            weight = 0.0
        loss = weight * loss
    if p.kl_coef > 0:
        gap = lp - reference
        penalty = {1: gap, 2: gap * gap / 2, 3: torch.exp(-gap) - 1 + gap}[p.kl_type]
        loss = loss + p.kl_coef * penalty
    return loss


def test_tokens_of_runs_with_any_algorithm_share_a_pass() -> None:
    """600 random tokens, each with the parameters of another run, in one call."""
    rng = random.Random(0)
    rows: list[tuple[LossParams, float, float, float, float, float]] = []
    for _ in range(600):
        p = params(
            tisMode=rng.choice(["Off", "Clip", "Mask"]), tisFloor=rng.choice([0.0, 0.4]), tisCap=rng.choice([1.5, 2.0]),
            clipLow=rng.choice([0.0, 0.2]), clipHigh=rng.choice([0.0, 0.28]), dualClip=rng.choice([None, 1.5, 3.0]),
            klCoef=rng.choice([0.0, 0.3]), klType=rng.choice(["k1", "k2", "k3"]),
        )  # fmt: skip
        own = rng.uniform(-5, -0.1)
        base = own + rng.gauss(0, 1) if p.kl_coef else math.nan
        rows.append((p, own, rng.choice([-1.5, 0.0, 2.0]), own + rng.gauss(0, 1), base, rng.uniform(0.1, 1)))

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    names = ("clip_low", "clip_high", "dual_clip", "tis_mode", "tis_floor", "tis_cap", "kl_coef", "kl_type")
    settings = {name: column([float(getattr(row[0], name)) for row in rows]) for name in names}
    _, log_probs, advantages, samplers, references, weights = zip(*rows, strict=True)
    advantage, sampler, reference, weight = map(column, (advantages, samplers, references, weights))
    tokens = PolicyTokens(advantage=advantage, sampler=sampler, weight=weight, reference=reference, **settings)
    lp = column(log_probs).requires_grad_(True)
    loss = policy_loss(lp, tokens)
    (slope,) = torch.autograd.grad(loss.sum(), lp)
    leaf = column(log_probs).requires_grad_(True)
    naive = torch.stack([w * by_the_formulas(p, leaf[i], a, s, r) for i, (p, _, a, s, r, w) in enumerate(rows)])
    (expected,) = torch.autograd.grad(naive.sum(), leaf)
    torch.testing.assert_close(loss, naive, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-14)


def test_floor_above_the_cap_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tisFloor: 3.0 is above tisCap 2.0; lower tisFloor or raise tisCap"):
        params(tisFloor=3.0)
