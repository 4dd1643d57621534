"""The chunked head against full logits and torch's own log_softmax."""

import gc
import math

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
    slopes = torch.randn(42, generator=generator, dtype=torch.float64)
    return hidden, weight, HeadTokens(row, row, label, inverse), slopes


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
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()[tokens.row]
    torch.testing.assert_close(result.entropy, entropy, rtol=1e-12, atol=1e-12)
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


@pytest.mark.parametrize("size, entropy", [(0.0, math.log(30)), (200.0, 0.0)], ids=["uniform", "certain"])
def test_entropy_of_the_extremes_in_float32(size: float, entropy: float) -> None:
    """All logits equal: log of the vocabulary; one far above all others: 0, and never below."""
    hidden, weight, tokens, _ = make_case()
    found = head_loss(size * hidden.float(), Vocabulary(weight.float(), SINGLE), tokens, lambda lp, a, b: -lp).entropy
    assert found.min() >= 0
    assert found.median().item() == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 700), (17, 48), (40, 257)])
def test_log_total_has_the_bits_of_logsumexp(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = 8 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    vocabulary = Vocabulary(torch.eye(shape[1], dtype=dtype), SINGLE)  # so that the hidden states are the logits
    softmax = vocabulary.softmax(logits, torch.ones(shape[0], dtype=dtype))
    assert torch.equal(softmax.log_total, logits.logsumexp(-1))
    torch.testing.assert_close(softmax.mean, (logits.softmax(-1) * logits).sum(-1))


def test_one_buffer_of_logits_is_left_when_the_loss_is_made() -> None:
    hidden, weight, tokens, _ = make_case()

    def wide() -> int:
        return sum(type(o) is Tensor and tuple(o.shape) == (len(hidden), len(weight)) for o in gc.get_objects())

    before, found = wide(), []

    def loss(logprob: Tensor, first: int, last: int) -> Tensor:
        found.append(wide())
        return -logprob

    head_loss(hidden, Vocabulary(weight, SINGLE), tokens, loss)
    assert found == [before + 1]
