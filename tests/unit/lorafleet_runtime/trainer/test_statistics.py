"""What tokens show of their run: values worked out by hand for each of them."""

import math
import random
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lorafleet_runtime.trainer.losses.clip import NO_DUAL_CLIP, clipped_loss, stopped
from lorafleet_runtime.trainer.losses.head import HeadResult
from lorafleet_runtime.trainer.losses.mismatch import CLIP, MASK, OFF
from lorafleet_runtime.trainer.losses.policy import PolicyTokens
from lorafleet_runtime.trainer.losses.statistics import SpanStatistics, read, span_sums
from lorafleet_runtime.types import PolicyMeans, PolicySums

Token = dict[str, float]
DEFAULTS: Token = {
    "advantage": 1.0, "sampler": -1.0, "weight": 1.0, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": NO_DUAL_CLIP,
    "tis_mode": OFF, "tis_floor": 0.0, "tis_cap": 2.0, "kl_coef": 0.0, "kl_type": 3, "reference": math.nan,
}  # fmt: skip


def token(ratio: float = 1.0, **fields: float) -> Token:
    """Whose probability by the trainer is `ratio` times the sampler's, which is 1/e."""
    return DEFAULTS | {"logprob": -1.0 + math.log(ratio), "entropy": 0.0, "loss": 0.0} | fields


def statistics(*runs: list[Token]) -> list[SpanStatistics]:
    """Of runs that share a pass."""
    tokens = [t for run in runs for t in run]

    def column(name: str) -> Tensor:
        return torch.tensor([t[name] for t in tokens], dtype=torch.float64)

    result = HeadResult(column("logprob"), column("loss"), column("entropy"), torch.zeros(0))
    ends = torch.tensor([len(run) for run in runs]).cumsum(0).tolist()
    spans = [(i, end - len(run), end) for i, (run, end) in enumerate(zip(runs, ends, strict=True))]
    return read([span_sums(result, PolicyTokens(**{name: column(name) for name in DEFAULTS}), spans)])


def means(*tokens: Token) -> PolicyMeans:
    (found,) = statistics(list(tokens))
    mean = found.policy.means()
    assert mean is not None
    return mean


@pytest.mark.parametrize(
    "ratio, advantage, dual, clipped",
    [  # range 0.8 to 1.28
        (1.27, 2.0, None, False),
        (1.29, 2.0, None, True),
        (0.5, 2.0, None, False),  # a good token that became less likely is pulled back
        (0.81, -2.0, None, False),
        (0.79, -2.0, None, True),
        (9.0, -2.0, None, False),  # a bad token that became likelier is pushed down
        (9.0, -2.0, 3.0, True),  # but no harder than at 3
        (2.9, -2.0, 3.0, False),
        (9.0, 2.0, 3.0, True),
        (0.9, 2.0, 3.0, False),
        (9.0, 0.0, 3.0, False),  # without advantage there is nothing to stop
        (0.1, 0.0, 3.0, False),
    ],
)
def test_clip_fraction(ratio: float, advantage: float, dual: float | None, clipped: bool) -> None:
    one = token(ratio, advantage=advantage, dual_clip=dual or NO_DUAL_CLIP)
    assert means(one).clip_fraction == clipped
    assert means(one, token(), token(), token()).clip_fraction == clipped / 4


def test_on_policy_tokens_are_not_clipped_by_an_empty_range() -> None:
    assert means(*(token(advantage=a, clip_low=0.0, clip_high=0.0) for a in (1.0, -1.0))).clip_fraction == 0


@pytest.mark.parametrize("mode", [CLIP, MASK])
def test_nothing_is_clipped_where_the_ratio_is_taken_against_the_trainer(mode: int) -> None:
    assert means(*(token(9.0, advantage=a, tis_mode=mode, dual_clip=3.0) for a in (1.0, -1.0))).clip_fraction == 0


def test_a_token_counts_as_clipped_where_autograd_finds_no_slope() -> None:
    rng = random.Random(0)
    rows = [
        [rng.gauss(0, 0.7), rng.choice([-1.5, 2.0]), rng.choice([0.0, 0.2]), rng.choice([0.0, 0.28]),
         rng.choice([1.5, 3.0, NO_DUAL_CLIP])]
        for _ in range(1000)
    ]  # fmt: skip
    gap, *settings = torch.tensor(rows, dtype=torch.float64).unbind(1)
    leaf = gap.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(clipped_loss(leaf, torch.zeros_like(gap), *settings).sum(), leaf)
    found = stopped(gap, torch.zeros_like(gap), *settings)
    assert torch.equal(found, slope == 0)
    assert 200 < found.sum() < 800


@pytest.mark.parametrize(
    "mode, ratio, corrected",
    [
        (OFF, 5.0, False), (OFF, 0.1, False),
        (CLIP, 5.0, True), (CLIP, 1.9, False), (CLIP, 0.51, False), (CLIP, 0.49, True),
        (MASK, 5.0, True), (MASK, 1.9, False), (MASK, 0.51, False), (MASK, 0.49, True),
    ],
)  # fmt: skip
def test_tis_fraction_between_one_half_and_two(mode: int, ratio: float, corrected: bool) -> None:
    one = token(ratio, tis_mode=mode, tis_floor=0.5)
    assert means(one).tis_fraction == corrected
    assert means(one, token(tis_mode=mode)).tis_fraction == corrected / 2


def test_kl_to_the_sampler() -> None:
    """With w = trainer / sampler: k1 is -ln w, k3 is w - 1 - ln w."""
    found = means(token(2.0), token(0.5))
    assert found.kl_sampler_k1 == pytest.approx(0, abs=1e-15)
    assert found.kl_sampler == pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2)
    assert found.mismatch == pytest.approx(math.log(2))
    assert means(token(2.0)).kl_sampler_k1 == pytest.approx(-math.log(2))


def test_kl_estimates_average_to_the_divergence_over_the_samplers_own_draws() -> None:
    """Ten tokens drawn exactly in the sampler's proportions."""
    sampler, trainer = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.4, "b": 0.2, "c": 0.4}
    drawn = "aaaaabbbcc"
    exact = sum(q * math.log(q / trainer[t]) for t, q in sampler.items())
    found = means(*(token(sampler=math.log(sampler[t]), logprob=math.log(trainer[t])) for t in drawn))
    assert (found.kl_sampler_k1, found.kl_sampler) == pytest.approx((exact, exact))


def test_kl_to_the_base_counts_the_tokens_of_a_kl_term_only() -> None:
    """p = 2 b: b / p - 1 + ln(p / b), whatever klType is; `reference` is no number where there is no term."""
    assert means(token()).kl_base is None
    halved = [token(kl_coef=0.1, kl_type=kind, reference=-1.0 - math.log(2)) for kind in (1.0, 2.0)]
    assert means(*halved, token()).kl_base == pytest.approx(0.5 - 1 + math.log(2))


def test_each_run_has_the_statistics_of_its_own_tokens() -> None:
    """Also beside one whose values are not finite."""
    a = [token(2.0, entropy=1.0, loss=3.0), token(1.0, entropy=2.0, loss=-1.0)]
    sick = [token(logprob=math.nan, entropy=math.nan, loss=math.nan), token(sampler=-math.inf, advantage=math.nan)]
    alone, (first, broken, last) = statistics(a), statistics(a, sick, a[::-1])
    assert alone == [first] == [last]
    assert (first.loss, first.finite) == (2.0, True)
    assert first.mismatch_max == pytest.approx(math.log(2))
    assert (first.policy.tokens, first.policy.entropy) == (2.0, 3.0)
    assert not broken.finite and math.isnan(broken.policy.entropy)


def test_sums_add_up_to_the_means_of_all_tokens() -> None:
    tokens = [token(r, advantage=-1.0, entropy=r, kl_coef=0.1, reference=-2.0) for r in (0.5, 0.7, 1.0, 3.0, 0.9)]
    (whole,), (left,), (right,) = statistics(tokens), statistics(tokens[:2]), statistics(tokens[2:])
    assert asdict(left.policy + right.policy) == pytest.approx(asdict(whole.policy))
    assert PolicySums() + whole.policy == whole.policy
    assert PolicySums().means() is None


class HostReads(TorchDispatchMode):
    """Counts single values that are read from a device, each of which waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_from_the_device_by_itself() -> None:
    with HostReads() as reads:
        assert len(statistics([token()], [token()], [token()])) == 3
    assert reads.count == 0
    with HostReads() as reads:
        float(torch.ones(1).sum())
    assert reads.count == 1
