"""Tiny models, written once per session."""

from pathlib import Path

import pytest
import torch

from support.tiny_model import make_tiny_model


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Bit-identity holds for a fixed thread count."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, query and key norms."""
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(params=["qwen3", "llama"])
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each architecture in turn."""
    path: Path = request.getfixturevalue(request.param)
    return path
