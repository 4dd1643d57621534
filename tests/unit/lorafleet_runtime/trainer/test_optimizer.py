"""The slot optimizer against torch.optim.AdamW."""

import math

import pytest
import torch

from lorafleet_api.v1alpha1.adapterrun import Optimizer
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.optimizer import SlotOptimizer
from lorafleet_runtime.trainer.shape import ModelShape, Rope

SHAPE = ModelShape("llama", 1, 4, 8, 3, 1, 2, 16, 64, 1e-6, Rope(10_000.0), True, False)


def make(settings: Optimizer, start: torch.Tensor) -> tuple[SlotOptimizer, torch.Tensor]:
    """The optimizer and masters of an adapter with A [2, 4] and B [6, 2]: 20 elements."""
    adapter = SlotAdapter(SHAPE, 2, 2, ("q_proj",), torch.float32, torch.device("cpu"))
    adapter.install(start)
    return SlotOptimizer(adapter, settings, target_step=10), adapter.master


def padded(*values: float) -> torch.Tensor:
    """These, then zeros."""
    return torch.tensor([*values, *[0.0] * (20 - len(values))])


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_update_equals_torch_adamw(clip: float) -> None:
    """Two matrices in torch, with its own clipping and LambdaLR, against one flat buffer."""
    settings = Optimizer(lr=0.03, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2, clip_grad=clip, warmup_steps=2)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(20, generator=generator)
    parts = [torch.nn.Parameter(start[:8].clone().view(2, 4)), torch.nn.Parameter(start[8:].clone().view(6, 2))]
    theirs = torch.optim.AdamW(parts, lr=0.03, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    rates = torch.optim.lr_scheduler.LambdaLR(theirs, lambda n: min((n + 1) / 2, 1.0))
    ours, master = make(settings, start)
    for _ in range(6):
        grad = torch.randn(20, generator=generator)
        parts[0].grad, parts[1].grad = grad[:8].clone().view(2, 4), grad[8:].clone().view(6, 2)
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
    ours, _ = make(settings, torch.zeros(20))
    done = ours.update(padded(3.0, 4.0))
    assert done == (0.1, 5.0)
    torch.testing.assert_close(ours.moments[0], padded(0.06, 0.08))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    ours, master = make(Optimizer(), torch.ones(20))
    assert ours.update(padded(0.0, bad, 1.0)) is None
    assert torch.equal(master, torch.ones(20))
    assert ours.step_count == 0
    assert not any(t.any() for t in ours.moments)
