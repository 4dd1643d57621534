"""Which rank has which part of an adapter, and how the parts become a whole again.

Two cuts lie across each other. Tensor-parallel ranks each have a slice of a matrix, or all of it (layout.py says
which). Data-parallel ranks have the same slices, but each owns the masters and moments of some matrices only: whole
ones, dealt out by size, as in the layer-wise ZeRO-1 of Megatron (LayerWiseDistributedOptimizer). Owned by
lora.SlotAdapter; everything here is a collective on ranks that are more than one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.layout import FlatTensor
from lorafleet_runtime.trainer.parallel import Ranks


class _Span(NamedTuple):
    """Neighbouring matrices of one owner in a rank's flat buffer."""

    start: int
    end: int
    shared: bool
    """Every tensor-parallel rank has the same matrices here."""


class Shares:
    """The cut of one adapter.

    Args:
        layout: of one tensor-parallel rank.
        ranks: of the trainer.
    """

    def __init__(self, layout: Sequence[FlatTensor], ranks: Ranks) -> None:
        """Deal out the matrices."""
        self._layout, self._ranks = layout, ranks
        self._spans = _deal(layout, ranks.dp)
        self._sizes = [sum(span.end - span.start for span in spans) for spans in self._spans]
        self.own_size = self._sizes[ranks.dp_rank]
        """Elements of masters and of each moment on this rank."""

    def own(self, full: Tensor) -> Tensor:
        """This rank's own elements of a vector of the whole adapter.

        Args:
            full: [elements] in the canonical layout.
        """
        return self._pick(self.slice(full), self._spans[self._ranks.dp_rank])

    def slice(self, full: Tensor, partial: bool = False) -> Tensor:
        """This tensor-parallel rank's flat buffer from the whole adapter's.

        Args:
            full: [elements] in the canonical layout.
            partial: of a sum over ranks, so what all of them have goes to the first one.
        """
        if self._ranks.tp == 1:
            return full
        parts = self._parts(full)
        if partial and self._ranks.tp_rank:
            parts = [
                part if e.split is not None else torch.zeros_like(part)
                for part, e in zip(parts, self._layout, strict=True)
            ]
        return torch.cat([part.flatten() for part in parts])

    def reduce(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's own masters: summed over data-parallel ranks in their order, and whole.

        Args:
            grad: [elements] of this rank; may be the result itself.
        """
        if self._ranks.dp == 1:
            total = grad
        else:
            parts = self._ranks.exchange_over_dp(torch.stack([self._padded(grad, spans) for spans in self._spans]))
            total = parts[0]
            for part in parts[1:]:
                total += part
            total = total[: self.own_size]
        if self._ranks.tp > 1:  # a rank has seen its slice of the outputs only, and so a part of these sums
            shared = self._pick_own(total, shared=True)
            self._put_own(total, self._ranks.sum_over_tp(shared))
        return total

    def norm(self, own: Tensor) -> float:
        """L2 norm of the whole vector that every rank has its own part of, in float64; the same number on each."""
        if self._ranks.world == 1:
            return float(torch.linalg.vector_norm(own, dtype=torch.float64))
        split = self._pick_own(own, shared=False).double().square().sum()
        shared = self._pick_own(own, shared=True).double().square().sum()
        mine = float(split) + (float(shared) if self._ranks.tp_rank == 0 else 0.0)
        return math.sqrt(math.fsum(self._ranks.gather(mine)))

    def whole(self, own: Tensor) -> Tensor:
        """[elements] of this tensor-parallel rank, from every data-parallel rank's own part."""
        return own if self._ranks.dp == 1 else self._assembled(list(self._ranks.collect_over_dp(self._own_padded(own))))

    def complete(self, own: Tensor) -> Tensor | None:
        """The whole adapter's vector from every rank's own part, in the canonical layout, on rank 0; None on others.

        It takes one vector at a time to rank 0 alone, so no other rank ever holds more than its share.

        Args:
            own: [own elements]; may be part of the result.
        """
        parts = self._ranks.collect_on_first_dp(self._own_padded(own))
        return None if parts is None else self.canonical(own if self._ranks.dp == 1 else self._assembled(parts))

    def _own_padded(self, own: Tensor) -> Tensor:
        """All ranks' parts have one length: gloo refuses uneven ones."""
        return torch.nn.functional.pad(own, (0, max(self._sizes) - self.own_size)) if self._ranks.dp > 1 else own

    def _assembled(self, parts: Sequence[Tensor]) -> Tensor:
        flat = parts[0].new_empty(self._layout[-1].end)
        for spans, part in zip(self._spans, parts, strict=True):
            first = 0
            for span in spans:
                size = span.end - span.start
                flat[span.start : span.end] = part[first : first + size]
                first += size
        return flat

    def canonical(self, flat: Tensor) -> Tensor | None:
        """The whole adapter in the canonical layout, on the first tensor-parallel rank; None on the others.

        Args:
            flat: [elements] of this rank.
        """
        ranks = self._ranks
        shares = ranks.collect_on_first_tp(flat)
        if shares is None or ranks.tp == 1:
            return None if shares is None else flat
        pieces = []
        for entry in self._layout:
            views = [entry.view(share) for share in shares]
            pieces.append((views[0] if entry.split is None else torch.cat(views, dim=entry.split)).flatten())
        return torch.cat(pieces)

    def addends(self, flat: Tensor) -> Tensor | None:
        """[tensor-parallel ranks, elements]: what each rank has of a sum, in the canonical layout.

        They are not added up: a run that is loaded again goes on adding to each, and must round as if it had stayed.

        Args:
            flat: [elements] of this rank.

        Returns:
            On the first tensor-parallel rank; None on the others. A slice of a matrix has zeros around it.
        """
        shares = self._ranks.collect_on_first_tp(flat)
        return None if shares is None else torch.stack([self._placed(share, i) for i, share in enumerate(shares)])

    def _placed(self, share: Tensor, tp_rank: int) -> Tensor:
        pieces = []
        for entry in self._layout:
            matrix = entry.view(share)
            if entry.split is not None:
                width = entry.shape[entry.split]
                around = [tp_rank * width, (self._ranks.tp - 1 - tp_rank) * width]
                matrix = torch.nn.functional.pad(matrix, [0, 0, *around] if entry.split == 0 else [*around, 0, 0])
            pieces.append(matrix.flatten())
        return torch.cat(pieces)

    def _parts(self, full: Tensor) -> list[Tensor]:
        """This tensor-parallel rank's slice of each matrix."""
        parts, offset, ranks = [], 0, self._ranks
        for entry in self._layout:
            shape = list(entry.shape)
            if entry.split is not None:
                shape[entry.split] *= ranks.tp
            size = shape[0] * shape[1]
            matrix = full[offset : offset + size].view(shape)
            offset += size
            if entry.split is not None:
                width = entry.shape[entry.split]
                matrix = matrix.narrow(entry.split, ranks.tp_rank * width, width)
            parts.append(matrix)
        return parts

    def _pick(self, flat: Tensor, spans: Sequence[_Span]) -> Tensor:
        if self._ranks.dp == 1:
            return flat
        return torch.cat([flat[:0], *(flat[span.start : span.end] for span in spans)])  # more ranks than matrices

    def _padded(self, flat: Tensor, spans: Sequence[_Span]) -> Tensor:
        picked = self._pick(flat, spans)
        return torch.nn.functional.pad(picked, (0, max(self._sizes) - len(picked)))

    def _own_ranges(self, shared: bool) -> list[tuple[int, int]]:
        """Where this rank's own vector holds matrices that all tensor-parallel ranks have, or slices of cut ones."""
        ranges, first = [], 0
        for span in self._spans[self._ranks.dp_rank]:
            if span.shared is shared:
                ranges.append((first, first + span.end - span.start))
            first += span.end - span.start
        return ranges

    def _pick_own(self, own: Tensor, shared: bool) -> Tensor:
        return torch.cat([own[:0], *(own[start:end] for start, end in self._own_ranges(shared))])

    def _put_own(self, own: Tensor, shared: Tensor) -> None:
        first = 0
        for start, end in self._own_ranges(shared=True):
            own[start:end] = shared[first : first + end - start]
            first += end - start


def _deal(layout: Sequence[FlatTensor], dp: int) -> list[list[_Span]]:
    """Each matrix to the rank that has least so far, largest first; the same on every rank."""
    loads = [0] * dp
    owners: dict[int, int] = {}
    for at in sorted(range(len(layout)), key=lambda i: layout[i].offset - layout[i].end):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += layout[at].end - layout[at].offset
    spans: list[list[_Span]] = [[] for _ in range(dp)]
    for at, entry in enumerate(layout):
        mine, shared = spans[owners[at]], entry.split is None
        if mine and mine[-1].end == entry.offset and mine[-1].shared is shared:
            mine[-1] = mine[-1]._replace(end=entry.end)
        else:
            mine.append(_Span(entry.offset, entry.end, shared))
    return spans
