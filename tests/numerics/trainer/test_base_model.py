"""The megatron model computes what Hugging Face computes, from the same files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.lora import Segment
from lorafleet_runtime.trainer.model import BaseModel
from support.trainer import load, make_rank

CPU = torch.device("cpu")
IDS = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(0))


def reference_logits(model: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(IDS[None]).logits[0]
    return logits


def test_logits_equal_hugging_face(tiny: Path) -> None:
    ours = BaseModel(tiny, torch.float32, CPU).logits(IDS)
    assert (ours - reference_logits(tiny)).abs().max() < 1e-4


def test_qwen2_with_qkv_bias_equals_hugging_face(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    ours = BaseModel(tmp_path, torch.float32, CPU).logits(IDS)
    assert (ours - reference_logits(tmp_path)).abs().max() < 1e-4


def test_sharded_checkpoint_gives_the_same_model(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = (BaseModel(path, torch.float32, CPU).logits(IDS) for path in (llama, tmp_path))
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
    ],
    ids=["missing", "surplus", "shape"],
)
def test_checkpoint_with_wrong_keys_is_refused_by_key(
    qwen3: Path, tmp_path: Path, key: str, tensor: torch.Tensor | None
) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        BaseModel(broken_copy(qwen3, tmp_path, {key: tensor}), torch.float32, CPU)


def test_spare_head_of_a_tied_model_must_equal_the_embedding(qwen3: Path, tmp_path: Path) -> None:
    embedding = load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"]
    BaseModel(broken_copy(qwen3, tmp_path / "a", {"lm_head.weight": embedding.clone()}), torch.float32, CPU)
    with pytest.raises(ConfigError, match="lm_head"):
        BaseModel(broken_copy(qwen3, tmp_path / "b", {"lm_head.weight": embedding + 1}), torch.float32, CPU)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_variant_is_refused_by_name(
    llama: Path, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=named):
        BaseModel(copy, torch.float32, CPU)


def test_old_rope_theta_key_is_read(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    del config["rope_parameters"]
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 500000.0}))
    ours = BaseModel(copy, torch.float32, CPU)
    assert ours.shape.rope_theta == 500000.0
    assert (ours.logits(IDS) - reference_logits(copy)).abs().max() < 1e-4


@pytest.mark.parametrize("field", ["dataParallel", "tensorParallel"])
def test_more_than_one_rank_is_refused_by_name(qwen3: Path, tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make_rank(qwen3, tmp_path, None, **{field: 2})
