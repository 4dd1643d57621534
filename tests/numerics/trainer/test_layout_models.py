"""Layouts with other models and modes than test_layouts.py has: untied and biased ones, recompute, bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorafleet_runtime.storage import OPTIMIZER_FILE
from lorafleet_runtime.types import Cursor
from support.tiny_model import make_tiny_model
from support.trainer import make_groups, make_rank, make_request, relative, save
from support.trainer_group import running_group

KL: dict[str, Any] = {"rank": 4, "alpha": 8, "algorithm": {"klCoef": 0.1}}


@pytest.mark.parametrize(
    ("architecture", "layout", "dtype", "recompute"),
    [
        ("llama", (1, 2), "float32", True),
        ("qwen2", (1, 2), "float32", False),
        ("qwen3", (2, 1), "bfloat16", False),
    ],
)
def test_two_steps_are_those_of_one_rank(
    tmp_path: Path, ray_here: None, architecture: Any, layout: tuple[int, int], dtype: str, recompute: bool
) -> None:
    """Masters and moments, 1e-5 relative; in bfloat16 too, since every group has the bits of its own pass."""
    model = make_tiny_model(tmp_path / "model", architecture)
    settings = {"deterministic": True, "recompute": recompute}
    one = make_rank(model, tmp_path, getattr(torch, dtype), **settings)
    with running_group(model, tmp_path / "storage", *layout, dtype, **settings) as group:
        one.load(make_request("a", 0, **KL))
        group.call("load", make_request("a", 0, **KL))
        for step in range(2):
            groups = make_groups("a", 3, seed=step)
            for batch in (groups[:1], groups[1:]):
                assert not one.accumulate(batch).faults
                assert not group.call("accumulate", batch).faults
            one.step("a", Cursor())
            group.call("step", "a", Cursor(), "1.1")
        ours = load_file(Path(group.checkpoint("a", tmp_path / "storage" / "a").path) / OPTIMIZER_FILE)
    reference = load_file(Path(save(one, directory=str(tmp_path / "one")).path) / OPTIMIZER_FILE)
    assert ours.keys() == reference.keys()
    assert max(relative(ours[name], reference[name]) for name in reference) < 1e-5
