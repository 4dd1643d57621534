"""RMSNorm of each head (query and key norm) and the rotary embedding, as one kernel each way.

Called by the trainer's attention on CUDA. Arithmetic is float32 with one rounding at the end; the backward recomputes
the norm from the input. Must not let a row's result depend on other rows.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads per program. With head_dim 128 a thread holds 8 elements of each half: 16-byte loads of bfloat16."""
_WARPS = 2


class _Shape(NamedTuple):
    """Constants that the kernels are compiled for; read by position, for a kernel may take no names."""

    heads: int
    half: int
    """Half of head_dim."""
    block_heads: int
    block_half: int
    """Half of head_dim, rounded up to a power of two."""
    eps: float
    normed: bool


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """n * cos + rotate_half(n) * sin, where n is the RMSNorm of x over D, or x; differentiable with respect to x only.

    The two halves of a head are rotated against each other, as in Hugging Face. RMSNorm: Zhang and Sennrich 2019;
    rotary embedding: Su et al. 2021.

    Args:
        x: [T, heads, D] bfloat16 or float32, D even. A view with unit stride in D is read in place; else copied first.
        weight: [D] of the norm, frozen; None for no norm.
        eps: of the norm.
        cos: [T, D].
        sin: [T, D].

    Returns:
        [T, heads, D] of x's dtype, contiguous.
    """
    y: Tensor = _NormRotate.apply(x, weight, eps, cos, sin)  # type: ignore[no-untyped-call]
    return y


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        constants = (cos if weight is None else weight.contiguous(), cos.contiguous(), sin.contiguous())
        half = x.shape[2] // 2
        shape = _Shape(x.shape[1], half, _HEADS, triton.next_power_of_2(half), eps, weight is not None)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward[_grid(x)](x, y, constants, _strides(x), SHAPE=tuple(shape), num_warps=_WARPS)
        ctx.save_for_backward(x, *constants)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *constants = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dy = grads[0].contiguous()
        shape = tuple(ctx.shape)
        _backward[_grid(x)](x, dy, dx, tuple(constants), _strides(x), SHAPE=shape, num_warps=_WARPS)
        return dx, None, None, None, None


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), triton.cdiv(x.shape[1], _HEADS)


def _strides(x: Tensor) -> tuple[int, int]:
    """Of rows and heads. A lone row's stride means nothing and may be odd, which would change the compiled layout."""
    return (x.stride(0) if x.shape[0] > 1 else 0), (x.stride(1) if x.shape[1] > 1 else 0)


@triton.jit
def _forward(x: tl.tensor, y: tl.tensor, constants: tl.tuple, strides: tl.tuple, SHAPE: tl.constexpr) -> None:
    HEADS: tl.constexpr = SHAPE[0]
    HALF: tl.constexpr = SHAPE[1]
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * SHAPE[2] + tl.arange(0, SHAPE[2]))[:, None]
    column = tl.arange(0, SHAPE[3])[None, :]
    valid = column < HALF
    inside = (head < HEADS) & valid
    at = x + row * strides[0] + head * strides[1] + column
    left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if SHAPE[5]:
        mean_square = tl.sum(left * left + right * right, axis=1) / (2 * HALF)
        inverse = tl.rsqrt(mean_square + SHAPE[4])[:, None]
        left *= inverse * tl.load(constants[0] + column, mask=valid, other=0.0).to(tl.float32)
        right *= inverse * tl.load(constants[0] + HALF + column, mask=valid, other=0.0).to(tl.float32)
    table = row * (2 * HALF) + column
    cos_left = tl.load(constants[1] + table, mask=valid, other=0.0).to(tl.float32)
    cos_right = tl.load(constants[1] + table + HALF, mask=valid, other=0.0).to(tl.float32)
    sin_left = tl.load(constants[2] + table, mask=valid, other=0.0).to(tl.float32)
    sin_right = tl.load(constants[2] + table + HALF, mask=valid, other=0.0).to(tl.float32)
    out = y + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    tl.store(out, (left * cos_left - right * sin_left).to(y.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (right * cos_right + left * sin_right).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x: tl.tensor,
    dy: tl.tensor,
    dx: tl.tensor,
    constants: tl.tuple,
    strides: tl.tuple,
    SHAPE: tl.constexpr,
) -> None:
    HEADS: tl.constexpr = SHAPE[0]
    HALF: tl.constexpr = SHAPE[1]
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * SHAPE[2] + tl.arange(0, SHAPE[2]))[:, None]
    column = tl.arange(0, SHAPE[3])[None, :]
    valid = column < HALF
    inside = (head < HEADS) & valid
    packed = row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    slope_left = tl.load(dy + packed, mask=inside, other=0.0).to(tl.float32)
    slope_right = tl.load(dy + packed + HALF, mask=inside, other=0.0).to(tl.float32)
    table = row * (2 * HALF) + column
    cos_left = tl.load(constants[1] + table, mask=valid, other=0.0).to(tl.float32)
    cos_right = tl.load(constants[1] + table + HALF, mask=valid, other=0.0).to(tl.float32)
    sin_left = tl.load(constants[2] + table, mask=valid, other=0.0).to(tl.float32)
    sin_right = tl.load(constants[2] + table + HALF, mask=valid, other=0.0).to(tl.float32)
    d_left = slope_left * cos_left + slope_right * sin_right
    d_right = slope_right * cos_right - slope_left * sin_left
    if SHAPE[5]:
        at = x + row * strides[0] + head * strides[1] + column
        left = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * HALF) + SHAPE[4])[:, None]
        left *= inverse
        right *= inverse
        d_left *= tl.load(constants[0] + column, mask=valid, other=0.0).to(tl.float32)
        d_right *= tl.load(constants[0] + HALF + column, mask=valid, other=0.0).to(tl.float32)
        along = (tl.sum(d_left * left + d_right * right, axis=1) / (2 * HALF))[:, None]
        d_left = (d_left - left * along) * inverse
        d_right = (d_right - right * along) * inverse
    tl.store(dx + packed, d_left.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + packed + HALF, d_right.to(dx.dtype.element_ty), mask=inside)
