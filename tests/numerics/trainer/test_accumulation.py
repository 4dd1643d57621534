"""A step is the same however its rollouts are cut into passes, and whoever else trains in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet_runtime.trainer import passes
from lorafleet_runtime.trainer.batch import make_micro_batch
from lorafleet_runtime.types import Cursor, PromptGroup, RunFault
from support.trainer import load, make_groups, make_rank, peft_gradients, peft_model

LENGTHS = (3, 5, 8, 13, 21, 34, 55, 89)
ADVANTAGES = (1.0, -0.5, 0.25, 2.0, -1.5, 0.75, -0.25, 0.5)
ROWS = 92
"""Of each rollout: short responses have long prompts, so that a budget of n x ROWS holds exactly n of them."""


def rollouts(uid: str) -> list[PromptGroup]:
    """Eight rollouts with 3 to 89 response tokens and fixed advantages."""
    groups = []
    for index, (tokens, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        (group,) = make_groups(uid, 1, 1, ROWS + 1 - tokens, (tokens,), seed=index)
        samples = (replace(group.samples[0], advantage=advantage),)
        groups.append(replace(group, index=index, samples=samples))
    return groups


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rollouts in each pass."""
    found: list[int] = []
    make = make_micro_batch

    def counting(work: Any, *rest: Any) -> Any:
        found.append(len(work))
        return make(work, *rest)

    monkeypatch.setattr(passes, "make_micro_batch", counting)
    return found


def one_step(model: Path, storage: Path, per_pass: int, neighbour: bool) -> tuple[float, Tensor]:
    """(gradient norm, A and B after the step)."""
    rank = make_rank(model, storage, microBatchTokens=per_pass * ROWS)
    # AdamW's first step is lr x g / (|g| + eps): with a tiny eps the sign of a gradient that is nearly 0 would decide
    load(rank, "a", slot=1, optimizer={"lr": 1e-3, "eps": 1e-4})
    groups = rollouts("a")
    if neighbour:
        load(rank, "b", slot=0, seed=2, rank=8, algorithm={"lossReduction": "tokenMean"})
        groups = [group for pair in zip(rollouts("b"), groups, strict=True) for group in pair]
    assert not rank.accumulate(groups).faults
    result = rank.step("a", Cursor())
    assert not isinstance(result, RunFault)
    return result.grad_norm, rank.adapter("a").master.clone()


def test_step_depends_neither_on_the_size_of_a_pass_nor_on_a_neighbour(
    qwen3: Path, tmp_path: Path, sizes: list[int]
) -> None:
    norm, weights = one_step(qwen3, tmp_path, 8, neighbour=False)
    assert sizes == [8]
    for per_pass, neighbour in [(2, False), (1, False), (8, True), (2, True), (1, True)]:
        sizes.clear()
        other_norm, other = one_step(qwen3, tmp_path, per_pass, neighbour)
        assert sizes == [per_pass] * ((16 if neighbour else 8) // per_pass)
        assert other_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(other, weights, rtol=1e-5, atol=1e-5)


def test_gradient_norm_of_the_eight_rollouts_is_autograds(qwen3: Path, tmp_path: Path) -> None:
    """Mean over rollouts of the mean over tokens, by Hugging Face and PEFT."""
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", slot=1)
    peft = peft_model(qwen3, rank, "a", tmp_path)
    total = torch.zeros(())
    for group in rollouts("a"):
        (sample,) = group.samples
        ids = torch.tensor([*group.prompt_ids, *sample.token_ids])
        logits = peft(ids[None]).logits[0, len(group.prompt_ids) - 1 : -1]
        lp = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        weight = (lp.detach() - torch.tensor(sample.sampler_logprobs)).exp().clamp(max=2.0)
        total = total - (weight * sample.advantage * lp).mean() / len(LENGTHS)
    torch.autograd.backward(total)
    expected = torch.cat([g.flatten() for g in peft_gradients(peft).values()]).norm().item()
    norm, _ = one_step(qwen3, tmp_path, 2, neighbour=True)
    assert norm == pytest.approx(expected, rel=1e-5)
