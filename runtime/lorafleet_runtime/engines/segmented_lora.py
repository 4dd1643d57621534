"""LoRA over a batch of mixed adapters, as one pair of matrix products per adapter that is in it.

Pure torch; `cpu_lora.py` puts it under vLLM on CPU.

Legend: T tokens, D input size, O output size, R slot rank, S slots, N slices (q, k and v are 3 slices of one layer).
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

Segments = tuple[tuple[int, torch.Tensor | None], ...]
"""(slot, rows [T_slot] int64) for each slot in a batch; rows is None where one slot holds every token."""


def segments(token_slots: torch.Tensor) -> Segments:
    """Which rows belong to which adapter slot, in slot order; tokens without an adapter are in no segment.

    Args:
        token_slots: [T] int64; slot of each token, -1 for none.
    """
    slots = torch.unique(token_slots).tolist()
    if len(slots) == 1 and slots[0] >= 0:
        return ((slots[0], None),)
    return tuple((slot, (token_slots == slot).nonzero().flatten()) for slot in slots if slot >= 0)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    scale: float,
    groups: Segments,
) -> None:
    """Add scale * x A^T B^T to `y`, slice beside slice.

    Args:
        y: [T, sum of the slices' O]; changed in place.
        x: [T, D].
        lora_a: N of [S, 1, R, D].
        lora_b: N of [S, 1, O, R].
        scale: multiplies the product.
        groups: of this batch.
    """
    for slot, rows in groups:
        x_slot = _take(x, rows)
        offset = 0
        for a, b in zip(lora_a, lora_b, strict=True):
            delta = linear(linear(x_slot, a[slot, 0]).mul_(scale), b[slot, 0])
            _add(y[:, offset : offset + delta.shape[1]], rows, delta)
            offset += delta.shape[1]


def shrink(
    y: Sequence[torch.Tensor] | torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    scale: float,
    groups: Segments,
) -> None:
    """Set y[i] to scale * x A_i^T in the rows that have an adapter; the other rows stay.

    Args:
        y: N of [T, R]; changed in place.
        x: [T, D].
        lora_a: N of [S, 1, R, D].
        scale: multiplies the product.
        groups: of this batch.
    """
    for slot, rows in groups:
        x_slot = _take(x, rows)
        for out, a in zip(y, lora_a, strict=True):
            shrunk = linear(x_slot, a[slot, 0]).mul_(scale).to(out.dtype)
            if rows is None:
                out.copy_(shrunk)
            else:
                out.index_copy_(0, rows, shrunk)


def expand(
    y: torch.Tensor,
    x: Sequence[torch.Tensor] | torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    offset: int,
    add: bool,
    groups: Segments,
) -> None:
    """Add x_i B_i^T to slice i of `y`, or replace it, in the rows that have an adapter.

    Args:
        y: [T, at least offset + sum of the slices' O]; changed in place.
        x: N of [T, R].
        lora_b: N of [S, 1, O, R].
        offset: first column.
        add: False replaces.
        groups: of this batch.
    """
    for slot, rows in groups:
        start = offset
        for x_slice, b in zip(x, lora_b, strict=True):
            delta = linear(_take(x_slice, rows).to(b.dtype), b[slot, 0])
            columns = y[:, start : start + delta.shape[1]]
            if add:
                _add(columns, rows, delta)
            elif rows is None:
                columns.copy_(delta)
            else:
                columns.index_copy_(0, rows, delta.to(y.dtype))
            start += delta.shape[1]


def _take(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)


def _add(columns: torch.Tensor, rows: torch.Tensor | None, delta: torch.Tensor) -> None:
    if rows is None:
        columns += delta
    else:
        columns.index_add_(0, rows, delta.to(columns.dtype))
