"""One AdamW per slot over the adapter's flat buffer, with the run's own clock, schedule and clipping.

Called by rank.py at step time. A run that produces a gradient that is not finite is reported and touches nobody else.
"""

import math

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import Optimizer


def learning_rate(settings: Optimizer, step: int, target_step: int) -> float:
    """Learning rate of an optimizer step.

    It rises linearly from 0, reaches lr at step max(warmupSteps, 1), and with schedule linear or cosine falls to minLr
    at step targetStep.

    Args:
        settings: of the run.
        step: the step about to be made, counted from 1.
        target_step: horizon of the schedule.
    """
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    peak = max(settings.warmup_steps, 1)
    if settings.schedule == "constant" or target_step <= peak:
        return settings.lr
    progress = min((step - peak) / (target_step - peak), 1.0)
    share = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * share


class SlotOptimizer:
    """AdamW of one run.

    Args:
        master: [elements], float32 (float64 in tests); updated in place.
        settings: of the run.
        target_step: horizon of the learning-rate schedule.
    """

    def __init__(self, master: Tensor, settings: Optimizer, target_step: int) -> None:
        """Start at step 0 with zero moments."""
        self.settings, self.target_step = settings, target_step
        self.step_count = 0
        self._parameter = torch.nn.Parameter(master)
        self._adamw = torch.optim.AdamW(
            [self._parameter],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.restore(0, torch.zeros_like(master), torch.zeros_like(master))

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """(exp_avg, exp_avg_sq), each [elements]."""
        state = self._adamw.state[self._parameter]
        return state["exp_avg"], state["exp_avg_sq"]

    def restore(self, step: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Continue from a checkpoint."""
        self.step_count = step
        self._adamw.state[self._parameter] = {
            "step": torch.tensor(float(step), dtype=torch.float32),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }

    def update(self, grad: Tensor) -> tuple[float, float] | None:
        """Clip and step.

        Args:
            grad: [elements]; scaled in place when it is clipped.

        Returns:
            (learning rate, gradient norm before clipping), or None when the norm is not finite and nothing was changed.
        """
        norm = float(torch.linalg.vector_norm(grad))
        if not math.isfinite(norm):
            return None
        if self.settings.clip_grad > 0:
            grad.mul_(min(self.settings.clip_grad / (norm + 1e-6), 1.0))
        rate = learning_rate(self.settings, self.step_count + 1, self.target_step)
        self._adamw.param_groups[0]["lr"] = rate
        self._parameter.grad = grad
        self._adamw.step()
        self._parameter.grad = None
        self.step_count += 1
        return rate, norm
