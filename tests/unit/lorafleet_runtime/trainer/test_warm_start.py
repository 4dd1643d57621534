"""initFrom as it is checked before a slot is taken: the config's fields, and the tensor headers against the run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from safetensors.numpy import load_file, save_file

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INIT_ERROR
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.warm_start import check_warm_start

TARGETS = ("q_proj", "v_proj")
MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
OUT = {"q_proj": 8, "v_proj": 4}


def write(root: Path, rank: int = 4, **config: Any) -> None:
    """A PEFT config as PEFT writes it, and matrices for TARGETS."""
    directory = root / "source"
    directory.mkdir()
    (root / "config.json").write_text(json.dumps(MODEL))
    LoraConfig(r=rank, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM").save_pretrained(directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    tensors = {}
    for layer in range(2):
        for name in TARGETS:
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = np.ones((rank, 8), np.float32)
            tensors[f"{module}.lora_B.weight"] = np.ones((OUT[name], rank), np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")


def check(root: Path, **fields: Any) -> None:
    base = {"poolRef": {"name": "p"}, "data": "d", "rmType": "math", "rank": 4, "alpha": 8, "initFrom": "source"}
    check_warm_start(AdapterRunSpec.model_validate(base | fields), TARGETS, root, root)


def refusal(root: Path, **fields: Any) -> str:
    with pytest.raises(RunError) as caught:
        check(root, **fields)
    assert caught.value.reason == INIT_ERROR and caught.value.message.startswith("initFrom: ")
    return caught.value.message


@pytest.mark.parametrize(
    "config",
    [{}, {"use_rslora": True, "lora_dropout": 0.1}]
    + [{"init_lora_weights": value} for value in (None, False, "gaussian", "orthogonal")],
)
def test_a_plain_adapter_is_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, **config)
    check(tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("use_qalora", True),
        ("modules_to_save", ["lm_head"]),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("layer_replication", [[0, 1]]),
        ("layers_to_transform", [0]),
        ("exclude_modules", ["k_proj"]),
        ("rank_pattern", {"q_proj": 16}),
        ("alpha_pattern", {"q_proj": 16}),
        ("fan_in_fan_out", True),
        ("a_field_of_a_later_peft", "on"),
    ],
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused_by_field(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path, **{field: value})
    message = refusal(tmp_path)
    assert f"{field} is {value!r}" in message and "without it" in message


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"rank": 8}, "r is 4, the run's rank 8; set rank to match"),
        ({"alpha": 16}, "lora_alpha is 8, the run's alpha 16; set alpha to match"),
        ({"initFrom": "nowhere"}, "adapter_config.json cannot be read"),
        ({"initFrom": "../elsewhere"}, "'../elsewhere' lies outside the pool's storage"),
    ],
)
def test_another_scale_or_place_is_refused_by_field(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    write(tmp_path)
    assert text in refusal(tmp_path, **fields)


def test_the_directory_of_a_run_points_to_its_checkpoints(tmp_path: Path) -> None:
    """It is one level too high; the path is told once, and no errno."""
    write(tmp_path)
    for step in (5, 10):
        (tmp_path / f"source/step_{step}").mkdir()
    (tmp_path / "source/adapter_config.json").unlink()
    assert refusal(tmp_path) == (
        f"initFrom: {tmp_path}/source/adapter_config.json cannot be read (No such file or directory); this is a run's"
        " directory: give one of its checkpoints, for example step_10"
    )
    assert "relative to the pool's storage; of a run NAMESPACE/NAME/UID/step_N" in refusal(tmp_path, initFrom="nowhere")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_a_folder_and_a_link_out_of_the_storage_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    write(root)
    file = root / "source" / name
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    assert f"{name} cannot be read" in refusal(root)  # it is missing
    file.symlink_to(elsewhere)
    assert "lies outside the pool's storage" in refusal(root)
    file.unlink()
    os.mkfifo(file)
    assert f"{name} cannot be read" in refusal(root)
    file.unlink()
    file.mkdir()
    assert f"{name} cannot be read" in refusal(root)


def test_links_inside_the_storage_are_followed(tmp_path: Path) -> None:
    """A hub cache is made of them."""
    write(tmp_path)
    (tmp_path / "source").rename(tmp_path / "blobs")
    (tmp_path / "source").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "source" / name).symlink_to(tmp_path / "blobs" / name)
    check(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LOHA"}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "source/adapter_config.json").write_bytes(content)
    assert "adapter_config.json" in refusal(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """Case 7 (vllm-project/vllm#4879), (c); (a) and (b) are rank and rank_pattern above."""
    write(tmp_path)
    file = tmp_path / "source/adapter_model.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert "adapter_model.safetensors cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("change, text", [("drop", "lacks"), ("add", "has"), ("shape", "shape"), ("int", "type I32")])
def test_other_tensors_than_the_runs_are_refused_by_key(tmp_path: Path, change: str, text: str) -> None:
    write(tmp_path)
    file = tmp_path / "source/adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    first = tensors.pop(key)
    if change == "add":
        tensors |= {key: first, key.replace("q_proj", "k_proj"): first}
        key = key.replace("q_proj", "k_proj")
    elif change == "shape":
        tensors[key] = first[:3]
    elif change == "int":
        tensors[key] = first.astype(np.int32)
    save_file(tensors, file)
    message = refusal(tmp_path)
    assert key in message and text in message


def test_the_check_imports_no_torch() -> None:
    code = "import sys, lorafleet_runtime.trainer.warm_start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
