"""What a run's response tokens show of its policy and its loss, for people; docs/algorithms.md has the formulas.

Called by passes.py; nothing here has a gradient. Sums stay on the device, a row per run and pass, until all passes of a
batch are queued: the host waits for the device once per batch, and prepares one pass while the device computes another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.losses.clip import stopped
from lorafleet_runtime.trainer.losses.head import HeadResult
from lorafleet_runtime.trainer.losses.kl import K3, kl_penalty
from lorafleet_runtime.trainer.losses.mismatch import corrected
from lorafleet_runtime.trainer.losses.policy import PolicyTokens, compared_with
from lorafleet_runtime.types import PolicySums


class SpanStatistics(NamedTuple):
    """Of one run's tokens in one pass."""

    policy: PolicySums
    loss: float
    """Sum of the weighted token losses."""
    finite: bool
    """All log-probabilities are."""
    mismatch_max: float


def span_sums(result: HeadResult, tokens: PolicyTokens, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """The sums of each span, from its own tokens alone: [spans, 12] float64 on the device, for `read`.

    Args:
        result: of the pass's N tokens.
        tokens: the same ones.
        spans: (slot, first token, end token), none of them empty.
    """
    t, own = tokens, result.logprob
    gap = own - t.sampler
    with_kl = t.kl_coef > 0
    k3 = torch.full_like(own, K3)
    of_clip = t.advantage, t.clip_low, t.clip_high, t.dual_clip
    values = [  # in the order of PolicySums' fields, then what is left of SpanStatistics
        torch.ones_like(own), gap.abs(), result.entropy, -gap, kl_penalty(t.sampler, own, k3),
        with_kl, torch.where(with_kl, kl_penalty(own, t.reference, k3), 0.0),
        stopped(own, compared_with(own, t), *of_clip), corrected(own, t.sampler, t.tis_mode, t.tis_floor, t.tis_cap),
        result.loss, own.isfinite().logical_not_(),
    ]  # fmt: skip
    table = torch.stack([value.double() for value in values])
    gaps = table[1:2]
    rows = [torch.cat((table[:, a:b].sum(dim=1), gaps[:, a:b].amax(dim=1))) for _, a, b in spans]
    return torch.stack(rows)


def read(sums: Sequence[Tensor]) -> list[SpanStatistics]:
    """Fetch the sums of several passes from the device, in order."""
    return [
        SpanStatistics(PolicySums(*policy), loss, not_finite == 0, largest)
        for *policy, loss, not_finite, largest in (torch.cat(tuple(sums)).tolist() if sums else ())
    ]
