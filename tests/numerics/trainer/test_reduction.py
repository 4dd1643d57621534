"""What a step divides by, and that masked truncated completions leave the loss and its denominator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorafleet_runtime.types import Cursor, PromptGroup, RunFault, StepResult
from support.trainer import gradient, load, make_groups, make_rank

ALGORITHM = {"lossReduction": "tokenMean", "maskTruncated": True, "tisMode": "Clip", "tisFloor": 1.0, "tisCap": 1.0}
"""Floor and cap hold the importance weight at 1, whatever the sampler said: a token's loss is minus its advantage."""


def ended_and_cut(uid: str) -> PromptGroup:
    """A: 4 tokens, advantage +1, ended. B: 6 tokens, advantage -1, hit the length limit."""
    (group,) = make_groups(uid, count=1, samples=2, lengths=(4, 6))
    a, b = group.samples
    return replace(group, samples=(replace(a, advantage=1.0), replace(b, advantage=-1.0, truncated=True)))


@pytest.mark.parametrize(
    "masked, tokens, loss",
    [
        (True, 4, -1.0),  # 4 x -1 over 4
        (False, 10, 0.2),  # (4 x -1 + 6 x 1) over 10
    ],
)
def test_masked_completion_leaves_numerator_and_denominator(
    qwen3: Path, tmp_path: Path, masked: bool, tokens: int, loss: float
) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", algorithm=ALGORITHM | {"maskTruncated": masked})
    (stats,) = rank.accumulate([ended_and_cut("a")]).stats
    assert rank._slots[0].denominator == tokens
    assert stats.loss_sum / tokens == pytest.approx(loss, rel=1e-6)
    assert (stats.samples, stats.tokens, stats.response_tokens) == (2, tokens, 10)


def test_batch_of_only_masked_completions_has_zero_gradient_and_steps(qwen3: Path, tmp_path: Path) -> None:
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", algorithm=ALGORITHM)
    group = ended_and_cut("a")
    cut = replace(group, samples=tuple(replace(s, truncated=True) for s in group.samples))
    (stats,) = rank.accumulate([cut]).stats
    assert (stats.loss_sum, stats.tokens, stats.response_tokens) == (0.0, 0, 10)
    assert not gradient(rank, "a").any()
    result = rank.step("a", Cursor())
    assert isinstance(result, StepResult) and result.grad_norm == 0.0 and result.step == 1


def test_gradient_of_a_group_with_a_masked_sample_is_that_of_the_rest(qwen3: Path, tmp_path: Path) -> None:
    group = ended_and_cut("a")
    norms = []
    for batch in (group, replace(group, samples=group.samples[:1])):
        rank = make_rank(qwen3, tmp_path)
        load(rank, "a", algorithm=ALGORITHM)
        rank.accumulate([batch])
        result = rank.step("a", Cursor())
        assert not isinstance(result, RunFault)
        norms.append(result.grad_norm)
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize("reduction, denominator", [("sampleMean", 6), ("tokenMean", 28), ("constant", 6)])
def test_step_divides_the_sum_by_samples_or_tokens(
    qwen3: Path, tmp_path: Path, reduction: str, denominator: int
) -> None:
    """Two groups of three responses with 5 + 1 + 8 tokens."""
    rank = make_rank(qwen3, tmp_path)
    load(rank, "a", algorithm={"lossReduction": reduction})
    for group in make_groups("a", count=2):
        rank.accumulate([group])
    total = gradient(rank, "a")
    result = rank.step("a", Cursor())
    assert isinstance(result, StepResult)
    assert result.grad_norm == pytest.approx(float(total.norm()) / denominator, rel=1e-5)
    assert not gradient(rank, "a").any()
    # the first AdamW step: exp_avg = (1 - beta1) * the clipped mean gradient
    mean = total / denominator
    clipped = mean * min(1.0, 1.0 / (float(mean.norm()) + 1e-6))
    torch.testing.assert_close(rank._slot("a").optimizer.moments[0], 0.1 * clipped)
