"""A run's learning rate at each of its own optimizer steps. Pure; called by optimizer.py.

The decay is that of Hugging Face's `get_linear_schedule_with_warmup` and `get_cosine_with_min_lr_schedule_with_warmup`
(torch's `CosineAnnealingLR`) at index k = step - 1: the first step after the warm-up has the full rate, and the last
one still has a rate above minLr, so it trains. The warm-up is step / warmupSteps instead of their k / warmupSteps,
whose first step has rate 0 and throws a batch of samples away.
"""

import math

from lorafleet_api.v1alpha1.adapterrun import Optimizer


def learning_rate(settings: Optimizer, step: int, target_step: int) -> float:
    """Learning rate of one optimizer step.

    Steps 1 to warmupSteps rise linearly and reach lr. After them constant stays at lr; linear and cosine fall towards
    minLr, which step targetStep + 1 would have. Every step beyond targetStep (a numStep that grew) has minLr with
    linear and cosine, also where targetStep came before the end of the warm-up.

    Args:
        settings: of the run.
        step: the step about to be made, counted from 1.
        target_step: horizon of the schedule, fixed when the run is first loaded.
    """
    decays = settings.schedule != "constant"
    if decays and step > target_step:
        return settings.min_lr
    if step <= settings.warmup_steps:
        return settings.lr * (step / settings.warmup_steps)
    if not decays:
        return settings.lr
    progress = (step - 1 - settings.warmup_steps) / (target_step - settings.warmup_steps)
    share = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * share
