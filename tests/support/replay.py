"""Recorded runs for tests of recordSteps and `lorafleet replay`, and ways to tamper with what they left."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lorafleet_cli.main import app
from lorafleet_runtime.loop.whiten import whitening
from lorafleet_runtime.rollout.advantages import group_advantages
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.types import Cursor, LoadRequest, PromptGroup, RunFault, StepResult
from support.trainer import make_groups, make_rank, make_request

DIRECTORY = "team/run-a/a"
"""Of the recorded run, on its storage."""


def request(resume: str | None = None, **spec: Any) -> LoadRequest:
    """Run "a": it records steps of two groups of three samples, as `groups_of` makes them."""
    base: dict[str, Any] = {
        "recordSteps": True, "checkpoint": {"keep": 9}, "rolloutBatchSize": 2, "nSamplesPerPrompt": 3
    }  # fmt: skip
    return make_request("a", resume=resume, **base | spec)


def groups_of(step: int, vocab: int = 256, count: int = 2, **algorithm: Any) -> list[PromptGroup]:
    """A step's groups of three samples, with rewards, and with advantages as the rollout and the loop make them.

    Args:
        step: seed; the groups of step s are number 10 (s - 1) and the next of the run's stream.
        vocab: of the model.
        count: groups.
        algorithm: of the run; advantage and stdNorm are used.
    """
    random = Random(step)
    estimator, std_norm = algorithm.get("advantage", "grpo"), algorithm.get("stdNorm", True)
    groups = []
    for group in make_groups("a", count=count, seed=step, vocab=vocab):
        rewards = [random.random() for _ in group.samples]
        advantages = group_advantages(rewards, estimator, std_norm)
        samples = [
            replace(s, truncated=i == 1, reward=rewards[i], advantage=advantages[i])
            for i, s in enumerate(group.samples)
        ]
        groups.append(replace(group, index=10 * (step - 1) + group.index, samples=tuple(samples)))
    if estimator == "reinforce":
        fixed = whitening(step, groups, std_norm)
        groups = [fixed.apply(group) for group in groups]
    return groups


def cursor_after(groups: Sequence[PromptGroup]) -> Cursor:
    """These and all before them are used up."""
    return Cursor(1 + max(group.index for group in groups))


def step_on(rank: TrainerRank, groups: Sequence[PromptGroup]) -> StepResult:
    """Accumulate and step."""
    assert not rank.accumulate(groups).faults
    result = rank.step("a", cursor_after(groups), "1.1")
    assert not isinstance(result, RunFault), result
    return result


def recorded(
    model: Path, storage: Path, steps: int = 3, saves: Sequence[int] = (3,), dtype: torch.dtype | None = None,
    vocab: int = 256, **spec: Any,
) -> Path:  # fmt: skip
    """Train run "a" with recordSteps. Returns its directory; checkpoints are kept of the steps in `saves`."""
    rank = make_rank(model, storage, dtype)
    rank.load(request(**spec))
    for step in range(1, steps + 1):
        assert step_on(rank, groups_of(step, vocab, **spec.get("algorithm", {}))).unrecorded == ""
        if step in saves:
            rank.checkpoint("a", DIRECTORY, Cursor())
    return storage / DIRECTORY


def run_replay(directory: Path, model: Path, *options: str) -> tuple[int, str]:
    """Exit code and all output of `lorafleet replay`."""
    result = CliRunner().invoke(app, ["replay", str(directory), "--base-model", str(model), *options])
    return result.exit_code, result.output


def tamper(path: Path, about: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change tensors of a file and the digest that a JSON file tells of it: only a recomputation can find it."""
    tensors = load_file(path)
    old = digest(path)
    change(tensors)
    save_file(tensors, path)
    text = about.read_text()
    assert old in text
    about.write_text(text.replace(old, digest(path)))


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
