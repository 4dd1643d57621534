"""How a pass is described to variable-length attention, and the gradient of rows that several sequences use."""

from typing import Any

import pytest
import torch

CPU = torch.device("cpu")
GROUPS = [(3, (2, 1, 4)), (5, (2,)), (4, ())]


def test_every_response_sees_its_prompt_and_itself(attention: Any) -> None:
    s = attention.make_sequences(GROUPS, CPU)
    assert s.query_bounds.tolist() == [0, 3, 5, 6, 10, 17, 21]
    assert s.key_bounds.tolist() == [0, 3, 8, 12, 19, 26, 30]
    assert (s.max_queries, s.max_keys) == (7, 7)
    keys = [s.spread.row[a:b].tolist() for a, b in zip(s.key_bounds[:-1], s.key_bounds[1:], strict=True)]
    assert keys == [
        [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 6, 7, 8, 9], list(range(10, 17)), list(range(17, 21))
    ]  # fmt: skip


def test_plain_sequences_are_used_in_place(attention: Any) -> None:
    s = attention.make_sequences([(5, (2,)), (4, ())], CPU)
    assert s.spread is None
    assert s.query_bounds.tolist() == s.key_bounds.tolist() == [0, 7, 11]


def test_a_long_prompt_with_many_responses_is_not_copied(attention: Any) -> None:
    """16 responses of 128 rows would make 9 copies of each row; torch keeps those of every layer."""
    assert attention.make_sequences([(2048, (128,) * 16)], CPU) is None
    assert attention.make_sequences([(200, (650,) * 8)], CPU) is not None


def test_gradients_of_copies_are_added(attention: Any) -> None:
    spread = attention.make_sequences(GROUPS, CPU).spread
    x = torch.randn(21, 2, 300, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = attention._SpreadRows.apply(x, spread)
    assert torch.equal(y, x[spread.row])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    want = torch.zeros_like(x).index_add_(0, spread.row, dy)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("poison", [0, 6])
def test_nan_in_one_copy_stays_with_its_row(attention: Any, poison: int) -> None:
    spread = attention.make_sequences(GROUPS, CPU).spread
    x = torch.zeros(21, 1, 8, requires_grad=True)
    dy = torch.ones(30, 1, 8)
    dy[poison] = torch.nan
    attention._SpreadRows.apply(x, spread).backward(dy)
    assert x.grad is not None
    assert x.grad.isnan().any(dim=-1).nonzero()[:, 0].tolist() == [spread.row[poison].item()]
