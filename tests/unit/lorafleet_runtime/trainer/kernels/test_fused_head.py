"""The head with its softmax kernels against the head in plain torch."""

from typing import Any

import pytest
import torch

from lorafleet_runtime.trainer.losses import head
from lorafleet_runtime.trainer.losses.head import HeadTokens, Vocabulary, head_loss
from lorafleet_runtime.trainer.parallel import Ranks


def test_both_ways_give_the_same(softmax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows, of which row 0 predicts three tokens, two of them alike; two temperatures; three chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 12, generator=generator), torch.randn(4200, 12, generator=generator)
    row = torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(40)])
    label = torch.randint(0, 4200, (42,), generator=generator)
    label[1] = label[0]
    tokens = HeadTokens(row, row, label, torch.where(torch.arange(40) < 20, 1.0, 1 / 0.7))
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS_CPU", 16 * 4200)
    vocabulary = Vocabulary(weight, Ranks(0, 1, 1))
    want = head_loss(hidden, vocabulary, tokens, lambda logprob, a, b: (logprob + 9) ** 2)
    for name in ("row_statistics", "write_gradient"):
        monkeypatch.setattr(head, name, getattr(softmax, name))
    monkeypatch.setattr(head, "_Softmax", head._FusedSoftmax)
    got = head_loss(hidden, vocabulary, tokens, lambda logprob, a, b: (logprob + 9) ** 2)
    for name, value in want._asdict().items():
        torch.testing.assert_close(getattr(got, name), value, rtol=2e-5, atol=2e-5)
