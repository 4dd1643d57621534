"""Fresh adapters have the distribution of PEFT's own initialisation."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lorafleet_runtime.trainer.rank import TrainerRank
from support.trainer import make_rank, make_request, named

RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def fresh(rank: TrainerRank, uid: str, **spec: Any) -> dict[str, Tensor]:
    rank.load(make_request(uid, rank=RANK, **spec))
    adapter = rank.adapter(uid)
    return named(adapter, adapter.master.clone())


def pooled(matrices: dict[str, Tensor], scheme: str) -> Tensor:
    """Every A's elements, in units of the scheme's width."""
    parts = []
    for name, matrix in matrices.items():
        if "lora_A" in name:
            unit = 1.0 / RANK if scheme == "gaussian" else 1.0 / math.sqrt(matrix.shape[1])
            parts.append(matrix.flatten() / unit)
    return torch.cat(parts).double().sort().values


def kolmogorov_smirnov(a: Tensor, b: Tensor) -> float:
    """Largest distance between two empirical distributions; both sorted."""
    points = torch.cat([a, b])
    shares = [torch.searchsorted(x, points, right=True).double() / len(x) for x in (a, b)]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.parametrize("scheme", ["kaiming", "gaussian"])
def test_fresh_adapter_is_distributed_as_pefts(qwen3: Path, tmp_path: Path, scheme: str) -> None:
    ours = fresh(make_rank(qwen3, tmp_path), "a", initScheme=scheme)
    torch.manual_seed(0)
    config = LoraConfig(
        r=RANK, lora_alpha=8, target_modules=TARGETS, init_lora_weights="gaussian" if scheme == "gaussian" else True
    )
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen3), config)
    theirs = {n.replace(".default", ""): p.detach() for n, p in peft.named_parameters() if "lora_" in n}
    assert ours.keys() == theirs.keys()
    assert not any(matrix.any() for name, matrix in ours.items() if "lora_B" in name)
    a, b = pooled(ours, scheme), pooled(theirs, scheme)
    # the two-sample test, with a chance of 1 in 1000 of a false alarm; the other scheme is far beyond it
    assert kolmogorov_smirnov(a, b) < 1.95 * math.sqrt(2 / len(a))
    other = pooled(
        fresh(make_rank(qwen3, tmp_path), "b", initScheme="gaussian" if scheme == "kaiming" else "kaiming"), scheme
    )
    assert kolmogorov_smirnov(other, b) > 0.05


@pytest.mark.parametrize("scheme", ["kaiming", "gaussian"])
def test_each_matrix_has_a_random_stream_of_its_own(qwen3: Path, tmp_path: Path, scheme: str) -> None:
    rank = make_rank(qwen3, tmp_path)
    every = fresh(rank, "a", initScheme=scheme, initSeed=3)
    some = fresh(rank, "b", slot=1, initScheme=scheme, initSeed=3, targetModules=["down_proj", "k_proj"])
    other = fresh(rank, "c", slot=2, initScheme=scheme, initSeed=4)
    assert all(torch.equal(matrix, every[name]) for name, matrix in some.items())
    firsts = [float(matrix.flatten()[0]) for name, matrix in [*every.items(), *other.items()] if "lora_A" in name]
    assert len(set(firsts)) == len(firsts)
