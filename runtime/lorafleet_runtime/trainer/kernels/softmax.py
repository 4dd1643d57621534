"""Softmax statistics and gradient of the output head's logits: each reads the logits once and makes no copy of them.

Called by losses/head.py on CUDA, for one chunk of rows of a whole vocabulary or of this rank's part of it. Arithmetic
is float32. Must not let a row's result depend on other rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_STATISTICS_BLOCK = 4096
"""Columns per step of the one program of a row: 16 per thread, two 16-byte loads of bfloat16."""
_STATISTICS_WARPS = 8
_STATISTICS_STAGES = tl.constexpr(3)
"""The next blocks are on their way while one is summed, as the maximum over a block makes all its warps wait."""
_GRADIENT_BLOCK = 2048
"""Columns per program: 16 per thread."""
_GRADIENT_WARPS = 4


def row_statistics(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials, and entropy, of the softmax of every row of scale * logits.

    One pass over the row with a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for
    softmax"). A row with NaN or +inf gives NaN; with -inf its entropy is NaN.

    Args:
        logits: [n, V] bfloat16 or float32, contiguous.
        scale: [n] float32, contiguous: inverse temperature.

    Returns:
        [n] float32 each: log_total and the entropy in nats.

    Raises:
        ValueError: the logits are not contiguous.
    """
    rows, width = _contiguous(logits).shape
    log_total, entropy = scale.new_empty(rows), scale.new_empty(rows)
    _statistics[(rows,)](
        logits, scale, log_total, entropy, WIDTH=width, BLOCK=_STATISTICS_BLOCK, num_warps=_STATISTICS_WARPS
    )
    return log_total, entropy


class RowTokens(NamedTuple):
    """The tokens that are predicted from the rows of some logits."""

    first: Tensor
    """[n + 1] int64: where the tokens of each row begin, and their number."""
    column: Tensor
    """[N] int64: of each token's label, in the order of the rows; anything outside [0, V) where it is elsewhere."""
    slope: Tensor
    """[N] float32: of each token's loss, by its log-probability."""


def write_gradient(logits: Tensor, scale: Tensor, log_total: Tensor, tokens: RowTokens) -> None:
    """Replace the logits by the gradient: the sum over a row's tokens of slope * (onehot - softmax) * scale.

    All of a place is added up in float32 and rounded once. For a label that the model is sure of the two parts all but
    cancel, and what is left of them would be lost in bfloat16.

    Args:
        logits: [n, V] bfloat16 or float32, contiguous; overwritten.
        scale: [n] float32, contiguous.
        log_total: [n] float32, contiguous: from `row_statistics`, over the whole vocabulary.
        tokens: of these rows.

    Raises:
        ValueError: the logits are not contiguous.
    """
    rows, width = _contiguous(logits).shape
    grid = (rows, triton.cdiv(width, _GRADIENT_BLOCK))
    _gradient[grid](logits, scale, log_total, *tokens, WIDTH=width, BLOCK=_GRADIENT_BLOCK, num_warps=_GRADIENT_WARPS)


def _contiguous(logits: Tensor) -> Tensor:
    if not logits.is_contiguous():
        raise ValueError(f"logits: strides {logits.stride()} of shape {tuple(logits.shape)}; pass contiguous logits")
    return logits


# A slice [start:end] of the per-row arguments may start at any address: it must not choose what is compiled.
@triton.jit(do_not_specialize_on_alignment=["scale", "log_total", "entropy"])
def _statistics(
    logits: tl.tensor,
    scale: tl.tensor,
    log_total: tl.tensor,
    entropy: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + row)
    largest = -1.0e30  # finite, so that 0 * (largest - x) is 0 below
    mass = tl.full((BLOCK,), 0.0, tl.float32)
    moment = tl.full((BLOCK,), 0.0, tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=_STATISTICS_STAGES):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        x = tl.load(logits + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * factor
        x = tl.where(inside, x, -1.0e30)
        before = largest
        largest = tl.maximum(before, tl.max(x, axis=0))
        shift = before - largest
        shrink = tl.exp(shift)
        gap = x - largest
        weight = tl.exp(gap)
        moment = (moment + mass * shift) * shrink + weight * gap
        mass = mass * shrink + weight
    total = tl.sum(mass, axis=0)
    log_mass = tl.log(total)
    tl.store(log_total + row, largest + log_mass)
    tl.store(entropy + row, log_mass - tl.sum(moment, axis=0) / total)


@triton.jit(do_not_specialize_on_alignment=["scale", "log_total", "first", "labels", "slopes"])
def _gradient(
    logits: tl.tensor,
    scale: tl.tensor,
    log_total: tl.tensor,
    first: tl.tensor,
    labels: tl.tensor,
    slopes: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = logits + row * WIDTH + column
    factor = tl.load(scale + row)
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    probability = tl.exp(x - tl.load(log_total + row))
    out = tl.full((BLOCK,), 0.0, tl.float32)
    for token in range(tl.load(first + row), tl.load(first + row + 1)):
        slope = tl.load(slopes + token) * factor
        out += slope * (tl.where(column == tl.load(labels + token), 1.0, 0.0) - probability)
    tl.store(at, out.to(logits.dtype.element_ty), mask=inside)
