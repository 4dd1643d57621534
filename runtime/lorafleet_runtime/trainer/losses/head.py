"""The vocabulary projection with the loss: log-probabilities and the gradient of the hidden states, chunk by chunk.

Called by passes.py once per pass. The gradient is made in the forward pass, so logits exist for one chunk of rows only
and never for the whole batch. Rows and tokens of different runs stay independent: a NaN in one reaches no other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.parallel import Ranks

_CHUNK_ELEMENTS_CPU = 1 << 24
_CHUNK_ELEMENTS_CUDA = 1 << 28

LossChunk = Callable[[Tensor, int, int], Tensor]
"""(log-probabilities [n] with gradient, first token, end token) to losses [n]."""


class HeadTokens(NamedTuple):
    """N tokens to predict from U rows; several tokens may share a row (first tokens of a group)."""

    row: Tensor
    """[N] int64, index into the U rows, not decreasing."""
    label: Tensor
    """[N] int64 token ids."""
    inverse_temperature: Tensor
    """[U]; logits are multiplied by it, as the sampler did."""


class Vocabulary(NamedTuple):
    """The output projection of one tensor-parallel rank."""

    weight: Tensor
    """[own vocabulary, hidden]."""
    ranks: Ranks

    def logits(self, hidden: Tensor, scale: Tensor) -> Tensor:
        """[n, own vocabulary], at least float32."""
        logits = hidden @ self.weight.t()
        if logits.dtype != torch.float64:
            logits = logits.float()
        return logits.mul_(scale)

    def log_total(self, logits: Tensor) -> Tensor:
        """[n]: log of the sum of exponentials over the whole vocabulary."""
        _, total, largest = self._exponentials(logits)
        return total.log() + largest

    def log_total_and_mean(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n]: as `log_total`; [n]: this rank's addend to the mean logit under the softmax, the sum of p x logit."""
        exponentials, total, largest = self._exponentials(logits)
        return total.log() + largest, exponentials.mul_(logits).sum(dim=-1).div_(total)

    def _exponentials(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """exp(logits - largest) [n, own vocabulary], their sum [n] and the largest logit [n] over all ranks.

        As torch.logsumexp does it, bit for bit; that makes the same buffer and throws it away.
        """
        largest = self.ranks.max_over_tp(logits.amax(dim=-1))
        exponentials = (logits - largest[:, None]).exp_()
        return exponentials, self.ranks.sum_over_tp(exponentials.sum(dim=-1)), largest

    def locate(self, label: Tensor) -> tuple[Tensor, Tensor]:
        """[N] columns of the labels on this rank, and [N] whether they are here; elsewhere the column is 0."""
        size = len(self.weight)
        column = label - self.ranks.tp_rank * size
        here = (column >= 0) & (column < size)
        return column.where(here, column.new_zeros(())), here

    def pick(self, logits: Tensor, row: Tensor, label: Tensor) -> Tensor:
        """[N]: the labels' logits."""
        column, here = self.locate(label)
        found = logits[row, column]
        return self.ranks.sum_over_tp(found.where(here, found.new_zeros(())))


class HeadResult(NamedTuple):
    """What one pass through the head gives."""

    logprob: Tensor
    """[N]."""
    loss: Tensor
    """[N], detached."""
    entropy: Tensor
    """[N], nats: of the whole distribution that the token was drawn from, at the sampler's temperature."""
    grad_hidden: Tensor
    """[U, hidden]: gradient of the summed loss."""


def head_loss(hidden: Tensor, vocabulary: Vocabulary, tokens: HeadTokens, loss: LossChunk) -> HeadResult:
    """Log-probabilities, losses and the gradient with respect to the hidden states.

    Args:
        hidden: [U, hidden], detached.
        vocabulary: of this rank.
        tokens: what is predicted from each row.
        loss: any differentiable function of a token's log-probability, evaluated on a leaf.
    """
    grad = torch.empty_like(hidden)
    logprobs, losses, log_totals, means = [], [], [], []
    for start, end, first, last in _chunks(hidden, vocabulary, tokens):
        scale = tokens.inverse_temperature[start:end, None]
        logits = vocabulary.logits(hidden[start:end], scale)
        row, label = tokens.row[first:last] - start, tokens.label[first:last]
        log_total, mean = vocabulary.log_total_and_mean(logits)
        logprob = vocabulary.pick(logits, row, label) - log_total[row]
        leaf = logprob.detach().requires_grad_(True)
        with torch.enable_grad():
            value = loss(leaf, first, last)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        # d logprob / d logits = onehot - softmax, times the slope of every token that uses the row
        total = torch.zeros_like(log_total).index_add_(0, row, slope)
        d = logits.sub_(log_total[:, None]).exp_().mul_(-total[:, None])
        column, here = vocabulary.locate(label)
        d.index_put_((row, column), slope.where(here, slope.new_zeros(())), accumulate=True)
        grad[start:end] = d.mul_(scale).to(vocabulary.weight.dtype) @ vocabulary.weight
        logprobs.append(logprob)
        losses.append(value.detach())
        log_totals.append(log_total)
        means.append(mean)
    # -sum p log p = log_total - sum p x logit; a rounding error below 0 would read as a mistake
    entropy = (torch.cat(log_totals) - vocabulary.ranks.sum_over_tp(torch.cat(means))).clamp_(min=0)[tokens.row]
    return HeadResult(torch.cat(logprobs), torch.cat(losses), entropy, vocabulary.ranks.sum_over_tp(grad))


def head_logprobs(hidden: Tensor, vocabulary: Vocabulary, tokens: HeadTokens) -> Tensor:
    """Log-probabilities [N] only; arguments as for `head_loss`."""
    out = []
    for start, end, first, last in _chunks(hidden, vocabulary, tokens):
        logits = vocabulary.logits(hidden[start:end], tokens.inverse_temperature[start:end, None])
        row, label = tokens.row[first:last] - start, tokens.label[first:last]
        out.append(vocabulary.pick(logits, row, label) - vocabulary.log_total(logits)[row])
    return torch.cat(out)


def _chunks(hidden: Tensor, vocabulary: Vocabulary, tokens: HeadTokens) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first token, end token) of each chunk."""
    elements = _CHUNK_ELEMENTS_CUDA if hidden.is_cuda else _CHUNK_ELEMENTS_CPU
    size = max(16, elements // len(vocabulary.weight))
    bounds = [*range(0, len(hidden), size), len(hidden)]
    edges = torch.searchsorted(tokens.row, torch.tensor(bounds, device=hidden.device)).tolist()
    return list(zip(bounds[:-1], bounds[1:], edges[:-1], edges[1:], strict=True))
