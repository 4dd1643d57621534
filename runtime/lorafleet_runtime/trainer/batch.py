"""Packs prompt groups of several runs into passes through the model.

Called by passes.py. A pass holds whole groups, or shares of a group that is over the token budget by itself; the rows
of one slot are adjacent. The last token of a response is only a label and needs no row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.attention import GroupRows
from lorafleet_runtime.trainer.losses.head import HeadTokens
from lorafleet_runtime.trainer.losses.policy import LossParams, PolicyTokens
from lorafleet_runtime.trainer.transfer import to_device
from lorafleet_runtime.types import PromptGroup, Sample

ROW_MULTIPLE = 16
"""Rows of a pass are padded to this; CPU matrix products then give each row the same bits whatever its neighbours."""


class Work(NamedTuple):
    """A prompt and some of its samples, to be trained in one pass."""

    slot: int
    params: LossParams
    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def rows(self) -> int:
        """Rows in the pass."""
        return len(self.prompt) + sum(len(s.token_ids) - 1 for s in self.samples)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One pass: T rows, of which U predict N tokens."""

    ids: Tensor
    """[T] int64."""
    groups: tuple[GroupRows, ...]
    segments: tuple[tuple[int, int, int], ...]
    """(slot, first row, end row), in slot order."""
    rows: Tensor
    """[U] int64: which rows predict."""
    head: HeadTokens
    policy: PolicyTokens
    spans: tuple[tuple[int, int, int], ...]
    """(slot, first token, end token), in slot order."""
    num_rows: int
    """Rows without padding."""


def split_group(slot: int, params: LossParams, group: PromptGroup, budget: int) -> Iterator[Work]:
    """The parts of a group that enter the loss, each within the budget where one sample alone is.

    Samples that maskTruncated leaves out, and empty responses, need no pass.
    """
    chosen: list[Sample] = []
    rows = len(group.prompt_ids)
    for sample in group.samples:
        if not sample.token_ids or (params.mask_truncated and sample.truncated):
            continue
        extra = len(sample.token_ids) - 1
        if chosen and rows + extra > budget:
            yield Work(slot, params, group.prompt_ids, tuple(chosen))
            chosen, rows = [], len(group.prompt_ids)
        chosen.append(sample)
        rows += extra
    if chosen:
        yield Work(slot, params, group.prompt_ids, tuple(chosen))


def pack(work: Sequence[Work], budget: int, deterministic: bool) -> list[list[Work]]:
    """Fill passes up to the budget; inside a pass the work is sorted by slot, and that of a run keeps its order.

    Bin packing by first-fit decreasing (Johnson 1973: at most 11/9 of the best number of passes, and 6/9). Filling
    passes in order needs no more of them often enough; then that is taken, since its passes hold fewer runs.

    Args:
        work: in any order.
        budget: rows of a pass; only work that is over it by itself makes a larger one.
        deterministic: one piece of work per pass, in order, so that no pass depends on another run.
    """
    ordered = sorted(work, key=lambda w: w.slot)
    if deterministic:
        return [[piece] for piece in ordered]
    sizes = [piece.rows for piece in ordered]
    in_order, fitted = _next_fit(sizes, budget), _first_fit_decreasing(sizes, budget)
    best = fitted if len(fitted) < len(in_order) else in_order
    return [[ordered[i] for i in members] for members in best]


def _next_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `sizes` by pass, in order."""
    passes: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not passes or size > room:
            passes.append([])
            room = budget
        passes[-1].append(i)
        room -= size
    return passes


def _first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `sizes` by pass, ascending in each; passes by their first index."""
    passes: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((p for p, left in enumerate(room) if sizes[i] <= left), None)
        if place is None:
            place = len(passes)
            passes.append([])
            room.append(budget)
        passes[place].append(i)
        room[place] -= sizes[i]
    return sorted(sorted(members) for members in passes)


def make_micro_batch(work: Sequence[Work], device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Tensors of one pass.

    Args:
        work: sorted by slot.
        device: of the model.
        dtype: of the loss arithmetic: float64 when the model is, else float32.
    """
    ids: list[int] = []
    groups: list[GroupRows] = []
    segments: list[tuple[int, int, int]] = []
    rows: list[int] = []
    token_row: list[int] = []
    labels: list[int] = []
    spans: list[tuple[int, int, int]] = []
    temperature: list[float] = []
    for piece in work:
        first_row, first_token, first_head = len(ids), len(labels), len(rows)
        ids += piece.prompt
        rows.append(len(ids) - 1)
        token_row += [first_head] * len(piece.samples)
        labels += [sample.token_ids[0] for sample in piece.samples]
        lengths = []
        for sample in piece.samples:
            extra = len(sample.token_ids) - 1
            if extra:
                token_row += range(len(rows), len(rows) + extra)
                rows += range(len(ids), len(ids) + extra)
                ids += sample.token_ids[:-1]
                labels += sample.token_ids[1:]
                lengths.append(extra)
        groups.append(GroupRows(len(piece.prompt), tuple(lengths)))
        temperature += [1.0 / piece.params.temperature] * (len(rows) - first_head)
        _extend(segments, piece.slot, first_row, len(ids))
        _extend(spans, piece.slot, first_token, len(labels))
    num_rows = len(ids)
    padding = -num_rows % ROW_MULTIPLE
    if padding:
        ids += [0] * padding
        groups.append(GroupRows(padding))

    def integers(values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), device)

    inverse = to_device(torch.tensor(temperature, dtype=dtype), device)
    host_row = torch.tensor(token_row, dtype=torch.int64)
    head = HeadTokens(to_device(host_row, device), host_row, integers(labels), inverse)
    policy = _policy_tokens(work, device, dtype)
    return MicroBatch(
        integers(ids), tuple(groups), tuple(segments), integers(rows), head, policy, tuple(spans), num_rows
    )


def sample_values(work: Sequence[Work], values: Tensor) -> list[tuple[Tensor, ...]]:
    """The inverse of the labels' order: per piece of work, the values [R] of each of its samples.

    Args:
        work: of one pass, as given to `make_micro_batch`.
        values: [N], one for each of the pass's labels, as HeadResult.logprob.
    """
    out: list[tuple[Tensor, ...]] = []
    start = 0
    for piece in work:
        count = len(piece.samples)
        firsts = values[start : start + count]
        start += count
        mine = []
        for i, sample in enumerate(piece.samples):
            extra = len(sample.token_ids) - 1
            mine.append(torch.cat((firsts[i : i + 1], values[start : start + extra])))
            start += extra
        out.append(tuple(mine))
    return out


def _extend(ranges: list[tuple[int, int, int]], slot: int, start: int, end: int) -> None:
    """Append a range, or lengthen the last one when it is the same slot's."""
    if ranges and ranges[-1][0] == slot:
        start = ranges.pop()[1]
    ranges.append((slot, start, end))


def _policy_tokens(work: Sequence[Work], device: torch.device, dtype: torch.dtype) -> PolicyTokens:
    """Per-token values in the order of the labels: first tokens of a group, then the others, sample by sample."""
    advantage: list[float] = []
    sampler: list[float] = []
    weight: list[float] = []
    counts: list[int] = []
    for piece in work:
        weights = [piece.params.token_weight(len(s.token_ids)) for s in piece.samples]
        advantage += [s.advantage for s in piece.samples]
        sampler += [s.sampler_logprobs[0] for s in piece.samples]
        weight += weights
        for sample, w in zip(piece.samples, weights, strict=True):
            extra = len(sample.token_ids) - 1
            advantage += [sample.advantage] * extra
            sampler += sample.sampler_logprobs[1:]
            weight += [w] * extra
        counts.append(sum(len(s.token_ids) for s in piece.samples))
    repeats = torch.tensor(counts)

    def floats(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), device)

    def spread(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype).repeat_interleave(repeats), device)

    params = [piece.params for piece in work]
    return PolicyTokens(
        advantage=floats(advantage),
        sampler=floats(sampler),
        weight=floats(weight),
        clip_low=spread([p.clip_low for p in params]),
        clip_high=spread([p.clip_high for p in params]),
        dual_clip=spread([p.dual_clip for p in params]),
        tis_mode=spread([float(p.tis_mode) for p in params]),
        tis_floor=spread([p.tis_floor for p in params]),
        tis_cap=spread([p.tis_cap for p in params]),
        kl_coef=spread([p.kl_coef for p in params]),
        kl_type=spread([float(p.kl_type) for p in params]),
        reference=torch.zeros(len(weight), dtype=dtype, device=device),
    )
