"""The chunked head against full logits and torch's own log_softmax."""

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.trainer.losses import head
from lorafleet_runtime.trainer.losses.head import HeadTokens, Vocabulary, head_logprobs, head_loss
from lorafleet_runtime.trainer.parallel import Ranks

SINGLE = Ranks(0, 1, 1)


def make_case() -> tuple[Tensor, Tensor, HeadTokens, Tensor]:
    """40 rows, of which row 0 predicts three tokens; two temperatures."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(30, 12, generator=generator, dtype=torch.float64)
    row = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(40)])
    label = torch.randint(0, 30, (42,), generator=generator)
    inverse = torch.where(torch.arange(40) < 20, 1.0, 1 / 0.7).double()
    return hidden, weight, HeadTokens(row, label, inverse), torch.randn(42, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [16, 40])
def test_logprob_and_gradient_equal_full_logits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, tokens, scale = make_case()
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS_CPU", chunk * len(weight))
    leaf = hidden.clone().requires_grad_(True)
    logits = (leaf @ weight.t()) * tokens.inverse_temperature[:, None]
    expected = logits.log_softmax(-1)[tokens.row, tokens.label]
    loss = scale * expected.exp() - expected
    torch.autograd.backward(loss.sum())

    result = head_loss(hidden, Vocabulary(weight, SINGLE), tokens, lambda lp, a, b: scale[a:b] * lp.exp() - lp)

    assert leaf.grad is not None
    torch.testing.assert_close(result.logprob, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.grad_hidden, leaf.grad, rtol=1e-12, atol=1e-12)
    only = head_logprobs(hidden, Vocabulary(weight, SINGLE), tokens)
    torch.testing.assert_close(only, expected.detach(), rtol=1e-12, atol=1e-12)


def test_nan_in_one_row_stays_in_that_row() -> None:
    hidden, weight, tokens, _ = make_case()
    healthy = head_loss(hidden, Vocabulary(weight, SINGLE), tokens, lambda lp, a, b: -lp)
    hidden[5] = torch.nan
    sick = head_loss(hidden, Vocabulary(weight, SINGLE), tokens, lambda lp, a, b: -lp)
    others = torch.arange(40) != 5
    assert torch.equal(sick.grad_hidden[others], healthy.grad_hidden[others])
    assert bool(sick.grad_hidden[5].isnan().all())
