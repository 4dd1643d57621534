"""The LoRA kernels against the loop over segments, which tests/numerics holds against PEFT."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.trainer import lora as trainer_lora
from lorafleet_runtime.trainer.layout import PROJECTIONS
from lorafleet_runtime.trainer.lora import Columns, LoraContext, Segment, SlotAdapter, lora_linear
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.shape import ModelShape, read_shape
from support.tiny_model import make_tiny_model

SOME = ("q_proj", "v_proj", "down_proj")
ADAPTERS = ((4, SOME), (8, PROJECTIONS), (64, PROJECTIONS), (5, PROJECTIONS), (1, PROJECTIONS))
"""(rank, targets): ranks that 16-byte loads fit and ranks that they do not, and one without k, gate, up and o."""
ROWS = ((0, 7), (7, 70), (75, 140), (140, 148), (148, 149))
"""Of each; 70 to 74 and 149 belong to nobody."""


@pytest.fixture(scope="module", params=[32, 64])
def shape(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ModelShape:
    """With heads that blocks of columns straddle, and heads that they fit."""
    return read_shape(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=request.param))


@pytest.fixture(autouse=True)
def kernels(lora: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trainer_lora, "kernels", lora)
    return lora


def columns(shape: ModelShape, site: str) -> tuple[Columns, ...]:
    """As model.py attaches them."""
    groups, head = shape.num_kv_heads, shape.head_dim
    queries = shape.num_heads // groups * head
    ffn, hidden = shape.ffn_size, shape.hidden_size
    return {
        "qkv": (Columns(groups, 0, queries), Columns(groups, queries, queries + head),
                Columns(groups, queries + head, queries + 2 * head)),
        "o": (Columns(1, 0, hidden),),
        "gate_up": (Columns(1, 0, ffn), Columns(1, ffn, 2 * ffn)),
        "down": (Columns(1, 0, hidden),),
    }[site]  # fmt: skip


def make_adapters(shape: ModelShape) -> list[SlotAdapter]:
    adapters = [SlotAdapter(shape, r, 16, targets, torch.float32, torch.device("cpu")) for r, targets in ADAPTERS]
    for i, adapter in enumerate(adapters):
        master = 0.1 * torch.randn(adapter.master.numel(), generator=torch.Generator().manual_seed(i))
        adapter.install(master)
    return adapters


def run(shape: ModelShape, site: str, grouped: bool, poison: int | None = None) -> list[Tensor]:
    """Output, input gradient and the gradient sum of each adapter, after both layers; `poison` is an adapter's NaN."""
    generator = torch.Generator().manual_seed(9)
    inputs, at = {"qkv": shape.hidden_size, "o": shape.num_heads * shape.head_dim, "gate_up": shape.hidden_size,
                  "down": shape.ffn_size}[site], columns(shape, site)  # fmt: skip
    outputs = sum(c.groups * (c.end - c.start) for c in at)
    weight = 0.1 * torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(150, inputs, generator=generator).requires_grad_(True)
    dy = torch.randn(150, outputs, generator=generator)
    adapters = make_adapters(shape)
    if poison is not None:
        adapters[poison].install(torch.full_like(adapters[poison].master, torch.nan))
    context = LoraContext(Ranks(0, 1, 1), grouped)
    context.begin([Segment(adapter, *rows) for adapter, rows in zip(adapters, ROWS, strict=True)])
    ys = []
    for layer in range(2):
        plan = context.plan(layer, site, at, False)
        assert plan is not None and (plan.tables is not None) is grouped
        y = lora_linear(x, weight, None, plan)
        y.backward(dy)
        ys.append(y.detach())
    assert x.grad is not None
    return [torch.stack(ys), x.grad, *(adapter.grad for adapter in adapters)]


@pytest.mark.parametrize("site", ["qkv", "o", "gate_up", "down"])
def test_every_site_is_that_of_the_loop(shape: ModelShape, site: str) -> None:
    for got, want in zip(run(shape, site, True), run(shape, site, False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


def test_gradients_of_many_rows_are_added_chunk_by_chunk(
    shape: ModelShape, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_CHUNK", 32)
    for got, want in zip(run(shape, "qkv", True), run(shape, "qkv", False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("poison", [1, 3])
def test_nan_in_one_adapter_changes_no_bit_of_another(shape: ModelShape, poison: int) -> None:
    healthy, sick = run(shape, "qkv", True), run(shape, "qkv", True, poison)
    rows = torch.ones(150, dtype=torch.bool)
    rows[ROWS[poison][0] : ROWS[poison][1]] = False
    assert torch.equal(healthy[0][:, rows], sick[0][:, rows]) and torch.equal(healthy[1][rows], sick[1][rows])
    assert sick[0][:, ~rows].isnan().all()
    for i in range(len(ADAPTERS)):
        assert torch.equal(healthy[2 + i], sick[2 + i]) is (i != poison)
