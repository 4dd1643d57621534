"""A staged version is a PEFT directory that Hugging Face PEFT reads, and it appears whole or not at all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftConfig
from peft.utils.save_and_load import load_peft_weights

from lorafleet_runtime.errors import RunError
from lorafleet_runtime.publish.stage import stage, unstage, version_directory
from lorafleet_runtime.types import VersionId
from support.adapters import random_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.down_proj": (6, 10)}
ADAPTER = random_adapter(SHAPES, rank=4, seed=0, alpha=32)


def test_peft_reads_the_same_weights_and_config(tmp_path: Path) -> None:
    stage(ADAPTER.manifest, memoryview(ADAPTER.buffer), tmp_path / "v1")
    weights = load_peft_weights(str(tmp_path / "v1"), device="cpu")
    assert weights.keys() == ADAPTER.tensors.keys()
    for name, array in ADAPTER.tensors.items():
        assert torch.equal(weights[name], torch.from_numpy(array))
    config = PeftConfig.from_pretrained(str(tmp_path / "v1"))
    assert (config.r, config.lora_alpha, config.use_rslora) == (4, 32, False)
    assert set(config.target_modules) == {"q_proj", "down_proj"}


def test_rank_stabilised_scaling_reaches_the_config(tmp_path: Path) -> None:
    stage(replace(ADAPTER.manifest, use_rslora=True), memoryview(ADAPTER.buffer), tmp_path / "v1")
    assert PeftConfig.from_pretrained(str(tmp_path / "v1")).use_rslora is True


def test_bfloat16_bytes_are_kept(tmp_path: Path) -> None:
    array = torch.randn(4, 6).bfloat16()
    entry = replace(ADAPTER.manifest.tensors[0], shape=(4, 6), offset=0)
    manifest = replace(ADAPTER.manifest, dtype="bfloat16", tensors=(entry,), num_bytes=48)
    stage(manifest, memoryview(array.view(torch.uint16).numpy().tobytes()), tmp_path / "v1")
    assert torch.equal(load_peft_weights(str(tmp_path / "v1"), device="cpu")[entry.name], array)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    short = memoryview(np.zeros(8, dtype=np.uint8)).cast("B")
    with pytest.raises(RuntimeError):
        stage(ADAPTER.manifest, short, tmp_path / "run" / "v1")
    assert list((tmp_path / "run").iterdir()) == []


def test_what_stood_there_before_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "junk").write_text("old")
    stage(ADAPTER.manifest, memoryview(ADAPTER.buffer), tmp_path / "v1")
    assert sorted(p.name for p in (tmp_path / "v1").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_unstage_removes_empty_parents_and_keeps_other_versions(tmp_path: Path) -> None:
    one, two = (version_directory(tmp_path, VersionId("u", "1.1", n)) for n in (1, 2))
    for directory in (one, two):
        stage(ADAPTER.manifest, memoryview(ADAPTER.buffer), directory)
    unstage(tmp_path, one)
    assert not one.exists() and two.exists()
    unstage(tmp_path, two)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uid", ["..", "a/b", "", "/etc"])
def test_a_uid_that_leaves_its_folder_is_refused(tmp_path: Path, uid: str) -> None:
    with pytest.raises(RunError, match="uid"):
        version_directory(tmp_path, VersionId(uid, "1.1", 1))
