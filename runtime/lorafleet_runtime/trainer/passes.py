"""Forward and backward over prompt groups of several runs.

Called by rank.py for each accumulate. The groups of a run are dealt out over data-parallel ranks by their place in the
run's step, so who computes what depends on no other run. Gradients go into the slots' own sums on the rank that
computed them; nothing is summed over ranks before the step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import TrainerSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.admit import check_group
from lorafleet_runtime.trainer.batch import MicroBatch, Work, make_micro_batch, pack, sample_values, split_group
from lorafleet_runtime.trainer.lora import Segment
from lorafleet_runtime.trainer.losses.head import head_logprobs, head_loss
from lorafleet_runtime.trainer.losses.policy import PolicyTokens, policy_loss
from lorafleet_runtime.trainer.losses.statistics import read, span_sums
from lorafleet_runtime.trainer.model import BaseModel
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.shape import ModelShape
from lorafleet_runtime.trainer.slot import Slot, Tally, observe
from lorafleet_runtime.types import PolicySums, PromptGroup, RunFault


def admit(
    groups: Sequence[PromptGroup], slots: Mapping[int, Slot], shape: ModelShape, settings: TrainerSpec, ranks: Ranks
) -> tuple[list[RunFault], dict[int, Tally]]:
    """Sort groups by slot; a run with a group that cannot be trained is left out whole.

    Returns:
        Faults, and what to compute by slot number.
    """
    by_uid: dict[str, list[PromptGroup]] = defaultdict(list)
    for group in groups:
        by_uid[group.uid].append(group)
    faults: list[RunFault] = []
    tallies: dict[int, Tally] = {}
    numbers = {slot.uid: number for number, slot in slots.items()}
    for uid, own in by_uid.items():
        try:
            if uid not in numbers:
                raise RunError(reasons.INTERNAL_ERROR, f"run {uid} is in no trainer slot; load it first")
            for group in own:
                check_group(group, shape)
        except RunError as error:
            faults.append(error.fault(uid))
            continue
        # In fast mode runs with a group or two per step begin on different ranks, so that all ranks have work.
        first = slots[numbers[uid]].groups + (0 if settings.deterministic else numbers[uid])
        mine = [group for i, group in enumerate(own, first) if i % ranks.dp == ranks.dp_rank]
        tallies[numbers[uid]] = Tally(groups=own, mine=mine)
    return faults, tallies


def run_passes(
    model: BaseModel, slots: Mapping[int, Slot], tallies: Mapping[int, Tally], settings: TrainerSpec, ranks: Ranks
) -> int:
    """Compute every tally; afterwards each holds the sums over all ranks.

    Returns:
        Rows without padding that went through the model, over all ranks.
    """
    work = [piece for number, tally in tallies.items() for piece in _work(number, slots[number], tally, settings)]
    rows = 0
    numbers: list[int] = []
    sums: list[Tensor] = []
    for with_kl in (False, True):  # a pass with a KL term runs the base model too, which others should not pay for
        chosen = [piece for piece in work if (piece.params.kl_coef > 0) is with_kl]
        for members in pack(chosen, settings.micro_batch_tokens, settings.deterministic):
            batch, found = _pass(model, slots, tallies, members)
            rows += batch.num_rows
            numbers += [number for number, _, _ in batch.spans]
            sums.append(found)
    for number, statistics in zip(numbers, read(sums), strict=True):
        observe(tallies[number], statistics)
    return _add_up(tallies, rows, ranks)


def _work(number: int, slot: Slot, tally: Tally, settings: TrainerSpec) -> list[Work]:
    needed = [group for group in tally.mine if slot.params.kl_coef > 0 or not group.is_constant]
    budget = settings.micro_batch_tokens
    return [piece for group in needed for piece in split_group(number, slot.params, group, budget)]


def _pass(
    model: BaseModel, slots: Mapping[int, Slot], tallies: Mapping[int, Tally], members: Sequence[Work]
) -> tuple[MicroBatch, Tensor]:
    """One forward and backward pass, and the sums of its spans. Waits for the device only where steps are recorded."""
    loss_type = torch.float64 if model.dtype == torch.float64 else torch.float32
    batch = make_micro_batch(members, model.device, loss_type)
    segments = [Segment(slots[n].adapter, start, end) for n, start, end in batch.segments]
    policy = batch.policy
    if members[0].params.kl_coef > 0:
        policy = _with_reference(model, batch)
    hidden = model.hidden(batch.ids, batch.groups, segments)
    with torch.no_grad():
        result = head_loss(
            hidden.detach()[batch.rows],
            model.vocabulary,
            batch.head,
            lambda logprob, first, last: policy_loss(logprob, policy.slice(first, last)),
        )
        grad = torch.zeros_like(hidden).index_copy_(0, batch.rows, result.grad_hidden)
        sums = span_sums(result, policy, batch.spans)
        _keep_logprobs(slots, tallies, members, result.logprob)
    torch.autograd.backward(hidden, grad)
    return batch, sums


def _keep_logprobs(
    slots: Mapping[int, Slot], tallies: Mapping[int, Tally], members: Sequence[Work], logprob: Tensor
) -> None:
    """Of the runs that record their steps."""
    if all(slots[piece.slot].recorder is None for piece in members):
        return
    for piece, values in zip(members, sample_values(members, logprob.cpu()), strict=True):
        if slots[piece.slot].recorder is not None:
            keys = [(id(piece.prompt), id(sample)) for sample in piece.samples]
            tallies[piece.slot].logprobs.update(zip(keys, values, strict=True))


def _with_reference(model: BaseModel, batch: MicroBatch) -> PolicyTokens:
    """The batch's tokens with log-probabilities of the base model, for the KL term."""
    with torch.no_grad():
        hidden = model.hidden(batch.ids, batch.groups, ())
        reference = head_logprobs(hidden[batch.rows], model.vocabulary, batch.head)
    return batch.policy.with_reference(reference)


def _add_up(tallies: Mapping[int, Tally], rows: int, ranks: Ranks) -> int:
    """Sum the tallies over data-parallel ranks, so that all of them count and judge alike. Returns all rows."""
    mine = [(t.policy, t.mismatch_max, t.loss_sum, t.finite) for t in tallies.values()]
    found = ranks.gather_from_dp((rows, mine))
    for i, tally in enumerate(tallies.values()):
        sums, largest, losses, finite = zip(*(values[i] for _, values in found), strict=True)
        tally.policy, tally.mismatch_max = sum(sums, PolicySums()), max(largest)
        tally.loss_sum, tally.finite = sum(losses), all(finite)
    return sum(count for count, _ in found)
