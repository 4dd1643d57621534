"""Activations computed again in the backward pass give the same gradients, in the first layer too.

Embeddings are frozen, so the first layer's input needs no gradient; a checkpointed block whose inputs need none is
skipped by autograd, and the adapters of that layer silently stay where they are.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import PromptGroup
from support.trainer import (
    gradient,
    load,
    make_groups,
    make_rank,
    named,
    peft_gradients,
    peft_model,
    relative,
    train_step,
)

TARGETS: dict[str, dict[str, Any]] = {"all": {}, "some": {"targetModules": ["q_proj", "down_proj"]}}


def trained(model: Path, storage: Path, recompute: bool) -> tuple[TrainerRank, list[PromptGroup]]:
    """A trainer that holds gradients of two runs with other targets and ranks, and the groups of the first."""
    rank = make_rank(model, storage, recompute=recompute)
    load(rank, "all", slot=0, seed=1)
    load(rank, "some", slot=2, seed=2, rank=7, **TARGETS["some"])
    groups = {uid: make_groups(uid) for uid in TARGETS}
    assert not rank.accumulate([*groups["some"], *groups["all"]]).faults
    return rank, groups["all"]


def test_gradients_are_equal_bit_for_bit_with_recompute_on_and_off(tiny: Path, tmp_path: Path) -> None:
    (off, _), (on, _) = trained(tiny, tmp_path, False), trained(tiny, tmp_path, True)
    for uid in TARGETS:
        grads = gradient(off, uid), gradient(on, uid)
        assert grads[0].any()
        assert torch.equal(*grads)


def peft_reference(model: Path, rank: TrainerRank, groups: list[PromptGroup], directory: Path) -> dict[str, Any]:
    """Autograd through PEFT of sum over tokens of -advantage * min(ratio, 2) * logprob / length, by key."""
    peft = peft_model(model, rank, "all", directory)
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([*group.prompt_ids, *sample.token_ids])
            label = torch.tensor(sample.token_ids)[:, None]
            lp = peft(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1].log_softmax(-1).gather(1, label)[:, 0]
            weight = (lp.detach() - torch.tensor(sample.sampler_logprobs)).exp().clamp(max=2.0)
            torch.autograd.backward(-(sample.advantage * weight * lp).mean())
    return peft_gradients(peft)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_layer_has_pefts_gradients_and_they_are_not_near_zero(
    tiny: Path, tmp_path: Path, recompute: bool
) -> None:
    rank, groups = trained(tiny, tmp_path, recompute)
    reference = peft_reference(tiny, rank, groups, tmp_path)
    ours = named(rank.adapter("all"), gradient(rank, "all"))
    assert ours.keys() == reference.keys()
    typical = {kind: [float(g.norm()) for k, g in reference.items() if kind in k] for kind in ("lora_A", "lora_B")}
    for key, grad in reference.items():
        assert relative(ours[key], grad) < 2e-5, key
        kind = "lora_A" if "lora_A" in key else "lora_B"
        if ".layers.0." in key:
            assert float(ours[key].norm()) > 0.05 * max(typical[kind]), key


def test_a_step_moves_every_layer_and_no_base_weight(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama, tmp_path, recompute=True)
    load(rank, "all")
    base = rank._model._model
    assert not [name for name, parameter in base.named_parameters() if parameter.requires_grad]
    weights = {name: parameter.clone() for name, parameter in base.named_parameters()}
    before = {key: tensor.clone() for key, tensor in named(rank.adapter("all"), rank.adapter("all").weights).items()}
    train_step(rank, "all", make_groups("all"))
    after = named(rank.adapter("all"), rank.adapter("all").weights)
    assert not [key for key, tensor in before.items() if torch.equal(tensor, after[key])]
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, weights[name]) and parameter.grad is None, name
