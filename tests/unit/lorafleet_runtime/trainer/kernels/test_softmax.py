"""The output head's softmax kernels against torch in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

WIDTH = 9001
"""More than two blocks of columns, the last one partly filled."""


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, WIDTH], scale [rows] and the summed slopes [rows]; one row has a clear winner late in the row."""
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(rows, WIDTH, generator=generator)
    logits[1, 8500] = 60.0
    return logits.to(dtype), 0.5 + torch.rand(rows, generator=generator), torch.randn(rows, generator=generator)


def elsewhere(softmax: Any, slope: Tensor) -> Any:
    """A token per row whose label another rank has."""
    return softmax.RowTokens(torch.arange(len(slope) + 1), torch.full((len(slope),), -1), slope)


def reference(logits: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scaled = scale.double()[:, None] * logits.double()
    return scaled.logsumexp(dim=1), torch.special.entr(scaled.softmax(dim=1)).sum(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_agree_with_float64(softmax: Any, dtype: torch.dtype) -> None:
    logits, scale, _ = inputs(4, dtype)
    for got, want in zip(softmax.row_statistics(logits, scale), reference(logits, scale), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [1, 7, 4096])
def test_statistics_of_narrow_rows(softmax: Any, width: int) -> None:
    logits, scale = inputs(3, torch.float32)[0][:, :width].contiguous() - 300.0, torch.ones(3)
    for got, want in zip(softmax.row_statistics(logits, scale), reference(logits, scale), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)])
def test_gradient_is_autograd_of_the_log_total(softmax: Any, dtype: torch.dtype, rounding: float) -> None:
    """Float32 exponentials of numbers near -60 are good to 60 roundings: 1e-5 of an element, 1e-6 of its row.

    bfloat16 within 2**-7: the interpreter cuts off where a GPU rounds to nearest.
    """
    logits, scale, total = inputs(4, dtype)
    exact = logits.double().requires_grad_(True)
    log_total = (scale.double()[:, None] * exact).logsumexp(dim=1)
    (want,) = torch.autograd.grad(log_total, exact, -total.double())
    softmax.write_gradient(logits, scale, log_total.detach().float(), elsewhere(softmax, total))
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.double(), want, rtol=rounding, atol=1e-30)
    if dtype == torch.float32:
        assert ((logits - want).abs().amax(dim=1) <= 1e-6 * want.abs().amax(dim=1)).all()


@pytest.mark.parametrize("sure", [0.9, 0.99, 0.999, 0.9999])
def test_gradient_of_a_label_that_the_model_is_sure_of(softmax: Any, sure: float) -> None:
    """1 - p is far below the spacing of bfloat16 at 1: the two parts of a label's place must be rounded together."""
    logits = torch.zeros(2, WIDTH)
    logits[0, 40], logits[1, 8500] = (math.log(sure / (1 - sure) * (WIDTH - 1)),) * 2
    logits = logits.bfloat16()
    scale, slope = torch.ones(2), torch.tensor([1.0, -0.5, 0.25])
    exact = logits.double().requires_grad_(True)
    logprob = exact.log_softmax(dim=1)[[0, 0, 1], [40, 7, 8500]]
    (want,) = torch.autograd.grad(logprob, exact, slope.double())
    tokens = softmax.RowTokens(torch.tensor([0, 2, 3]), torch.tensor([40, 7, 8500]), slope)
    softmax.write_gradient(logits, scale, softmax.row_statistics(logits, scale)[0], tokens)
    torch.testing.assert_close(logits.double(), want, rtol=2**-6, atol=1e-8)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_depend_on_themselves_only(softmax: Any, bad: float) -> None:
    logits, scale, total = inputs(50, torch.bfloat16)
    few = logits[:3].clone()
    alone = softmax.row_statistics(few, scale[:3])
    softmax.write_gradient(few, scale[:3], alone[0], elsewhere(softmax, total[:3]))
    logits[20, 5000] = bad
    together = softmax.row_statistics(logits, scale)
    softmax.write_gradient(logits, scale, together[0], elsewhere(softmax, total))
    for got, want in zip((*together, logits), (*alone, few), strict=True):
        assert torch.equal(got[:3], want)
        assert got[20].isnan().all()

        assert torch.cat([got[:20], got[21:]]).isfinite().all()


def test_logits_with_gaps_are_refused(softmax: Any) -> None:
    logits, scale, total = inputs(2, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        softmax.row_statistics(logits[:, ::2], scale)
    with pytest.raises(ValueError, match="contiguous"):
        softmax.write_gradient(logits[:, ::2], scale, scale, elsewhere(softmax, total))
