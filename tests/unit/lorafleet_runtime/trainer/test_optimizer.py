"""The slot optimizer against torch.optim.AdamW, and schedules against values worked out by hand."""

import math

import pytest
import torch

from lorafleet_api.v1alpha1.adapterrun import Optimizer
from lorafleet_runtime.trainer.optimizer import SlotOptimizer, learning_rate


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_update_equals_torch_adamw(clip: float) -> None:
    """Two matrices in torch, with its own clipping and LambdaLR, against one flat buffer."""
    settings = Optimizer(lr=0.03, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2, clip_grad=clip, warmup_steps=2)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(20, generator=generator)
    parts = [torch.nn.Parameter(start[:8].clone().view(2, 4)), torch.nn.Parameter(start[8:].clone().view(4, 3))]
    theirs = torch.optim.AdamW(parts, lr=0.03, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    rates = torch.optim.lr_scheduler.LambdaLR(theirs, lambda n: min((n + 1) / 2, 1.0))
    master = start.clone()
    ours = SlotOptimizer(master, settings, target_step=10)
    for _ in range(6):
        grad = torch.randn(20, generator=generator)
        parts[0].grad, parts[1].grad = grad[:8].clone().view(2, 4), grad[8:].clone().view(4, 3)
        norm = torch.nn.utils.clip_grad_norm_(parts, clip or math.inf)
        rate = rates.get_last_lr()[0]
        theirs.step()
        rates.step()
        assert ours.update(grad) == pytest.approx((rate, float(norm)), rel=1e-6)
        expected = torch.cat([p.detach().flatten() for p in parts])
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-7)


def test_clipping_uses_the_runs_own_norm() -> None:
    """Gradient (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8), and exp_avg = 0.1 * that."""
    settings = Optimizer(lr=0.1, betas=(0.9, 0.98), clip_grad=1.0)
    ours = SlotOptimizer(torch.zeros(2), settings, target_step=1)
    done = ours.update(torch.tensor([3.0, 4.0]))
    assert done == (0.1, 5.0)
    torch.testing.assert_close(ours.moments[0], torch.tensor([0.06, 0.08]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    master = torch.ones(3)
    ours = SlotOptimizer(master, Optimizer(), target_step=1)
    assert ours.update(torch.tensor([0.0, bad, 1.0])) is None
    assert torch.equal(master, torch.ones(3))
    assert ours.step_count == 0
    assert not any(t.any() for t in ours.moments)


CONSTANT = Optimizer(lr=1.0, warmup_steps=4)
LINEAR = Optimizer(lr=1.0, schedule="linear", min_lr=0.2)
COSINE = Optimizer(lr=1.0, schedule="cosine", warmup_steps=2, min_lr=0.0)


@pytest.mark.parametrize(
    "settings, step, expected",
    [
        (CONSTANT, 1, 0.25),
        (CONSTANT, 3, 0.75),
        (CONSTANT, 4, 1.0),
        (CONSTANT, 99, 1.0),
        (LINEAR, 1, 1.0),
        (LINEAR, 6, 0.6),  # half of the way from step 1 to step 11
        (LINEAR, 11, 0.2),
        (LINEAR, 12, 0.2),
        (COSINE, 1, 0.5),
        (COSINE, 2, 1.0),
        (COSINE, 5, 0.75),  # a third of the way: (1 + cos(60 deg)) / 2
        (COSINE, 11, 0.0),
    ],
)
def test_learning_rate_by_hand(settings: Optimizer, step: int, expected: float) -> None:
    assert learning_rate(settings, step, target_step=11) == pytest.approx(expected)


def test_run_of_one_step_uses_the_peak_rate() -> None:
    assert learning_rate(LINEAR, 1, target_step=1) == 1.0
