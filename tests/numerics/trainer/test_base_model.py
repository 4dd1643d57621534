"""The megatron model computes what Hugging Face computes, from the same files."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.attention import inverse_frequencies
from lorafleet_runtime.trainer.lora import Segment
from lorafleet_runtime.trainer.model import BaseModel
from lorafleet_runtime.trainer.shape import Rope, read_shape
from support.tiny_model import LLAMA3_ROPE, make_tiny_model
from support.trainer import load, make_rank

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0))


def base_model(directory: Path) -> BaseModel:
    """A trainer's base model."""
    return make_rank(directory, directory)._model


def reference_logits(model: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits[0]
    return logits


def difference(model: Path, ids: torch.Tensor = IDS) -> float:
    """Largest difference of our logits from Hugging Face's, of a size of about 1 to 10."""
    return float((base_model(model).logits(ids) - reference_logits(model, ids)).abs().max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_logits_equal_hugging_face(tmp_path: Path, architecture: Any, tied: bool) -> None:
    model = make_tiny_model(tmp_path, architecture, tie_word_embeddings=tied)
    stored = load_file(model / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert any(key.endswith("bias") and bool(t.any()) for key, t in stored.items()) is (architecture == "qwen2")
    assert difference(model) < 1e-4


LONG_IDS = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(1))
ROPES = {"llama3": LLAMA3_ROPE, "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}


def edit_config(model: Path, copy: Path, remove: Sequence[str] = (), **change: Any) -> Path:
    """A copy of the model with other config.json fields."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in remove}
    (copy / "config.json").write_text(json.dumps(kept | change))
    return copy


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_embedding_equals_hugging_face(llama: Path, tmp_path: Path, kind: str) -> None:
    rope = ROPES[kind]
    scaled = edit_config(llama, tmp_path / "scaled", rope_parameters=rope)
    assert difference(scaled, LONG_IDS) < 1e-4
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    unscaled = edit_config(llama, tmp_path / "unscaled", rope_parameters=plain)
    assert (reference_logits(scaled, LONG_IDS) - reference_logits(unscaled, LONG_IDS)).abs().max() > 0.1


def test_the_llama3_test_has_frequencies_of_all_three_kinds() -> None:
    """By hand: 64 positions hold more than 4, 4 to 1 and less than 1 turns of them."""
    theta, positions = LLAMA3_ROPE["rope_theta"], LLAMA3_ROPE["original_max_position_embeddings"]
    turns = [positions * theta ** (-i / 16) / (2 * math.pi) for i in range(16)]
    ours = inverse_frequencies(Rope(theta, "llama3", 8.0, 1.0, 4.0, positions), 32, CPU)
    ratios = [float(f) * theta ** (i / 16) for i, f in enumerate(ours)]
    assert [i for i, r in enumerate(ratios) if r > 0.9999] == [i for i, n in enumerate(turns) if n > 4] == [0, 1, 2]
    assert [i for i, r in enumerate(ratios) if r < 0.1251] == [i for i, n in enumerate(turns) if n < 1]
    middle = (turns[4] - 1) / 3
    assert ratios[4] == pytest.approx(middle + (1 - middle) / 8, rel=1e-5)


def test_rope_keys_of_older_files_are_read(llama: Path, tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = edit_config(llama, tmp_path / "old", ["rope_parameters"], rope_scaling=scaling, rope_theta=500.0)
    new = edit_config(llama, tmp_path / "new", rope_parameters=LLAMA3_ROPE)
    assert read_shape(old) == read_shape(new)
    assert difference(old, LONG_IDS) < 1e-4
    linear = edit_config(
        llama, tmp_path / "linear", ["rope_parameters"], rope_scaling={"type": "linear", "factor": 4.0}, rope_theta=5e5
    )
    assert read_shape(linear).rope == Rope(5e5, "linear", 4.0)
    plain = edit_config(llama, tmp_path / "plain", ["rope_parameters"], rope_theta=500000.0)
    assert read_shape(plain).rope == Rope(500000.0)
    assert difference(plain) < 1e-4


def test_sharded_checkpoint_gives_the_same_model(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = (base_model(path).logits(IDS) for path in (llama, tmp_path))
    assert torch.equal(whole, sharded)


def test_adapter_with_zero_b_gives_exactly_the_base_logits(tiny: Path, tmp_path: Path) -> None:
    rank = make_rank(tiny, tmp_path)
    model = rank._model
    base = model.logits(IDS)
    load(rank, "a")
    adapter = rank.adapter("a")
    assert not torch.equal(model.logits(IDS, [Segment(adapter, 0, 60)]), base)
    for entry in adapter.layout:
        if entry.kind == "lora_B":
            entry.view(adapter.master).zero_()
    assert torch.equal(model.logits(IDS, [Segment(adapter, 0, 60)]), base)


def broken_copy(model: Path, directory: Path, change: dict[str, torch.Tensor | None]) -> Path:
    copy = shutil.copytree(model, directory / "broken")
    tensors = load_file(copy / "model.safetensors")
    for key, tensor in change.items():
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    "key, tensor",
    [
        ("model.layers.1.mlp.up_proj.weight", None),
        ("model.layers.1.mlp.bonus.weight", torch.zeros(2)),
        ("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 128)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(128, 64, dtype=torch.int8)),
    ],
    ids=["missing", "surplus", "shape", "quantized"],
)
def test_checkpoint_with_wrong_keys_is_refused_by_key(
    qwen3: Path, tmp_path: Path, key: str, tensor: torch.Tensor | None
) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        base_model(broken_copy(qwen3, tmp_path, {key: tensor}))


def test_spare_head_of_a_tied_model_must_equal_the_embedding(qwen3: Path, tmp_path: Path) -> None:
    embedding = load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"]
    base_model(broken_copy(qwen3, tmp_path / "a", {"lm_head.weight": embedding.clone()}))
    with pytest.raises(ConfigError, match="lm_head"):
        base_model(broken_copy(qwen3, tmp_path / "b", {"lm_head.weight": embedding + 1}))


def sharded(model: Path, directory: Path) -> tuple[Path, dict[str, str]]:
    """The model in several files, and its index: key to file."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(directory, max_shard_size="300KB")
    return directory, json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def test_an_index_that_names_a_missing_file_is_refused_by_file(llama: Path, tmp_path: Path) -> None:
    directory, index = sharded(llama, tmp_path / "sharded")
    name = index["model.norm.weight"]
    (directory / name).unlink()
    with pytest.raises(ConfigError, match=name):
        base_model(directory)


def test_a_checkpoint_with_a_part_of_the_files_is_refused_by_key(llama: Path, tmp_path: Path) -> None:
    directory, index = sharded(llama, tmp_path / "sharded")
    name = index["model.norm.weight"]
    lost = min(key for key, file in index.items() if file == name)
    (directory / name).unlink()
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=f"the checkpoint lacks {lost}".replace(".", r"\.")):
        base_model(directory)


def test_a_key_in_two_files_is_refused_by_key(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    save_file({"model.norm.weight": torch.ones(128)}, copy / "old.safetensors")
    with pytest.raises(ConfigError, match=r"holds 'model\.norm\.weight' again"):
        base_model(copy)


@pytest.mark.parametrize("size", [0, 4, 5000, -1])
def test_a_truncated_file_is_refused_by_name(qwen3: Path, tmp_path: Path, size: int) -> None:
    copy = shutil.copytree(qwen3, tmp_path / "copy")
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        base_model(copy)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_malformed_index_is_refused_by_name(qwen3: Path, tmp_path: Path, text: str) -> None:
    copy = shutil.copytree(qwen3, tmp_path / "copy")
    (copy / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json is malformed"):
        base_model(copy)


@pytest.mark.parametrize(
    "change, named",
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "'yarn'.*leaves the long",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 4.0}}, "'su'"),
        ({"rope_parameters": LLAMA3_ROPE | {"factor": None}}, "factor=None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2}}, "factor=-2"),
        ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "low_freq_factor=1.0"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_variant_is_refused_by_name(llama: Path, tmp_path: Path, change: Any, named: str) -> None:
    copy = edit_config(llama, tmp_path / "copy", **change)
    with pytest.raises(ConfigError, match=named):
        base_model(copy)


@pytest.mark.parametrize("field", ["dataParallel", "tensorParallel"])
def test_more_than_one_rank_is_refused_by_name(qwen3: Path, tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_rank(qwen3, tmp_path, None, **{field: 2})
