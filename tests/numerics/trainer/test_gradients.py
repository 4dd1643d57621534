"""Gradients equal autograd through PEFT on the Hugging Face model, with each loss written out once more."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.types import Cursor, PromptGroup, Sample
from support.trainer import gradient, load, make_groups, make_rank, named, peft_gradients, peft_model, relative

Rule = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(trainer logprob, sampler logprob, advantage, base logprob) to loss per token."""


def clip_rule(lp: Tensor, old: Tensor, advantage: float, base: Tensor) -> Tensor:
    return -advantage * (lp.detach() - old).exp().clamp(max=2.0) * (lp - lp.detach()).exp()


def mask_rule(lp: Tensor, old: Tensor, advantage: float, base: Tensor) -> Tensor:
    weight = (lp.detach() - old).exp()
    return -advantage * (weight * (weight <= 1.5)) * (lp - lp.detach()).exp()


def ppo_rule(lp: Tensor, old: Tensor, advantage: float, base: Tensor) -> Tensor:
    ratio = (lp - old).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    return torch.minimum(loss, torch.tensor(-advantage * 3.0)) if advantage < 0 else loss


def kl_rule(lp: Tensor, old: Tensor, advantage: float, base: Tensor) -> Tensor:
    return clip_rule(lp, old, advantage, base) + 0.3 * ((base - lp).exp() - 1 - (base - lp))


def logprobs(model: Any, group: PromptGroup, sample: Sample, temperature: float) -> Tensor:
    ids = torch.tensor([*group.prompt_ids, *sample.token_ids])
    logits = model(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1] / temperature
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return found


def reference_gradients(
    peft: Any, groups: list[PromptGroup], rule: Rule, weight: Callable[[int], float], temperature: float
) -> dict[str, Tensor]:
    total = torch.zeros(())
    for group in groups:
        for sample in group.samples:
            with torch.no_grad(), peft.disable_adapter():
                base = logprobs(peft, group, sample, temperature)
            lp = logprobs(peft, group, sample, temperature)
            loss = rule(lp, torch.tensor(sample.sampler_logprobs), sample.advantage, base)
            total = total + weight(len(sample.token_ids)) * loss.sum()
    torch.autograd.backward(total)
    return peft_gradients(peft)


CASES: dict[str, tuple[dict[str, Any], Rule, Callable[[int], float]]] = {
    "sampleMean": ({}, clip_rule, lambda r: 1 / r),
    "tokenMean": ({"lossReduction": "tokenMean"}, clip_rule, lambda r: 1.0),
    "constant": ({"lossReduction": "constant"}, clip_rule, lambda r: 1 / 32),
    "mask": ({"tisMode": "Mask", "tisCap": 1.5}, mask_rule, lambda r: 1 / r),
    "ppo": ({"tisMode": "Off", "dualClip": 3.0}, ppo_rule, lambda r: 1 / r),
    "kl": ({"klCoef": 0.3}, kl_rule, lambda r: 1 / r),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_peft_autograd(qwen3: Path, tmp_path: Path, case: str) -> None:
    algorithm, rule, weight = CASES[case]
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", algorithm=algorithm, sampling={"temperature": 0.7, "maxTokens": 32})
    groups = make_groups("a", count=3)
    assert not rank.accumulate(groups).faults
    peft = peft_model(qwen3, rank, "a", tmp_path)
    reference = reference_gradients(peft, groups, rule, weight, 0.7)
    ours = named(rank.adapter("a"), gradient(rank, "a"))
    assert ours.keys() == reference.keys()
    for key, grad in reference.items():
        assert relative(ours[key], grad) < 2e-5, key


def test_gradient_equals_peft_on_an_untied_model_with_some_targets(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama, tmp_path)
    load(rank, "a", targetModules=["k_proj", "up_proj", "down_proj"])
    groups = make_groups("a")
    rank.accumulate(groups)
    peft = peft_model(llama, rank, "a", tmp_path)
    reference = reference_gradients(peft, groups, clip_rule, lambda r: 1 / r, 1.0)
    ours = named(rank.adapter("a"), gradient(rank, "a"))
    assert ours.keys() == reference.keys()
    for key, grad in reference.items():
        assert relative(ours[key], grad) < 2e-5, key


def test_mismatch_statistics_compare_trainer_and_sampler(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a")
    groups = make_groups("a")
    peft = peft_model(qwen3, rank, "a", tmp_path)
    gaps = []
    with torch.no_grad():
        for group in groups:
            for sample in group.samples:
                gaps.append((logprobs(peft, group, sample, 1.0) - torch.tensor(sample.sampler_logprobs)).abs())
    (stats,) = rank.accumulate(groups).stats
    gap = torch.cat(gaps)
    assert stats.policy.tokens == stats.tokens == stats.response_tokens == len(gap)
    assert stats.policy.mismatch == pytest.approx(float(gap.sum()), rel=1e-5)
    assert stats.mismatch_max == pytest.approx(float(gap.max()), rel=1e-5)


def test_recompute_gives_the_same_gradient(qwen3: Path, tmp_path: Path) -> None:
    grads = []
    for recompute in (False, True):
        rank = make_rank(qwen3, tmp_path, recompute=recompute)
        load(rank, "a")
        rank.accumulate(make_groups("a"))
        grads.append(gradient(rank, "a"))
    assert torch.equal(*grads)


def test_constant_group_skips_the_model_and_counts(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a")
    first, second = make_groups("a")
    flat = replace(second, samples=tuple(replace(s, advantage=0.0) for s in second.samples))
    alone = rank.accumulate([first])
    lone_gradient = gradient(rank, "a")
    both = rank.accumulate([first, flat])
    assert both.rows == alone.rows
    assert both.stats[0].samples == 6 and both.stats[0].groups == 2
    assert relative(gradient(rank, "a"), 2 * lone_gradient) < 1e-6
    assert rank._slots[0].denominator == 9


def test_constant_group_with_kl_still_trains(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", algorithm={"klCoef": 0.5})
    (group,) = make_groups("a", count=1)
    rank.accumulate([replace(group, samples=tuple(replace(s, advantage=0.0) for s in group.samples))])
    assert gradient(rank, "a").norm() > 0


def test_bfloat16_trains_with_float32_masters(qwen3: Path, tmp_path: Path) -> None:
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        rank = make_rank(qwen3, tmp_path, dtype)
        load(rank, "a")
        rank.accumulate(make_groups("a"))
        adapter = rank.adapter("a")
        assert adapter.master.dtype == adapter.grad.dtype == torch.float32
        assert adapter.weights.dtype == dtype
        grads.append(gradient(rank, "a"))
        rank.step("a", Cursor())
        assert torch.equal(adapter.weights, adapter.master.to(dtype))
    assert relative(grads[1], grads[0]) < 0.05
    assert math.isfinite(float(grads[1].norm()))
