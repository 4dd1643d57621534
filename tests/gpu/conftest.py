"""Fixtures of the tests that need CUDA: no part of `make test`; run them with `pytest tests/gpu` on a GPU node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.tiny_model import make_tiny_model


@pytest.fixture(autouse=True, scope="session")
def cuda() -> None:
    """Say at once what is missing."""
    if not torch.cuda.is_available():
        pytest.fail("torch sees no CUDA device; run tests/gpu on a GPU node", pytrace=False)


@pytest.fixture(autouse=True)
def usual_order() -> Iterator[None]:
    """A deterministic trainer asks for a fixed order in its whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with 4 layers and a head size that flash attention takes."""
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        head_dim=64,
    )
