"""Attention of a whole packed pass in one call of PyTorch's variable-length flash attention, on CUDA.

Called by attention.py. Every response is a sequence of its own whose keys are [prompt | own rows], so keys and values
of a shared prompt are laid out once per response; queries stay where they are. Sequences do not see each other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lorafleet_runtime.trainer.transfer import to_device

_COLUMNS = 512
_MOST_COPIES = 3
"""Keys of a pass by its rows; torch keeps the copies of every layer for the backward pass."""


class Spread(NamedTuple):
    """Keys that are used by several sequences."""

    row: Tensor
    """[K] int64: the row that each key comes from."""
    place: Tensor
    """[K] int64: where the copies of row 0, 1, ... lie, in order."""
    first: Tensor
    """[T + 1] int64: where each row's copies begin in `place`."""


class Sequences(NamedTuple):
    """The S sequences of a pass."""

    query_bounds: Tensor
    """[S + 1] int32."""
    key_bounds: Tensor
    """[S + 1] int32."""
    max_queries: int
    max_keys: int
    spread: Spread | None
    """None where every row is a key of one sequence only."""


def make_sequences(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Sequences | None:
    """Describe a pass; None where copies of shared prompts would outgrow it (a long prompt with many responses).

    Args:
        groups: (prompt rows, rows of each response), in the order of the pass's rows.
        device: of the model.
    """
    queries: list[int] = []
    keys: list[int] = []
    ranges: list[tuple[int, int]] = []
    row = 0
    for prompt, responses in groups:
        start, row = row, row + prompt
        if len(responses) < 2:  # a plain sequence
            row += sum(responses)
            queries.append(row - start)
            keys.append(row - start)
            ranges.append((start, row))
            continue
        queries.append(prompt)
        keys.append(prompt)
        ranges.append((start, row))
        for rows in responses:
            queries.append(rows)
            keys.append(prompt + rows)
            ranges += [(start, start + prompt), (row, row + rows)]
            row += rows
    if sum(keys) > _MOST_COPIES * row:
        return None
    spread = None
    if sum(keys) > row:
        source = torch.cat([torch.arange(first, end) for first, end in ranges])
        first = torch.cat([torch.zeros(1, dtype=torch.int64), source.bincount(minlength=row).cumsum(0)])
        spread = Spread(*(to_device(x, device) for x in (source, source.argsort(stable=True), first)))
    return Sequences(_bounds(queries, device), _bounds(keys, device), max(queries), max(keys), spread)


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Causal attention within each sequence.

    Args:
        query: [T, heads, head_dim], float16 or bfloat16.
        key: [T, kv_heads, head_dim].
        value: [T, kv_heads, head_dim].
        sequences: of the pass.

    Returns:
        [T, heads, head_dim].
    """
    s = sequences
    if s.spread is not None:
        key, value = (_SpreadRows.apply(x, s.spread) for x in (key, value))  # type: ignore[no-untyped-call]
    out = varlen_attn(
        query, key, value, s.query_bounds, s.key_bounds, s.max_queries, s.max_keys,
        window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
    return out


def _bounds(sizes: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *sizes]).cumsum(0).int(), device)


class _SpreadRows(torch.autograd.Function):
    """x[row]; the gradients of a row's copies are added in float32 and in one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Spread) -> Tensor:
        ctx.spread, ctx.shape = spread, x.shape
        return x[spread.row]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dy = grads[0].contiguous()
        dx = dy.new_empty(ctx.shape)
        width = dx[0].numel()
        grid = (len(dx), triton.cdiv(width, _COLUMNS))
        _fold[grid](dy, dx, width, ctx.spread.place, ctx.spread.first, COLUMNS=_COLUMNS, num_warps=2)
        return dx, None


@triton.jit
def _fold(
    dy: tl.tensor, dx: tl.tensor, width: tl.tensor, place: tl.tensor, first: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    for copy in range(tl.load(first + row), tl.load(first + row + 1)):
        total += tl.load(dy + tl.load(place + copy) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + row * width + columns, total.to(dx.dtype.element_ty), mask=inside)
