"""No tensor of a pass holds a vocabulary-wide row for each of its tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.tiny_model import make_tiny_model
from support.trainer import load, make_groups, make_rank

VOCAB = 32_768
CHUNK_BYTES = 64 << 20
"""What the vocabulary projection may hold at a time on a CPU."""


class Largest(TorchDispatchMode):
    """Remembers the largest tensors that any operation makes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary_wide = 0
        """Bytes of the largest one with a value per vocabulary entry."""
        self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().data_ptr() in self.weights:
                continue
            size = tensor.untyped_storage().nbytes()
            if VOCAB in tensor.shape:
                self.vocabulary_wide = max(self.vocabulary_wide, size)
            else:
                self.other = max(self.other, size)
        return out

    weights: frozenset[int] = frozenset()
    """Storages of the base model, which exist anyway."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vocabulary that dominates a pass."""
    return make_tiny_model(
        tmp_path_factory.mktemp("wide"), "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_logits_exist_for_a_chunk_of_rows_only(wide: Path, tmp_path: Path, kl: float) -> None:
    rank = make_rank(wide, tmp_path, microBatchTokens=4096)
    load(rank, "a", algorithm={"klCoef": kl})
    groups = make_groups("a", count=2, samples=2, prompt=8, lengths=(450, 451))
    with Largest() as largest:
        largest.weights = frozenset(p.untyped_storage().data_ptr() for p in rank._model._model.parameters())
        result = rank.accumulate(groups)
    assert not result.faults and result.rows > 1800
    whole = result.rows * VOCAB * 4
    assert whole > 3 * CHUNK_BYTES, "the test is too small to tell"
    assert CHUNK_BYTES // 2 < largest.vocabulary_wide <= CHUNK_BYTES
    assert largest.other <= CHUNK_BYTES
