"""What the trainer keeps of a live run, and the sums over its part of a batch.

Called by rank.py. Nothing here runs the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.trainer.checkpoint import Identity, Partial, TrainState
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.losses import reduction
from lorafleet_runtime.trainer.losses.policy import LossParams
from lorafleet_runtime.trainer.losses.statistics import SpanStatistics
from lorafleet_runtime.trainer.optimizer import SlotOptimizer
from lorafleet_runtime.trainer.record import StepRecorder, Unfinished
from lorafleet_runtime.types import Cursor, PolicySums, PromptGroup, RunBatchStats


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
    reward_sum: float = 0.0
    """Over the samples of these groups."""
    samples: int = 0
    policy: PolicySums = field(default_factory=PolicySums)
    """Of these groups."""
    recorder: StepRecorder | None = None
    """Of a run with recordSteps."""
    broken: str = ""
    """Why nothing of this slot may be kept any more; empty while all is well."""

    def discard(self) -> None:
        """Forget what was accumulated since the last step."""
        self.adapter.grad.zero_()
        self.denominator = self.groups = self.samples = 0
        self.reward_sum, self.policy = 0.0, PolicySums()
        if self.recorder is not None:
            self.recorder.discard()

    def partial(self) -> Partial | None:
        """The whole run's gradient sums on rank 0, None on the others; a collective."""
        adapter, ranks = self.adapter, self.adapter.ranks
        mine = adapter.shares.addends(adapter.grad)
        if mine is None:
            return None
        sums = ranks.collect_on_first_dp(mine)
        if sums is None:
            return None
        grad = torch.stack([host(s) for s in sums])
        return Partial(grad, self.denominator, self.groups, self.reward_sum, self.samples, self.policy)

    def state(self, cursor: Cursor, copy: Callable[[Tensor], Tensor] | None = None) -> TrainState | None:
        """Everything that the run needs to go on from its last step, on rank 0; None on the others. A collective.

        Args:
            cursor: the prompt groups consumed up to that step.
            copy: to the host, of a tensor that the slot's next step changes; None is `host`.
        """
        whole: list[Tensor] = []
        for own in (self.adapter.master, *self.optimizer.moments):
            full = self.adapter.shares.complete(own)
            if full is not None:
                whole.append((copy or host)(full))
        if not self.adapter.ranks.is_first:
            return None
        master, exp_avg, exp_avg_sq = whole
        return TrainState(
            self.optimizer.step_count, self.optimizer.target_step, cursor, self.incarnation, self.adapter.rslora,
            master, exp_avg, exp_avg_sq,
        )  # fmt: skip

    def restore(self, state: TrainState, unfinished: Unfinished | None = None) -> None:
        """Take over a state of the whole run; on every rank. `unfinished`: on rank 0, of a run that records."""
        adapter, ranks = self.adapter, self.adapter.ranks
        adapter.install(state.master)
        exp_avg, exp_avg_sq = (
            torch.empty_like(adapter.master).copy_(adapter.shares.own(full))
            for full in (state.exp_avg, state.exp_avg_sq)
        )
        self.optimizer.restore(state.step, exp_avg, exp_avg_sq)
        if state.partial is None:
            return
        sums = state.partial.grad
        if sums.shape[:2] == (ranks.dp, ranks.tp):
            adapter.grad.copy_(adapter.shares.slice(sums[ranks.dp_rank, ranks.tp_rank]))
        elif ranks.dp_rank == 0:  # saved by a trainer of another layout
            adapter.grad.copy_(adapter.shares.slice(sums.sum((0, 1)), partial=True))
        self.denominator, self.groups = state.partial.denominator, state.partial.groups
        self.reward_sum, self.samples = state.partial.reward_sum, state.partial.samples
        self.policy = state.partial.policy
        if self.recorder is not None:
            self.recorder.restore(self.groups, unfinished)


def host(tensor: Tensor) -> Tensor:
    """A copy on the host that nobody else writes to."""
    return tensor.detach().to("cpu", copy=True)


@dataclass(slots=True)
class Tally:
    """Sums over one accumulate call of one run."""

    groups: list[PromptGroup]
    """All of them."""
    mine: list[PromptGroup]
    """Those that this rank computes."""
    policy: PolicySums = field(default_factory=PolicySums)
    mismatch_max: float = 0.0
    loss_sum: float = 0.0
    finite: bool = True
    logprobs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Of a run that records: by the identities of a prompt and a sample in `mine`."""


def observe(tally: Tally, found: SpanStatistics) -> None:
    """Add one pass's tokens of one run."""
    tally.policy += found.policy
    tally.mismatch_max = max(tally.mismatch_max, found.mismatch_max)
    tally.loss_sum += found.loss
    tally.finite = tally.finite and found.finite


def count(slot: Slot, tally: Tally) -> RunBatchStats:
    """Add the batch to the run's denominator and describe it."""
    samples = [s for group in tally.groups for s in group.samples]
    kept = reduction.kept(samples, slot.params.mask_truncated)
    tokens = sum(len(s.token_ids) for s in kept)
    slot.denominator += reduction.denominator(slot.params.reduction, kept)
    slot.groups += len(tally.groups)
    slot.reward_sum += sum(s.reward for s in samples)
    slot.samples += len(samples)
    slot.policy += tally.policy
    if slot.recorder is not None:
        slot.recorder.add(tally.groups, tally.mine, tally.logprobs)
    return RunBatchStats(
        uid=slot.uid,
        groups=len(tally.groups),
        samples=len(samples),
        tokens=tokens,
        policy=tally.policy,
        mismatch_max=tally.mismatch_max,
        loss_sum=tally.loss_sum,
        response_tokens=sum(len(s.token_ids) for s in samples),
    )
