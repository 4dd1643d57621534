"""The SwiGLU kernels against torch's autograd in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 2100
"""More than one block of columns, the last one partly filled."""


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, 2 * WIDTH] and the gradient [rows, WIDTH] of the output."""
    generator = torch.Generator().manual_seed(7)
    x = 3 * torch.randn(rows, 2 * WIDTH, generator=generator)
    return x.to(dtype), torch.randn(rows, WIDTH, generator=generator).to(dtype)


def both_ways(function: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_(True)
    y = function(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate) * up


def test_float32_agrees_with_float64(swiglu: Any) -> None:
    x, dy = inputs(3, torch.float32)
    for got, want in zip(both_ways(swiglu.swiglu, x, dy), both_ways(reference, x.double(), dy.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_bfloat16_is_rounded_once(swiglu: Any) -> None:
    """Within 2**-7: the interpreter cuts off where a GPU rounds to nearest."""
    x, dy = inputs(3, torch.bfloat16)
    for got, want in zip(both_ways(swiglu.swiglu, x, dy), both_ways(reference, x.double(), dy.double()), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)


def test_a_view_with_strided_rows(swiglu: Any) -> None:
    x, dy = inputs(3, torch.float32)
    wide = torch.cat([x, x.new_full((3, 5), torch.nan)], dim=1)
    for got, want in zip(
        both_ways(lambda t: swiglu.swiglu(t[:, : 2 * WIDTH]), wide, dy), both_ways(swiglu.swiglu, x, dy), strict=True
    ):
        assert torch.equal(got[:, : want.shape[1]], want)


def test_a_gradient_that_is_expanded(swiglu: Any) -> None:
    x, _ = inputs(2, torch.float32)
    _, got = both_ways(swiglu.swiglu, x, torch.ones(1, 1).expand(2, WIDTH))
    _, want = both_ways(swiglu.swiglu, x, torch.ones(2, WIDTH))
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_depend_on_themselves_only(swiglu: Any, dtype: torch.dtype) -> None:
    x, dy = inputs(50, dtype)
    alone = both_ways(swiglu.swiglu, x[:3], dy[:3])
    x[20] = torch.nan
    for got, want in zip(both_ways(swiglu.swiglu, x, dy), alone, strict=True):
        assert torch.equal(got[:3], want)
        assert got.isnan().any(dim=1).nonzero().flatten().tolist() == [20]
