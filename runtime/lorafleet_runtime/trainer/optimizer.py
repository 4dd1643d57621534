"""One AdamW per slot over the adapter's masters, with the run's own clock, schedule and clipping.

Called by rank.py at step time. A run that produces a gradient that is not finite is reported and touches nobody else.
With data-parallel ranks each one updates its own share of the masters (shares.py).
"""

import math

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import Optimizer
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.schedule import learning_rate


class SlotOptimizer:
    """AdamW of one run.

    Args:
        adapter: whose masters, float32 (float64 in tests), are updated in place.
        settings: of the run.
        target_step: horizon of the learning-rate schedule.
    """

    def __init__(self, adapter: SlotAdapter, settings: Optimizer, target_step: int) -> None:
        """Start at step 0 with zero moments."""
        self.settings, self.target_step = settings, target_step
        self.step_count = 0
        self._shares, master = adapter.shares, adapter.master
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
        """(exp_avg, exp_avg_sq), each [own elements]."""
        state = self._adamw.state[self._parameter]
        return state["exp_avg"], state["exp_avg_sq"]

    def restore(self, step: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Continue from a checkpoint; moments are this rank's own, [own elements]."""
        self.step_count = step
        self._adamw.state[self._parameter] = {
            "step": torch.tensor(float(step), dtype=torch.float32),
            "exp_avg": exp_avg,
            "exp_avg_sq": exp_avg_sq,
        }

    def update(self, grad: Tensor) -> tuple[float, float] | None:
        """Clip and step.

        Args:
            grad: [own elements], summed over all ranks; scaled in place when it is clipped.

        Returns:
            (learning rate, gradient norm before clipping), or None when the norm is not finite and nothing was changed.
        """
        norm = self._shares.norm(grad)
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
