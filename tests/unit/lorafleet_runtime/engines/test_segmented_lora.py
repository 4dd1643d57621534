"""Mixed-adapter products against a float64 loop over single tokens."""

import pytest
import torch

from lorafleet_runtime.engines.segmented_lora import add_lora, expand, segments, shrink

SLOTS, RANK, INPUT, OUTPUTS = 3, 4, 6, (5, 2, 3)
BATCHES = [
    [0, 0, 0, 0, 0],
    [-1, -1, -1, -1, -1],
    [-1, 2, 0, 2, -1],
    [2, 2, 1, 0, 0],
]


def _weights(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(SLOTS, 1, RANK, INPUT, generator=generator) for _ in OUTPUTS]
    b = [torch.randn(SLOTS, 1, size, RANK, generator=generator) for size in OUTPUTS]
    return a, b


def _per_token(
    x: torch.Tensor, token_slots: list[int], a: list[torch.Tensor], b: list[torch.Tensor], scale: float
) -> torch.Tensor:
    rows = []
    for vector, slot in zip(x.double(), token_slots, strict=True):
        slices = [
            torch.zeros(size, dtype=torch.float64)
            if slot < 0
            else scale * (b_i[slot, 0].double() @ (a_i[slot, 0].double() @ vector))
            for a_i, b_i, size in zip(a, b, OUTPUTS, strict=True)
        ]
        rows.append(torch.cat(slices))
    return torch.stack(rows)


@pytest.mark.parametrize("token_slots", BATCHES)
def test_add_lora_equals_the_product_of_each_token_alone(token_slots: list[int]) -> None:
    a, b = _weights()
    x = torch.randn(5, INPUT, generator=torch.Generator().manual_seed(1))
    base = torch.randn(5, sum(OUTPUTS), generator=torch.Generator().manual_seed(2))
    y = base.clone()
    add_lora(y, x, a, b, 0.5, segments(torch.tensor(token_slots)))
    torch.testing.assert_close(y.double(), base.double() + _per_token(x, token_slots, a, b, 0.5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("token_slots", BATCHES)
def test_tokens_without_adapter_stay_bit_identical(token_slots: list[int]) -> None:
    a, b = _weights()
    x = torch.randn(5, INPUT)
    base = torch.randn(5, sum(OUTPUTS))
    y = base.clone()
    add_lora(y, x, a, b, 1.0, segments(torch.tensor(token_slots)))
    without = torch.tensor(token_slots) < 0
    assert torch.equal(y[without], base[without])


@pytest.mark.parametrize("token_slots", BATCHES)
def test_shrink_then_expand_equals_the_product_of_each_token_alone(token_slots: list[int]) -> None:
    a, b = _weights()
    x = torch.randn(5, INPUT, generator=torch.Generator().manual_seed(1))
    groups = segments(torch.tensor(token_slots))
    buffer = torch.zeros(len(OUTPUTS), 5, RANK)
    shrink(buffer, x, a, 2.0, groups)
    y = torch.ones(5, 1 + sum(OUTPUTS))
    expand(y, buffer, b, 1, True, groups)
    torch.testing.assert_close(y[:, 1:].double(), 1 + _per_token(x, token_slots, a, b, 2.0), rtol=0, atol=1e-5)
    assert torch.equal(y[:, 0], torch.ones(5))


def test_expand_can_replace_instead_of_add() -> None:
    a, b = _weights()
    x = torch.randn(5, INPUT, generator=torch.Generator().manual_seed(1))
    token_slots = [-1, 2, 0, 2, -1]
    groups = segments(torch.tensor(token_slots))
    buffer = torch.zeros(len(OUTPUTS), 5, RANK)
    shrink(buffer, x, a, 1.0, groups)
    y = torch.full((5, sum(OUTPUTS)), 7.0)
    expand(y, buffer, b, 0, False, groups)
    expected = _per_token(x, token_slots, a, b, 1.0)
    expected[[0, 4]] = 7.0
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_one_adapter_for_the_whole_batch_needs_no_row_index() -> None:
    assert segments(torch.tensor([1, 1, 1])) == ((1, None),)
