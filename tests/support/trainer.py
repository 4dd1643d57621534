"""Builders for trainer tests: pools, load requests, prompt groups, and a PEFT model as the independent reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import (
    Artifact,
    Cursor,
    Loaded,
    LoadRequest,
    Manifest,
    PromptGroup,
    RunFault,
    Sample,
    StepResult,
    VersionId,
)

MICRO_VOCAB = 48


def make_micro_model(directory: Path, layers: int = 2) -> Path:
    """A Qwen3 of 8 thousand parameters with grouped queries: a pass through it costs what Python costs."""
    config = Qwen3Config(
        vocab_size=MICRO_VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_rank(model: Path, storage: Path, dtype: torch.dtype | None = None, **trainer: Any) -> TrainerRank:
    """A float32 trainer with 4 slots; `trainer` holds camelCase TrainerSpec fields."""
    return make_pool_rank(model, storage, dtype, 4, 16, **trainer)


def make_pool_rank(
    model: Path, storage: Path, dtype: torch.dtype | None, slots: int, max_rank: int, **trainer: Any
) -> TrainerRank:
    """A trainer with any number of slots."""
    spec = {
        "baseModel": {"path": str(model), "dtype": "float32"},
        "slots": slots,
        "maxRank": max_rank,
        "trainer": trainer,
    }
    return TrainerRank(AdapterPoolSpec.model_validate(spec), str(model), str(storage), dtype)


def make_request(uid: str, /, slot: int = 0, resume: str | None = None, **spec: Any) -> LoadRequest:
    """A run with rank 4 and a learning rate that moves weights visibly; `spec` holds camelCase fields."""
    base: dict[str, Any] = {
        "poolRef": {"name": "pool"},
        "data": "data.jsonl",
        "rmType": "math",
        "rank": 4,
        "alpha": 8,
        "optimizer": {"lr": 1e-2},
    }
    return LoadRequest(uid, "team", f"run-{uid}", slot, base | spec, 10, "data-digest", resume)


def load(rank: TrainerRank, uid: str, /, slot: int = 0, seed: int = 1, **spec: Any) -> Loaded:
    """Load a run and give B values, so that A has a gradient too."""
    loaded = rank.load(make_request(uid, slot, **spec))
    randomize(rank.adapter(uid), seed)
    return loaded


def randomize(adapter: SlotAdapter, seed: int) -> None:
    """Random A and B of a size that changes the logits."""
    noise = torch.randn(adapter.master.shape, generator=torch.Generator().manual_seed(seed))
    adapter.master.copy_(0.1 * noise)
    adapter.refresh()


def make_groups(
    uid: str,
    count: int = 2,
    samples: int = 3,
    prompt: int = 7,
    lengths: tuple[int, ...] = (5, 1, 8),
    seed: int = 0,
    *,
    vocab: int = 256,
) -> list[PromptGroup]:
    """Random prompt groups; response lengths repeat `lengths`, sampler log-probabilities are near the model's."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(uid.encode()))

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (n,), generator=generator).tolist())

    def numbers(n: int, mean: float) -> tuple[float, ...]:
        return tuple((mean + torch.randn(n, generator=generator)).tolist())

    groups = []
    for index in range(count):
        chosen = []
        for i in range(samples):
            n = lengths[i % len(lengths)]
            chosen.append(Sample(ids(n), numbers(n, -6.0), 0.0, numbers(1, 0.0)[0], False))
        groups.append(PromptGroup(uid, VersionId(uid, "1.1", 1), index, ids(prompt + index), tuple(chosen)))
    return groups


def with_advantage(group: PromptGroup, advantage: float) -> PromptGroup:
    """The group with every advantage set."""
    return replace(group, samples=tuple(replace(s, advantage=advantage) for s in group.samples))


def gradient(rank: TrainerRank, uid: str) -> Tensor:
    """A copy of what the run has accumulated."""
    return rank.adapter(uid).grad.clone()


def save(
    rank: TrainerRank,
    cursor: Cursor = Cursor(),
    partial: bool = False,
    score: float | None = None,
    *,
    uid: str = "a",
    directory: str = "runs/a",
) -> Artifact:
    """A checkpoint of a run made now, of the rank that writes it."""
    artifact = rank.checkpoint(uid, directory, cursor, partial, score)
    assert artifact is not None
    return artifact


def export(rank: TrainerRank, uid: str) -> tuple[Manifest, bytes]:
    """The run's weights, of the rank that publishes them."""
    exported = rank.export(uid)
    assert exported is not None
    return exported


def train_step(rank: TrainerRank, uid: str, groups: list[PromptGroup]) -> StepResult:
    """Accumulate and step; fails the test on a fault."""
    assert not rank.accumulate(groups).faults
    result = rank.step(uid, Cursor())
    assert not isinstance(result, RunFault), result
    return result


def named(adapter: SlotAdapter, flat: Tensor) -> dict[str, Tensor]:
    """A flat buffer's matrices by PEFT key."""
    return {entry.key: entry.view(flat) for entry in adapter.layout}


def peft_model(model: Path, rank: TrainerRank, uid: str, directory: Path) -> Any:
    """The run's adapter, exported by a checkpoint, on the Hugging Face model: the independent reference."""
    artifact = save(rank, uid=uid, directory=str(directory))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, artifact.path, is_trainable=True)


def peft_gradients(peft: Any) -> dict[str, Tensor]:
    """Gradients of A and B under PEFT's on-disk keys."""
    return {
        name.replace(".default", ""): parameter.grad
        for name, parameter in peft.named_parameters()
        if parameter.grad is not None
    }


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())
