"""`lorafleet replay` of every setting in every type. With -s it prints how far apart the two came (docs/replay.md)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.replay import edit_json, recorded, run_replay, tamper
from support.trainer import MICRO_VOCAB, make_micro_model

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "schedule": {
        "optimizer": {"lr": 1e-2, "schedule": "linear", "warmupSteps": 1, "minLr": 1e-3, "clipGrad": 0}
    },
    "off": {
        "algorithm": {"tisMode": "Off", "dualClip": 1.5, "lossReduction": "tokenMean"},
        "optimizer": {"lr": 1e-2, "schedule": "cosine", "weightDecay": 0.5},
    },
    "mask": {
        "algorithm": {
            "tisMode": "Mask", "tisFloor": 0.3, "tisCap": 3.0, "lossReduction": "constant", "maskTruncated": True
        },
        "sampling": {"temperature": 0.7, "maxTokens": 8},
    },
    "floor": {"algorithm": {"tisFloor": 0.9, "tisCap": 1.1, "clipLow": 0.0}, "targetModules": ["down_proj", "k_proj"]},
    "k1": {"algorithm": {"klCoef": 0.1, "klType": "k1"}},
    "k2": {"algorithm": {"klCoef": 0.1, "klType": "k2", "maskTruncated": True}},
    "k3": {"algorithm": {"klCoef": 0.1, "klType": "k3", "lossReduction": "tokenMean"}},
}  # fmt: skip

COLUMNS = ("learning rate", "gradient norm", "log-probability", "largest", "of the way", "weight")


def largest(output: str) -> list[float]:
    """Of each column of figures."""
    rows = [line.split()[2:] for line in output.splitlines() if re.match(r" *\d+ +\d+ +[\d.]+e", line)]
    assert rows, output
    return [max(float(row[i]) for row in rows if i < len(row)) for i in range(len(COLUMNS))]


def show(dtype: str, found: dict[str, list[float]]) -> None:
    print(f"\n{dtype}: {', '.join(COLUMNS)}")
    for name, figures in found.items():
        print(f"{name:>10} {'  '.join(f'{value:.1e}' for value in figures)}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_setting_replays_to_the_same_adapter(qwen3: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """On a tiny model; matrices of bfloat16 are slow on a CPU, so those and float64 take a smaller one."""
    whole = dtype == torch.float32
    model, vocab = (qwen3, 256) if whole else (make_micro_model(tmp_path / "model"), MICRO_VOCAB)
    steps, found, failed = 3 if whole else 2, {}, []
    for name, setting in SETTINGS.items():
        directory = recorded(model, tmp_path / name, steps, (1, steps), dtype, vocab, **setting)
        code, output = run_replay(directory, model)
        found[name] = largest(output)
        if name == "schedule":
            print(f"\n{output}")
        if code != 0 or f"{steps} steps replayed, 2 checkpoints compared; all within" not in output:
            failed.append((name, output))
    show(str(dtype).removeprefix("torch."), found)
    assert not failed


def doubled_rate(directory: Path) -> None:
    """run.json and the records agree on it."""
    run = json.loads((directory / "records/run.json").read_text())
    edit_json(directory / "records/run.json", optimizer=run["optimizer"] | {"lr": 2 * run["optimizer"]["lr"]})
    for path in directory.glob("records/step_*.json"):
        edit_json(path, lr=2 * json.loads(path.read_text())["lr"])


def _tampered(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "records/step_00000001"
    tamper(path.with_suffix(".safetensors"), path.with_suffix(".json"), change)


def other_signs(directory: Path) -> None:
    """Of rewards, their mean and advantages of a step: they agree, and its gradient is as long as before."""

    def change(t: dict[str, Tensor]) -> None:
        t["advantage"] *= -1
        t["reward"] *= -1

    _tampered(directory, change)
    about = directory / "records/step_00000001.json"
    edit_json(about, rewardMean=-json.loads(about.read_text())["rewardMean"])


def swapped_rewards(directory: Path) -> None:
    """Of two samples of a group, with their advantages."""

    def change(t: dict[str, Tensor]) -> None:
        for name in ("advantage", "reward"):
            t[name][[0, 2]] = t[name][[2, 0]]

    _tampered(directory, change)


def other_tokens(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["token_ids"][0] ^= 1

    _tampered(directory, change)


@pytest.mark.parametrize(
    "alter, what",
    [
        (doubled_rate, "the adapter of its checkpoint differs"),
        (other_signs, "the adapter of its checkpoint differs"),
        (swapped_rewards, "the gradient norm differs"),
        (other_tokens, "the log-probability of group 0, sample 0, token 0 differs"),
    ],
)
def test_the_coarse_check_of_bfloat16_finds_it(tmp_path: Path, alter: Callable[[Path], None], what: str) -> None:
    model = make_micro_model(tmp_path / "model")
    directory = recorded(model, tmp_path, 1, (1,), torch.bfloat16, MICRO_VOCAB)
    assert run_replay(directory, model)[0] == 0
    alter(directory)
    code, output = run_replay(directory, model)
    assert (code, f"step 1: {what}" in output) == (1, True), output
