"""A device on which kernels cannot be compiled is told at start."""

from typing import Any

import pytest
import torch

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.kernels import check


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(x: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(check, "swiglu", compile)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    with pytest.raises(ConfigError, match=r"do not run on NVIDIA H200: Failed to find C compiler.*image needs"):
        check.check_kernels(torch.device("cpu"), torch.bfloat16, 64, True)


def test_all_of_them_are_run(
    monkeypatch: pytest.MonkeyPatch, swiglu: Any, rotary: Any, softmax: Any, lora: Any, attention: Any
) -> None:
    """In the interpreter, up to attention, which needs a device."""
    made: list[Any] = []

    def attend(q: Any, k: Any, v: Any, s: Any) -> Any:
        made.append(s)
        return q + k.sum() + v.sum()

    for module, names in (
        (swiglu, ["swiglu"]), (rotary, ["norm_rotate"]), (softmax, ["row_statistics", "write_gradient"]),
        (lora, ["make_tables", "narrow", "widen", "add_gradients"]),
    ):  # fmt: skip
        for name in names:
            monkeypatch.setattr(check, name, getattr(module, name))
    monkeypatch.setattr(check, "attend", attend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    check.check_kernels(torch.device("cpu"), torch.bfloat16, 64, True)
    assert len(made) == 1 and made[0].spread is not None
