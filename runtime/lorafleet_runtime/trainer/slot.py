"""What the trainer keeps of a live run, and the sums over its part of a batch.

Called by rank.py. Nothing here runs the model.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer.checkpoint import Identity, TrainState
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.losses.head import HeadResult
from lorafleet_runtime.trainer.losses.policy import LossParams
from lorafleet_runtime.trainer.optimizer import SlotOptimizer
from lorafleet_runtime.types import Cursor, PromptGroup, RunBatchStats


@dataclass(slots=True)
class Slot:
    """A live run."""

    uid: str
    spec: AdapterRunSpec
    params: LossParams
    adapter: SlotAdapter
    optimizer: SlotOptimizer
    identity: Identity
    incarnation: str
    """Of the registration that made the last step."""
    denominator: int = 0
    """Samples or tokens (by lossReduction) accumulated since the last step."""
    groups: int = 0
    """Groups accumulated since the last step."""

    def discard(self) -> None:
        """Forget what was accumulated since the last step."""
        self.adapter.grad.zero_()
        self.denominator = self.groups = 0


@dataclass(slots=True)
class Tally:
    """Sums over one accumulate call of one run."""

    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    mismatch_tokens: int = 0
    loss_sum: float = 0.0
    finite: bool = True
    groups: list[PromptGroup] = field(default_factory=list)


def train_state(slot: Slot, cursor: Cursor) -> TrainState:
    """Everything that the run needs to go on from its last step."""
    exp_avg, exp_avg_sq = slot.optimizer.moments
    return TrainState(
        slot.optimizer.step_count, slot.optimizer.target_step, cursor, slot.incarnation, slot.adapter.rslora,
        slot.adapter.master, exp_avg, exp_avg_sq,
    )  # fmt: skip


def observe(tally: Tally, result: HeadResult, sampler: Tensor, first: int, last: int) -> None:
    """Add one pass's tokens of one run."""
    gap = (result.logprob[first:last] - sampler[first:last]).abs()
    tally.mismatch_sum += float(gap.sum())
    tally.mismatch_max = max(tally.mismatch_max, float(gap.max()))
    tally.mismatch_tokens += last - first
    tally.loss_sum += float(result.loss[first:last].sum())
    tally.finite = tally.finite and bool(torch.isfinite(result.logprob[first:last]).all())


def count(slot: Slot, tally: Tally) -> RunBatchStats:
    """Add the batch to the run's denominator and describe it."""
    samples = [s for group in tally.groups for s in group.samples]
    kept = [s for s in samples if not (slot.params.mask_truncated and s.truncated)]
    tokens = sum(len(s.token_ids) for s in kept)
    slot.denominator += tokens if slot.params.reduction == "tokenMean" else len(kept)
    slot.groups += len(tally.groups)
    return RunBatchStats(
        uid=slot.uid,
        groups=len(tally.groups),
        samples=len(samples),
        tokens=tokens,
        mismatch_sum=tally.mismatch_sum,
        mismatch_max=tally.mismatch_max,
        mismatch_tokens=tally.mismatch_tokens,
        loss_sum=tally.loss_sum,
        response_tokens=sum(len(s.token_ids) for s in samples),
    )
