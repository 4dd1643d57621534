"""The Triton kernels on a real device, in bfloat16: what the interpreter cannot show."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet_runtime.trainer.attention import GroupRows, _tree_mask
from lorafleet_runtime.trainer.kernels.attention import attend, make_sequences
from lorafleet_runtime.trainer.kernels.rotary import norm_rotate
from lorafleet_runtime.trainer.kernels.softmax import RowTokens, row_statistics, write_gradient
from lorafleet_runtime.trainer.kernels.swiglu import swiglu
from lorafleet_runtime.trainer.layout import PROJECTIONS
from lorafleet_runtime.trainer.lora import Columns, LoraContext, Segment, SlotAdapter, lora_linear
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.shape import ModelShape, read_shape
from lorafleet_runtime.types import PromptGroup, Sample, VersionId
from support.trainer import gradient, load, make_rank, relative

RANKS = (4, 8, 20, 64)
ENDS = (3, 500, 3000, 3100)
"""End row of each adapter; the third has more than one chunk of rows."""


def lora_results(shape: ModelShape, grouped: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k and v with four adapters: output, input gradient and gradient sums."""
    cuda, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    heads, kv, width = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads, shape.head_dim
    columns = tuple(
        Columns(kv, a * width, b * width) for a, b in ((0, heads), (heads, heads + 1), (heads + 1, heads + 2))
    )
    out = kv * (heads + 2) * width
    weight, x, dy = (
        torch.randn(*size, generator=generator).to(cuda, dtype)
        for size in ((out, shape.hidden_size), (ENDS[-1] + 5, shape.hidden_size), (ENDS[-1] + 5, out))
    )
    adapters = [SlotAdapter(shape, rank, rank, PROJECTIONS, dtype, cuda) for rank in RANKS]
    for adapter in adapters:
        adapter.install(torch.randn(len(adapter.master), generator=generator).to(adapter.master))
    context = LoraContext(Ranks(0, 1, 1), grouped)
    context.begin([Segment(a, start, end) for a, start, end in zip(adapters, (0, *ENDS), ENDS, strict=False)])
    plan = context.plan(1, "qkv", columns, False)
    assert plan is not None
    x.requires_grad_(True)
    y = lora_linear(x, weight, None, plan)
    y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad} | {f"rank {a.rank}": a.grad for a in adapters}
    return {name: value.double() for name, value in found.items()}


def test_lora_is_as_near_to_float64_as_the_loop(model: Path) -> None:
    shape = read_shape(model)
    exact = lora_results(shape, False, torch.float64)
    kernels, loop = (lora_results(shape, grouped, torch.bfloat16) for grouped in (True, False))
    for name, want in exact.items():
        print(name, relative(kernels[name], want), relative(loop[name], want))
        assert relative(kernels[name], want) < 1.2 * relative(loop[name], want) + 1e-6


def test_attention_is_that_of_masked_groups() -> None:
    """Grouped heads, shared prompts, a plain sequence, a lone prompt; against float64 with explicit masks."""
    groups = (GroupRows(40, (100, 3, 64)), GroupRows(7, (300,)), GroupRows(9), GroupRows(500, (1, 1)))
    total = sum(g.total for g in groups)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dy = (torch.randn(total, heads, 64, generator=generator).cuda().bfloat16() for heads in (8, 2, 2, 8))
    exact = [t.double().requires_grad_(True) for t in (q, k, v)]
    sizes = [g.total for g in groups]
    out = []
    for group, *parts in zip(groups, *(torch.split(t, sizes) for t in exact), strict=True):
        a, b, c = (t.transpose(0, 1)[None] for t in parts)
        mask = _tree_mask(group, torch.device("cuda"))
        out.append(F.scaled_dot_product_attention(a, b, c, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    torch.autograd.backward(torch.cat(out), dy.double())
    mine = [t.requires_grad_(True) for t in (q, k, v)]
    sequences = make_sequences(groups, torch.device("cuda"))
    assert sequences is not None
    got = attend(q, k, v, sequences)
    torch.autograd.backward(got, dy)
    pairs = [(got, torch.cat(out)), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]
    gaps = [relative(a.detach().double(), b.detach()) for a, b in pairs if a is not None and b is not None]
    print(gaps)
    assert len(gaps) == 4 and max(gaps) < 1e-2


def test_elementwise_kernels_round_once() -> None:
    """Within half a unit in the last place of bfloat16, and what hardware functions add in float32."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 6144, generator=generator).cuda().bfloat16()
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x).double(), F.silu(gate) * up, rtol=2**-8, atol=1e-5)
    heads = x.view(50, 48, 128)
    weight, cos, sin = (torch.randn(n, generator=generator).cuda().bfloat16() for n in ((128,), (50, 128), (50, 128)))
    normed = F.rms_norm(heads.double(), (128,), weight.double(), 1e-6)
    left, right = normed.chunk(2, dim=-1)
    want = normed * cos.double()[:, None] + torch.cat([-right, left], dim=-1) * sin.double()[:, None]
    torch.testing.assert_close(norm_rotate(heads, weight, 1e-6, cos, sin).double(), want, rtol=2**-8, atol=1e-5)


def test_softmax_of_a_wide_vocabulary() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(20, 151936, generator=generator)).cuda().bfloat16()
    scale, total = (torch.rand(20, generator=generator).cuda() + 0.5 for _ in range(2))
    exact = torch.distributions.Categorical(logits=logits.double() * scale.double()[:, None])
    log_total, entropy = row_statistics(logits, scale)
    want = (logits.double() * scale.double()[:, None]).logsumexp(-1)
    torch.testing.assert_close(log_total.double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=1e-5, atol=1e-5)
    label = logits.argmax(-1)
    tokens = RowTokens(torch.arange(21).cuda(), label, total)
    write_gradient(logits, scale, log_total, tokens)
    onehot = F.one_hot(label, logits.shape[1])
    slope = (total * scale).double()[:, None] * (onehot - exact.probs)
    torch.testing.assert_close(logits.double(), slope, rtol=2**-7, atol=1e-12)


def long_groups(uid: str) -> list[PromptGroup]:
    """Shared prompts long enough that an unordered sum differs from run to run."""
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 512, (count,), generator=generator).tolist())

    return [
        PromptGroup(uid, VersionId(uid, "1.1", 1), i, ids(prompt),
                    tuple(Sample(ids(n), (-6.0,) * n, 0.0, (-1.0) ** k * (1 + k), False) for k, n in enumerate(sizes)))
        for i, (prompt, sizes) in enumerate(((1500, (300, 7, 64, 90)), (200, (180, 181, 182, 183, 184, 185))))
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_mode_repeats_itself(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    found = []
    for _ in range(3):
        rank = make_rank(model, tmp_path, dtype, deterministic=True, microBatchTokens=4096)
        load(rank, "a", 0)
        assert not rank.accumulate(long_groups("a")).faults
        found.append(gradient(rank, "a").clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_nan_weights_change_no_bit_of_a_neighbour_in_the_same_pass(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed as in fast mode; the order is fixed only so that bits can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = []
    for sick in (False, True):
        rank = make_rank(model, tmp_path, torch.bfloat16, microBatchTokens=8192)
        torch.use_deterministic_algorithms(True)  # which the rank has just turned off
        load(rank, "a", 0)
        load(rank, "b", 1)
        if sick:
            rank.adapter("b").install(torch.full_like(rank.adapter("b").master, torch.nan))
        result = rank.accumulate(long_groups("a") + long_groups("b"))
        assert [fault.uid for fault in result.faults] == (["b"] if sick else [])
        found.append(gradient(rank, "a").clone())
    assert torch.equal(*found)
