"""Copies of the kernels that run on the CPU, in Triton's interpreter."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton.language as tl  # here, so that no part of triton is first imported as interpreted

import lorafleet_runtime.trainer

_KERNELS = Path(lorafleet_runtime.trainer.__path__[0]) / "kernels"


def interpreted(name: str) -> ModuleType:
    """A private copy of a kernels file. triton.jit decides when it decorates, so the variable is needed here only."""
    spec = importlib.util.spec_from_file_location(f"interpreted_{name}", _KERNELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def plain_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """tl.sum and tl.max are kernels themselves, and not interpreted; every kernel of ours passes an axis."""
    monkeypatch.setattr(tl, "sum", lambda x, axis: tl.reduce(x, axis, tl.standard._sum_combine))
    monkeypatch.setattr(tl, "max", lambda x, axis: tl.reduce(x, axis, tl.standard._elementwise_max))


@pytest.fixture(scope="session")
def swiglu() -> Any:
    """kernels/swiglu.py."""
    return interpreted("swiglu")


@pytest.fixture(scope="session")
def rotary() -> Any:
    """kernels/rotary.py."""
    return interpreted("rotary")


@pytest.fixture(scope="session")
def softmax() -> Any:
    """kernels/softmax.py."""
    return interpreted("softmax")


@pytest.fixture(scope="session")
def lora() -> Any:
    """kernels/lora.py."""
    return interpreted("lora")


@pytest.fixture(scope="session")
def attention() -> Any:
    """kernels/attention.py."""
    return interpreted("attention")
