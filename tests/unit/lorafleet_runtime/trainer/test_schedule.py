"""Learning rates against Hugging Face's and torch's schedulers step by step, and at the ends by hand."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_linear_schedule_with_warmup

from lorafleet_api.v1alpha1.adapterrun import Optimizer
from lorafleet_runtime.trainer.schedule import learning_rate

STEPS = 23


def rates_of(make: Callable[[torch.optim.Optimizer], LRScheduler], lr: float, steps: int) -> list[float]:
    """What a scheduler gives optimizer.step() number 1, 2, ... `steps`."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(settings: Optimizer, first: int, last: int, target: int = STEPS) -> list[float]:
    return [learning_rate(settings, step, target) for step in range(first, last + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 5, 22])
def test_linear_decay_is_hugging_faces(warmup: int) -> None:
    theirs = rates_of(lambda o: get_linear_schedule_with_warmup(o, warmup, STEPS), 0.3, STEPS + 3)
    settings = Optimizer(lr=0.3, schedule="linear", warmup_steps=warmup)
    assert ours(settings, warmup + 1, STEPS + 3) == pytest.approx(theirs[warmup:], rel=1e-12, abs=0.0)


@pytest.mark.parametrize("warmup", [0, 1, 5, 22])
@pytest.mark.parametrize("min_lr", [0.0, 0.03])
def test_cosine_decay_is_hugging_faces(warmup: int, min_lr: float) -> None:
    theirs = rates_of(
        lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, warmup, STEPS, min_lr=min_lr), 0.3, STEPS + 1
    )
    settings = Optimizer(lr=0.3, schedule="cosine", warmup_steps=warmup, min_lr=min_lr)
    # theirs computes minLr as a share of lr: rounding of 1e-17 where the rate itself is 0
    assert ours(settings, warmup + 1, STEPS + 1) == pytest.approx(theirs[warmup:], rel=1e-12, abs=1e-16)


def test_cosine_decay_is_torchs() -> None:
    theirs = rates_of(lambda o: CosineAnnealingLR(o, STEPS, eta_min=0.03), 0.3, STEPS + 1)
    assert ours(Optimizer(lr=0.3, schedule="cosine", min_lr=0.03), 1, STEPS + 1) == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_is_hugging_faces_one_step_earlier(schedule: str) -> None:
    theirs = rates_of(lambda o: get_linear_schedule_with_warmup(o, 4, 100), 0.3, 5)
    settings = Optimizer.model_validate({"lr": 0.3, "warmupSteps": 4, "schedule": schedule})
    assert theirs[0] == 0.0  # a step that moves nothing
    assert ours(settings, 1, 4) == pytest.approx(theirs[1:], rel=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_up_to_the_target_is_made_at_the_least_rate(schedule: str) -> None:
    for warmup in range(8):
        settings = Optimizer.model_validate({"lr": 1.0, "minLr": 0.01, "warmupSteps": warmup, "schedule": schedule})
        for target in range(1, 8):
            assert min(ours(settings, 1, target, target)) > 0.01


LINEAR = Optimizer(lr=1.0, schedule="linear", min_lr=0.2, warmup_steps=2)
COSINE = Optimizer(lr=1.0, schedule="cosine", min_lr=0.2, warmup_steps=2)


@pytest.mark.parametrize(
    "settings, target, expected",
    [
        (Optimizer(lr=1.0, warmup_steps=2), 3, [0.5, 1.0, 1.0, 1.0, 1.0]),
        (LINEAR, 6, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (COSINE, 5, [0.5, 1.0, 1.0, 0.8, 0.4, 0.2, 0.2]),  # 0.6 + 0.4 cos(0, 60, 120 degrees)
        (LINEAR, 1, [0.5, 0.2, 0.2]),  # the target lies inside the warm-up
        (COSINE, 2, [0.5, 1.0, 0.2]),  # and at its end
        (Optimizer(lr=1.0, warmup_steps=4), 2, [0.25, 0.5, 0.75, 1.0, 1.0]),
        (Optimizer(lr=1.0, schedule="linear"), 1, [1.0, 0.0]),
        (Optimizer(lr=1.0, schedule="linear", warmup_steps=1), 3, [1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_rates_by_hand(settings: Optimizer, target: int, expected: list[float]) -> None:
    assert ours(settings, 1, len(expected), target) == pytest.approx(expected)
