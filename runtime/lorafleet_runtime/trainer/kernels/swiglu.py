"""The gated activation of the feed-forward layer, silu(gate) * up, as one kernel each way.

Called by the trainer's model on CUDA. Arithmetic is float32 with one rounding at the end; the backward recomputes the
activation from the input. Must not let a row's result depend on other rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Columns per program: 16 per thread, two 16-byte loads of bfloat16 from each half."""
_WARPS = 4


def swiglu(x: Tensor) -> Tensor:
    """silu(x[:, :F]) * x[:, F:] of [T, 2F], differentiable (Shazeer 2020, "GLU Variants Improve Transformer").

    Args:
        x: [T, 2F] bfloat16 or float32; copied first if it is not contiguous.

    Returns:
        [T, F] of x's dtype.
    """
    y: Tensor = _Swiglu.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, width = len(x), x.shape[1] // 2
        y = x.new_empty(rows, width)
        _forward[(rows, triton.cdiv(width, _BLOCK))](x, y, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, width = len(x), x.shape[1] // 2
        dx = torch.empty_like(x)
        grid = (rows, triton.cdiv(width, _BLOCK))
        _backward[grid](x, grads[0].contiguous(), dx, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS)
        return dx


@triton.jit
def _forward(x: tl.tensor, y: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = x + row * (2 * WIDTH) + column
    gate = tl.load(gate_at, mask=inside).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * WIDTH + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x: tl.tensor, dy: tl.tensor, dx: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = row * (2 * WIDTH) + column
    gate = tl.load(x + gate_at, mask=inside).to(tl.float32)
    up = tl.load(x + gate_at + WIDTH, mask=inside).to(tl.float32)
    slope = tl.load(dy + row * WIDTH + column, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = slope * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = slope * gate * sigmoid
    tl.store(dx + gate_at, d_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + gate_at + WIDTH, d_up.to(dx.dtype.element_ty), mask=inside)
