"""What leaves the trainer and what it starts from: PEFT reads the same adapter, at the same scale."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.trainer.lora import Segment
from lorafleet_runtime.trainer.rank import TrainerRank
from support.trainer import export, load, make_groups, make_rank, make_request, named, peft_model, save, train_step

IDS = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0))


def our_logits(rank: TrainerRank, uid: str) -> torch.Tensor:
    return rank._model.logits(IDS, [Segment(rank.adapter(uid), 0, len(IDS))])


def checkpoint_path(rank: TrainerRank, uid: str) -> Path:
    """Folder of a checkpoint made now."""
    return Path(save(rank, uid=uid, directory=f"runs/{uid}").path)


def peft_logits(peft: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = peft(IDS[None]).logits[0]
    return logits


def test_exported_adapter_gives_the_same_logits_in_peft(tiny: Path, tmp_path: Path) -> None:
    rank = make_rank(tiny, tmp_path)
    load(rank, "a")
    train_step(rank, "a", make_groups("a"))
    theirs = peft_logits(peft_model(tiny, rank, "a", tmp_path))
    assert (our_logits(rank, "a") - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj"],
        ["down_proj", "v_proj"],
        ["k_proj", "gate_proj"],
        ["up_proj", "o_proj", "q_proj"],
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ],
    ids=len,
)
def test_export_has_pefts_own_keys_and_shapes_of_every_layer(tiny: Path, tmp_path: Path, targets: list[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    state = get_peft_model_state_dict(get_peft_model(base, LoraConfig(r=3, target_modules=targets)))
    expected = {key: tuple(tensor.shape) for key, tensor in state.items()}
    assert len(expected) == 2 * len(targets) * base.config.num_hidden_layers
    rank = make_rank(tiny, tmp_path)
    load(rank, "a", rank=3, targetModules=targets)
    manifest = export(rank, "a")[0]
    assert {t.name: t.shape for t in manifest.tensors} == expected
    folder = checkpoint_path(rank, "a")
    assert {key: tuple(t.shape) for key, t in load_file(folder / "adapter_model.safetensors").items()} == expected
    config = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(targets) == sorted(manifest.target_modules)


def test_flat_buffer_holds_the_same_tensors_as_the_directory(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama, tmp_path)
    load(rank, "a", rank=3, alpha=5, targetModules=["q_proj", "v_proj", "gate_proj"])
    manifest, buffer = export(rank, "a")
    stored = load_file(checkpoint_path(rank, "a") / "adapter_model.safetensors")
    assert {t.name for t in manifest.tensors} == stored.keys()
    for entry in manifest.tensors:
        found = np.frombuffer(buffer, np.float32, int(np.prod(entry.shape)), entry.offset).reshape(entry.shape)
        assert np.array_equal(found, stored[entry.name].numpy())
    assert (manifest.rank, manifest.alpha, manifest.dtype) == (3, 5, "float32")
    assert manifest.num_bytes == len(buffer) == sum(4 * t.numel() for t in stored.values())
    assert manifest.digest == hashlib.sha256(buffer).hexdigest()


def test_first_weights_are_pefts_distribution_and_depend_on_name_and_seed_only(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    rank.load(make_request("a", 0, initSeed=3))
    rank.load(make_request("b", 1, initSeed=3, targetModules=["down_proj"]))
    rank.load(make_request("c", 2, initSeed=4))
    a, b, c = (named(rank.adapter(uid), rank.adapter(uid).master) for uid in "abc")
    down = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    assert torch.equal(a[down], b[down]) and not torch.equal(a[down], c[down])
    assert all(not t.any() for key, t in a.items() if "lora_B" in key)
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    theirs = get_peft_model(model, LoraConfig(r=4, target_modules=["down_proj"])).state_dict()
    reference = theirs[down.replace("lora_A", "lora_A.default")]
    bound = 128**-0.5
    assert 0.95 * bound < float(a[down].abs().max()) < bound
    assert float(a[down].std()) == pytest.approx(float(reference.std()), rel=0.1)


def write_peft(model: Path, directory: Path, **config: Any) -> Any:
    """A PEFT adapter made by PEFT itself, with B not zero."""
    settings = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]} | config
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    peft.save_pretrained(directory)
    return peft.eval()


START: dict[str, Any] = {"rank": 16, "alpha": 32, "targetModules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize("rslora, scale", [(False, 2.0), (True, 8.0)])
def test_warm_start_keeps_the_scale_and_the_rslora_flag(
    qwen3: Path, tmp_path: Path, rslora: bool, scale: float
) -> None:
    """Case 6 (vllm-project/vllm#55545, NVIDIA/TensorRT-LLM#1668): 32 / sqrt(16) was taken for 32 / 16."""
    source = write_peft(qwen3, tmp_path / "source", use_rslora=rslora)
    rank = make_rank(qwen3, tmp_path)
    rank.load(make_request("a", initFrom=str(tmp_path / "source"), **START))
    assert rank.adapter("a").scale == scale
    assert (our_logits(rank, "a") - peft_logits(source)).abs().max() < 1e-4
    path = checkpoint_path(rank, "a")
    assert json.loads((path / "adapter_config.json").read_text())["use_rslora"] is rslora
    assert export(rank, "a")[0].use_rslora is rslora
    base = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    assert torch.equal(peft_logits(PeftModel.from_pretrained(base, path)), peft_logits(source))
    again = make_rank(qwen3, tmp_path)
    again.load(make_request("a", resume=str(path), initFrom=str(tmp_path / "source"), **START))
    assert again.adapter("a").scale == scale


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_warm_start_takes_any_plain_init_and_float_type(
    llama: Path, tmp_path: Path, init: bool | str, dtype: torch.dtype
) -> None:
    write_peft(llama, tmp_path / "source", init_lora_weights=init)
    file = tmp_path / "source/adapter_model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
    rank = make_rank(llama, tmp_path)
    rank.load(make_request("a", initFrom="source", **START))
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "source", autocast_adapter_dtype=True).float()
    assert (our_logits(rank, "a") - peft_logits(theirs)).abs().max() < 1e-4
    with theirs.disable_adapter():
        assert (our_logits(rank, "a") - peft_logits(theirs)).abs().max() > 0.05  # the adapter matters


def test_a_warm_start_trains_on_as_it_was(qwen3: Path, tmp_path: Path) -> None:
    """Exported before the first step, it is the file that the run started from, bit for bit."""
    write_peft(qwen3, tmp_path / "source", use_rslora=True)
    rank = make_rank(qwen3, tmp_path)
    rank.load(make_request("a", initFrom="source", **START))
    first = load_file(checkpoint_path(rank, "a") / "adapter_model.safetensors")
    source = load_file(tmp_path / "source/adapter_model.safetensors")
    assert first.keys() == source.keys()
    assert all(torch.equal(first[key], tensor) for key, tensor in source.items())


@pytest.mark.parametrize(
    "config, named_field",
    [
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"exclude_modules": ["model.layers.0.self_attn.q_proj"]}, "exclude_modules"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"use_dora": True}, "use_dora"),
        ({"r": 8}, "rank"),
        ({"lora_alpha": 16}, "alpha"),
        ({"target_modules": ["q_proj"]}, "targetModules"),
    ],
)
def test_adapter_that_is_not_the_runs_shape_is_refused_by_field(
    qwen3: Path, tmp_path: Path, config: dict[str, Any], named_field: str
) -> None:
    write_peft(qwen3, tmp_path / "source", **config)
    rank = make_rank(qwen3, tmp_path)
    with pytest.raises(RunError, match=named_field) as raised:
        rank.load(make_request("a", initFrom=str(tmp_path / "source"), **START))
    assert raised.value.reason == reasons.INIT_ERROR
    assert rank.slots() == {}


def test_adapter_out_of_the_storage_is_refused(qwen3: Path, tmp_path: Path) -> None:
    write_peft(qwen3, tmp_path / "source")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "source")
    rank = make_rank(qwen3, tmp_path / "root")
    for init_from in (str(tmp_path / "source"), "../source", "link"):
        with pytest.raises(RunError, match="outside the pool's storage") as raised:
            rank.load(make_request("a", initFrom=init_from, **START))
        assert raised.value.reason == reasons.INIT_ERROR


@pytest.mark.parametrize("damage", ["truncated", "nan"])
def test_damaged_adapter_is_refused(qwen3: Path, tmp_path: Path, damage: str) -> None:
    write_peft(qwen3, tmp_path / "source")
    file = tmp_path / "source" / "adapter_model.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-50])
    else:
        tensors = load_file(file)
        next(iter(tensors.values()))[0, 0] = torch.nan
        save_file(tensors, file)
    with pytest.raises(RunError) as raised:
        make_rank(qwen3, tmp_path).load(make_request("a", initFrom=str(tmp_path / "source"), **START))
    assert raised.value.reason == reasons.INIT_ERROR
