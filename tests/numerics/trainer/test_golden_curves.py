"""100 steps of three unlike runs, trained side by side, against curves that Hugging Face, PEFT and torch made alone.

golden/make.py made the curves and shares no code with the trainer; support/golden.py holds what both read.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafleet_runtime.loop.whiten import whitening
from lorafleet_runtime.rollout.advantages import group_advantages
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, PromptGroup, Sample, StepResult, VersionId
from support.golden import SPECS, STEPS, read_curve, recorded, write_adapter, write_model
from support.trainer import make_rank, make_request

RELATIVE = 1e-9
"""Allowed difference in float64; 4e-11 was measured. The sums are the same, their order is not, and 100 steps of AdamW
carry that along."""


def prompt_groups(name: str, step: int, sampler: Sequence[Any]) -> list[PromptGroup]:
    """A recorded step as rollout worker and train task would hand it over."""
    algorithm = SPECS[name]["algorithm"]
    groups = []
    for index, responses in enumerate(recorded(name, step)):
        rewards = [r.reward for r in responses]
        samples = []
        advantages = group_advantages(rewards, algorithm["advantage"], std_norm=True)
        for response, advantage in zip(responses, advantages, strict=True):
            s, g, i = response.place
            logprobs = tuple(a + b for a, b in zip(sampler[s][g][i], response.noise, strict=True))
            samples.append(Sample(response.tokens, logprobs, response.reward, advantage, response.truncated))
        groups.append(PromptGroup(name, VersionId(name, "1.1", 1), index, responses[0].prompt, tuple(samples)))
    if algorithm["advantage"] == "reinforce":
        batch = whitening(step, groups, std_norm=True)
        groups = [batch.apply(group) for group in groups]
    return groups


def train(rank: TrainerRank, name: str, loss_sum: float) -> dict[str, float]:
    loss = loss_sum / rank._slot(name).denominator
    result = rank.step(name, Cursor())
    assert isinstance(result, StepResult), result
    return {"loss": loss, "gradNorm": result.grad_norm, "lr": result.lr}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """What our trainer does, all runs in every pass."""
    folder = tmp_path_factory.mktemp("golden")
    model = write_model(folder / "model")
    rank = make_rank(model, folder, torch.float64, microBatchTokens=64)
    sampler = {}
    for slot, name in enumerate(SPECS):
        write_adapter(model, name, folder / name)
        request = make_request(name, slot, **SPECS[name], initFrom=name)
        rank.load(replace(request, target_step=STEPS))
        sampler[name] = read_curve(Path(__file__).parent / "golden" / f"{name}.json")["sampler"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SPECS}
    for step in range(STEPS):
        groups = [group for name in SPECS for group in prompt_groups(name, step, sampler[name])]
        result = rank.accumulate(groups)
        assert not result.faults
        for stats in result.stats:
            found[stats.uid].append(train(rank, stats.uid, stats.loss_sum))
    return found


@pytest.mark.parametrize("name", SPECS)
def test_loss_norm_and_rate_of_each_step(name: str, curves: dict[str, list[dict[str, float]]]) -> None:
    golden = read_curve(Path(__file__).parent / "golden" / f"{name}.json")["steps"]
    assert len(golden) == len(curves[name]) == STEPS
    for step, (expected, got) in enumerate(zip(golden, curves[name], strict=True), start=1):
        assert got == pytest.approx(expected, rel=RELATIVE, abs=1e-12), f"step {step}"


def test_golden_runs_differ_in_what_they_use() -> None:
    """A curve that no longer clips, masks or decays would prove less than it seems to."""
    for name in SPECS:
        curve = read_curve(Path(__file__).parent / "golden" / f"{name}.json")["steps"]
        assert len({point["loss"] for point in curve}) > STEPS * 0.9
        clip = SPECS[name]["optimizer"]["clipGrad"]
        norms = [point["gradNorm"] for point in curve]
        assert clip == 0 or any(norm > clip for norm in norms)
