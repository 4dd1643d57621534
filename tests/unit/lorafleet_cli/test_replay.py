"""`lorafleet replay`: its own arithmetic against values from elsewhere, and what it says when it cannot start."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup
from typer.testing import CliRunner

from lorafleet_cli.errors import CliError
from lorafleet_cli.main import app
from lorafleet_cli.replay import _range
from lorafleet_cli.replay_math import learning_rate, response_loss, token_weight
from lorafleet_cli.replay_records import flat_order

ALGORITHM: dict[str, Any] = {
    "tisMode": "Clip", "tisFloor": 0.0, "tisCap": 2.0, "clipLow": 0.2, "clipHigh": 0.28, "dualClip": None,
    "klCoef": 0.0, "klType": "k3", "lossReduction": "sampleMean",
}  # fmt: skip


def loss_and_slope(gap: float, advantage: float, **changed: Any) -> tuple[float, float]:
    """Of one token whose trainer log-probability is `gap` above the sampler's, -1."""
    logprob = torch.tensor([-1.0 + gap], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-1.0], dtype=torch.float64)
    reference = sampler if changed.get("klCoef") else None
    loss = response_loss(logprob, sampler, reference, advantage, ALGORITHM | changed)
    (slope,) = torch.autograd.grad(loss, logprob)
    return float(loss.detach()), float(slope)


LN2 = math.log(2.0)


@pytest.mark.parametrize(
    "gap, advantage, changed, loss, slope",
    [
        (LN2, 3.0, {"tisCap": 1.5}, -4.5, -4.5),  # weight 2 capped at 1.5, ratio 1
        (-LN2, 3.0, {"tisFloor": 0.8}, -2.4, -2.4),  # weight 0.5 raised to 0.8
        (LN2, 3.0, {"tisMode": "Mask", "tisCap": 1.5}, 0.0, 0.0),
        (-LN2, 3.0, {"tisMode": "Mask", "tisFloor": 0.6}, 0.0, 0.0),
        (LN2, 3.0, {"tisMode": "Mask", "tisCap": 2.5}, -6.0, -6.0),
        (LN2, 3.0, {"tisMode": "Off"}, -3.84, 0.0),  # ratio 2 clipped to 1.28
        (LN2, -3.0, {"tisMode": "Off"}, 6.0, 6.0),  # the worse of the two: no clip from above
        (LN2, -3.0, {"tisMode": "Off", "dualClip": 1.5}, 4.5, 0.0),
        (-LN2, -3.0, {"tisMode": "Off"}, 2.4, 0.0),  # ratio 0.5 clipped to 0.8
        (30.0, -1.0, {"tisMode": "Off"}, math.exp(20.0), 0.0),
        (LN2, 0.0, {"klCoef": 0.5, "klType": "k1"}, 0.5 * LN2, 0.5),
        (LN2, 0.0, {"klCoef": 0.5, "klType": "k2"}, 0.25 * LN2**2, 0.5 * LN2),
        (LN2, 0.0, {"klCoef": 0.5, "klType": "k3"}, 0.5 * (0.5 - 1 + LN2), 0.5 * (1 - 0.5)),
    ],
)
def test_token_loss_and_its_slope(
    gap: float, advantage: float, changed: dict[str, Any], loss: float, slope: float
) -> None:
    assert loss_and_slope(gap, advantage, **changed) == pytest.approx((loss, slope), rel=1e-12, abs=1e-12)


def test_weight_of_a_token_by_reduction() -> None:
    weights = [token_weight({"lossReduction": r}, 50, 4) for r in ("sampleMean", "tokenMean", "constant")]
    assert weights == [0.25, 1.0, 0.02]


def test_cosine_is_that_of_hugging_face_after_the_warmup() -> None:
    """Its index k is step - 1; its warm-up starts at 0 and is another one."""
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = get_cosine_with_min_lr_schedule_with_warmup(sgd, 3, 10, min_lr=0.5)
    settings = {"lr": 2.0, "minLr": 0.5, "warmupSteps": 3, "schedule": "cosine"}
    for step in range(1, 11):
        if step > 3:
            assert learning_rate(settings, step, 10) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        sgd.step()
        schedule.step()


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]),  # after the warm-up one step at the peak, halfway, then minLr
    ],
)
def test_rates_of_six_steps_with_a_horizon_of_four(schedule: str, rates: list[float]) -> None:
    settings = {"lr": 1.0, "minLr": 0.1, "warmupSteps": 2, "schedule": schedule}
    assert [learning_rate(settings, step, 4) for step in range(1, 7)] == pytest.approx(rates)


def test_order_of_a_flat_tensor_is_by_layer_and_site() -> None:
    def key(layer: int, module: str, kind: str) -> str:
        parent = "mlp" if module.endswith(("gate_proj", "down_proj")) else "self_attn"
        return f"base_model.model.model.layers.{layer}.{parent}.{module}.lora_{kind}.weight"

    wanted = [
        key(layer, module, kind)
        for layer in (2, 10)
        for site in (("q_proj", "v_proj"), ("o_proj",), ("gate_proj",), ("down_proj",))
        for kind in "AB"
        for module in site
    ]
    assert flat_order(sorted(wanted)) == wanted


@pytest.mark.parametrize(
    "text, wanted", [(None, (1, 9)), ("2:5", (2, 5)), ("4:", (4, 9)), (":3", (1, 3)), ("6", (6, 6))]
)
def test_range_of_steps(text: str | None, wanted: tuple[int, int]) -> None:
    assert _range(text, 9) == wanted


@pytest.mark.parametrize("text", ["5:2", "0:3", "1:10", "a:b", ""])
def test_range_that_is_none_names_what_is_recorded(text: str) -> None:
    with pytest.raises(CliError, match=r"^steps: "):
        _range(text, 9)


def test_missing_peft_is_one_line_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named 'peft' ({name})", name="peft.utils")

    monkeypatch.setattr(importlib, "import_module", without)
    result = CliRunner().invoke(app, ["replay", str(tmp_path), "--base-model", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output == "error: module: peft: replay needs it; pip install 'lorafleet-cli[replay]'\n"


def test_directory_without_records_and_records_of_another_format(tmp_path: Path) -> None:
    arguments = ["replay", str(tmp_path), "--base-model", str(tmp_path)]
    assert "holds no records/run.json; give the directory" in CliRunner().invoke(app, arguments).output
    (tmp_path / "records").mkdir()
    (tmp_path / "records/run.json").write_text(json.dumps({"format": 7}))
    assert "error: format: 7: this version reads 1" in CliRunner().invoke(app, arguments).output
