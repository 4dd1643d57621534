"""The vocabulary projection with the loss: log-probabilities and the gradient of the hidden states, chunk by chunk.

Called by passes.py once per pass. The gradient is made in the forward pass, so logits exist for one chunk of rows only
and never for the whole batch. Rows and tokens of different runs stay independent: a NaN in one reaches no other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lorafleet_runtime.trainer.kernels.softmax import RowTokens, row_statistics, write_gradient
from lorafleet_runtime.trainer.parallel import Ranks

_CHUNK_ELEMENTS_CPU = 1 << 24
_CHUNK_ELEMENTS_CUDA = 1 << 28

LossChunk = Callable[[Tensor, int, int], Tensor]
"""(log-probabilities [n] with gradient, first token, end token) to losses [n]."""


class HeadTokens(NamedTuple):
    """N tokens to predict from U rows; several tokens may share a row (first tokens of a group)."""

    row: Tensor
    """[N] int64, index into the U rows, not decreasing."""
    host_row: Tensor
    """The same on the CPU: a look at the device's would wait for it."""
    label: Tensor
    """[N] int64 token ids."""
    inverse_temperature: Tensor
    """[U]; logits are multiplied by it, as the sampler did."""


class Vocabulary(NamedTuple):
    """The output projection of one tensor-parallel rank."""

    weight: Tensor
    """[own vocabulary, hidden]."""
    ranks: Ranks

    def softmax(self, hidden: Tensor, inverse_temperature: Tensor) -> "_Softmax | _FusedSoftmax":
        """Of the rows [n, hidden] at their temperatures [n]."""
        fused = hidden.is_cuda and hidden.dtype != torch.float64
        return (_FusedSoftmax if fused else _Softmax)(self, hidden, inverse_temperature)

    def locate(self, label: Tensor) -> tuple[Tensor, Tensor]:
        """[N] columns of the labels on this rank, and [N] whether they are here; elsewhere the column is 0."""
        size = len(self.weight)
        column = label - self.ranks.tp_rank * size
        here = (column >= 0) & (column < size)
        return column.where(here, column.new_zeros(())), here


class _Softmax:
    """The softmax of a chunk of rows in plain torch, at least in float32."""

    def __init__(self, vocabulary: Vocabulary, hidden: Tensor, inverse_temperature: Tensor) -> None:
        self._vocabulary, self._ranks, self._scale = vocabulary, vocabulary.ranks, inverse_temperature[:, None]
        logits = hidden @ vocabulary.weight.t()
        if logits.dtype != torch.float64:
            logits = logits.float()
        self._logits = logits.mul_(self._scale)
        largest = self._ranks.max_over_tp(self._logits.amax(dim=-1))
        # As torch.logsumexp does it, bit for bit; that makes the same buffer and throws it away.
        exponentials = (self._logits - largest[:, None]).exp_()
        total = self._ranks.sum_over_tp(exponentials.sum(dim=-1))
        self.log_total = total.log() + largest
        """[n]: log of the sum of exponentials over the whole vocabulary."""
        self.mean = exponentials.mul_(self._logits).sum(dim=-1).div_(total)
        """[n]: this rank's addend to the mean logit, the sum of p x logit."""

    def logprobs(self, row: Tensor, label: Tensor) -> Tensor:
        """[N]: log-probabilities of labels [N] in rows [N] of the chunk."""
        column, here = self._vocabulary.locate(label)
        found = self._logits[row, column]
        return self._ranks.sum_over_tp(found.where(here, found.new_zeros(()))) - self.log_total[row]

    def grad_hidden(self, row: Tensor, label: Tensor, slope: Tensor) -> Tensor:
        """[n, hidden]: this rank's addend to the gradient, with the slope [N] of each token's loss. Ends the use.

        d logprob / d logits = onehot - softmax, times the slope of every token that uses the row.
        """
        total = torch.zeros_like(self.log_total).index_add_(0, row, slope)
        d = self._logits.sub_(self.log_total[:, None]).exp_().mul_(-total[:, None])
        column, here = self._vocabulary.locate(label)
        d.index_put_((row, column), slope.where(here, slope.new_zeros(())), accumulate=True)
        weight = self._vocabulary.weight
        return d.mul_(self._scale).to(weight.dtype) @ weight


class _FusedSoftmax:
    """The same by kernels/softmax.py, which reads the logits once for each of the two and makes no copy of them."""

    def __init__(self, vocabulary: Vocabulary, hidden: Tensor, inverse_temperature: Tensor) -> None:
        self._vocabulary, self._ranks, self._scale = vocabulary, vocabulary.ranks, inverse_temperature
        self._logits = hidden @ vocabulary.weight.t()
        own, entropy = row_statistics(self._logits, self._scale)
        largest = self._ranks.max_over_tp(own)
        self.log_total = self._ranks.sum_over_tp((own - largest).exp_()).log_().add_(largest)
        self.mean = (own - self.log_total).exp_().mul_(own - entropy)

    def logprobs(self, row: Tensor, label: Tensor) -> Tensor:
        column, here = self._vocabulary.locate(label)
        found = self._logits[row, column].to(self._scale.dtype) * self._scale[row]
        return self._ranks.sum_over_tp(found.where(here, found.new_zeros(()))) - self.log_total[row]

    def grad_hidden(self, row: Tensor, label: Tensor, slope: Tensor) -> Tensor:
        d = self._logits
        column, here = self._vocabulary.locate(label)
        first = torch.searchsorted(row, torch.arange(len(d) + 1, device=row.device))
        write_gradient(d, self._scale, self.log_total, RowTokens(first, column.where(here, -1), slope))
        return d @ self._vocabulary.weight


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
        softmax = vocabulary.softmax(hidden[start:end], tokens.inverse_temperature[start:end])
        row, label = tokens.row[first:last] - start, tokens.label[first:last]
        logprob = softmax.logprobs(row, label)
        leaf = logprob.detach().requires_grad_(True)
        with torch.enable_grad():
            value = loss(leaf, first, last)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        grad[start:end] = softmax.grad_hidden(row, label, slope)
        logprobs.append(logprob)
        losses.append(value.detach())
        log_totals.append(softmax.log_total)
        means.append(softmax.mean)
    # -sum p log p = log_total - sum p x logit; a rounding error below 0 would read as a mistake
    entropy = (torch.cat(log_totals) - vocabulary.ranks.sum_over_tp(torch.cat(means))).clamp_(min=0)[tokens.row]
    return HeadResult(torch.cat(logprobs), torch.cat(losses), entropy, vocabulary.ranks.sum_over_tp(grad))


def head_logprobs(hidden: Tensor, vocabulary: Vocabulary, tokens: HeadTokens) -> Tensor:
    """Log-probabilities [N] only; arguments as for `head_loss`."""
    out = []
    for start, end, first, last in _chunks(hidden, vocabulary, tokens):
        softmax = vocabulary.softmax(hidden[start:end], tokens.inverse_temperature[start:end])
        out.append(softmax.logprobs(tokens.row[first:last] - start, tokens.label[first:last]))
    return torch.cat(out)


def _chunks(hidden: Tensor, vocabulary: Vocabulary, tokens: HeadTokens) -> list[tuple[int, int, int, int]]:
    """(first row, end row, first token, end token) of each chunk."""
    elements = _CHUNK_ELEMENTS_CUDA if hidden.is_cuda else _CHUNK_ELEMENTS_CPU
    size = max(16, elements // len(vocabulary.weight))
    bounds = [*range(0, len(hidden), size), len(hidden)]
    edges = torch.searchsorted(tokens.host_row, torch.tensor(bounds)).tolist()
    return list(zip(bounds[:-1], bounds[1:], edges[:-1], edges[1:], strict=True))
