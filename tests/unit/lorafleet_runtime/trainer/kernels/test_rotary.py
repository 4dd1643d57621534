"""The kernels of head norm and rotary embedding against torch's autograd in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

EPS = 1e-6


class Case(NamedTuple):
    x: Tensor
    weight: Tensor | None
    cos: Tensor
    sin: Tensor
    dy: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(None if t is None else t.to(dtype) for t in self))  # type: ignore[arg-type]

    def rows(self, count: int) -> "Case":
        return Case(self.x[:count], self.weight, self.cos[:count], self.sin[:count], self.dy[:count])


def make(rows: int, heads: int, size: int, normed: bool = True) -> Case:
    """Tables whose halves differ, so that a swapped half shows."""
    generator = torch.Generator().manual_seed(11)
    x, dy = (torch.randn(rows, heads, size, generator=generator) for _ in range(2))
    weight = 0.5 + torch.rand(size, generator=generator) if normed else None
    angle = 6 * torch.rand(rows, size, generator=generator)
    return Case(2 * x, weight, angle.cos(), angle.sin(), dy)


def both_ways(function: Callable[..., Tensor], case: Case) -> tuple[Tensor, Tensor]:
    x = case.x.detach().requires_grad_(True)
    y = function(x, case.weight, EPS, case.cos, case.sin)
    return y.detach(), torch.autograd.grad(y, x, case.dy)[0]


def reference(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    if weight is not None:
        x = weight * x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "size"), [(3, 64), (8, 96), (9, 128), (1, 256)])
def test_float32_agrees_with_float64(rotary: Any, heads: int, size: int, normed: bool) -> None:
    case = make(3, heads, size, normed)
    for got, want in zip(
        both_ways(rotary.norm_rotate, case), both_ways(reference, case.to(torch.float64)), strict=True
    ):
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("normed", [True, False])
def test_bfloat16_is_rounded_once(rotary: Any, normed: bool) -> None:
    """Within 2**-7: the interpreter cuts off where a GPU rounds to nearest."""
    case = make(3, 9, 96, normed).to(torch.bfloat16)
    for got, want in zip(
        both_ways(rotary.norm_rotate, case), both_ways(reference, case.to(torch.float64)), strict=True
    ):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2e-6)


def test_keys_inside_a_joint_projection(rotary: Any) -> None:
    case = make(3, 2, 64)
    joint = torch.full((3, 2, 4 * 64), torch.nan)
    joint[..., 64:128] = case.x
    strided = case._replace(x=joint[..., 64:128])
    for got, want in zip(both_ways(rotary.norm_rotate, strided), both_ways(rotary.norm_rotate, case), strict=True):
        assert torch.equal(got, want) and got.is_contiguous()


def test_elements_that_are_not_adjacent(rotary: Any) -> None:
    case = make(3, 2, 64)
    strided = case._replace(x=case.x.transpose(0, 2).contiguous().transpose(0, 2), dy=torch.ones(1).expand(3, 2, 64))
    case = case._replace(dy=torch.ones(3, 2, 64))
    for got, want in zip(both_ways(rotary.norm_rotate, strided), both_ways(rotary.norm_rotate, case), strict=True):
        assert torch.equal(got, want)


def test_the_lone_row_of_a_view_with_odd_strides(rotary: Any) -> None:
    """A dimension of one element may have any stride."""
    case = make(1, 1, 64)
    odd = case._replace(x=torch.as_strided(case.x, (1, 1, 64), (1, 3, 1)))
    for got, want in zip(both_ways(rotary.norm_rotate, odd), both_ways(rotary.norm_rotate, case), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_depend_on_themselves_only(rotary: Any, dtype: torch.dtype) -> None:
    case = make(50, 3, 64).to(dtype)
    alone = both_ways(rotary.norm_rotate, case.rows(3))
    case.x[20] = torch.nan
    for got, want in zip(both_ways(rotary.norm_rotate, case), alone, strict=True):
        assert torch.equal(got[:3], want)
        assert got.isnan().flatten(1).any(dim=1).nonzero().flatten().tolist() == [20]
