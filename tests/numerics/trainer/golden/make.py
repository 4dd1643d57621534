"""Makes the golden curves with Hugging Face, PEFT, torch.optim.AdamW and their schedulers, in float64. Uses nothing of
the trainer: advantages, losses and reductions are written out here once more, one sample at a time.

    PYTHONPATH=tests .venv/bin/python tests/numerics/trainer/golden/make.py
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    Qwen3ForCausalLM,
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from support.golden import SPECS, STEPS, Response, distinct_steps, recorded, write_adapter, write_model


class Float64Norm(torch.nn.Module):
    """Hugging Face's RMSNorm computes in float32 whatever comes in."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return y


def float64_model(directory: Path) -> Any:
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).double()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                setattr(parent, name, Float64Norm(child))
    return model


def logprobs(model: Any, response: Response, temperature: float) -> Tensor:
    ids = torch.tensor([[*response.prompt, *response.tokens]])
    logits = model(ids).logits[0, len(response.prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response.tokens)[:, None])[:, 0]


def advantages(kind: str, groups: list[list[Response]]) -> list[list[float]]:
    rewards = torch.tensor([[r.reward for r in group] for group in groups], dtype=torch.float64)
    if kind == "grpo":
        centred = rewards - rewards.mean(1, keepdim=True)
        result = centred / (rewards.std(1, unbiased=True, keepdim=True) + 1e-6)
    elif kind == "rloo":
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
        result = rewards - others
    else:
        result = (rewards - rewards.mean()) / (rewards.std(unbiased=True) + 1e-6)
    answer: list[list[float]] = result.tolist()
    return answer


def token_losses(algorithm: dict[str, Any], lp: Tensor, sampler: Tensor, base: Tensor | None, a: float) -> Tensor:
    mismatch = (lp.detach() - sampler).exp()
    if algorithm["tisMode"] == "Off":
        ratio = (lp - sampler).exp()
        clipped = ratio.clamp(1 - algorithm["clipLow"], 1 + algorithm["clipHigh"])
        loss = -torch.min(a * ratio, a * clipped)
        if a < 0:
            loss = torch.min(loss, torch.full_like(loss, -a * algorithm["dualClip"]))
    else:  # REINFORCE with an importance weight: the gradient of -w A log p, with value -w A
        low, high = algorithm["tisFloor"], algorithm["tisCap"]
        inside = (mismatch >= low) & (mismatch <= high)
        weight = mismatch.clamp(low, high) if algorithm["tisMode"] == "Clip" else mismatch * inside
        loss = -weight * a * (1 + lp - lp.detach())
    if base is not None:
        log_ratio = base - lp
        loss = loss + algorithm["klCoef"] * (log_ratio.exp() - log_ratio - 1)
    return loss


def step_loss(spec: dict[str, Any], model: Any, groups: list[list[Response]], sampler: list[Any]) -> Tensor:
    algorithm, sampling = spec["algorithm"], spec["sampling"]
    sums, tokens, responses = torch.zeros((), dtype=torch.float64), 0, 0
    for group, group_advantages in zip(groups, advantages(algorithm["advantage"], groups), strict=True):
        for response, advantage in zip(group, group_advantages, strict=True):
            if algorithm.get("maskTruncated") and response.truncated:
                continue
            s, g, i = response.place
            old = torch.tensor(sampler[s][g][i], dtype=torch.float64) + torch.tensor(
                response.noise, dtype=torch.float64
            )
            base = None
            if "klCoef" in algorithm:
                with torch.no_grad(), model.disable_adapter():
                    base = logprobs(model, response, sampling["temperature"])
            losses = token_losses(algorithm, logprobs(model, response, sampling["temperature"]), old, base, advantage)
            reduction = algorithm["lossReduction"]
            if reduction == "sampleMean":
                sums = sums + losses.mean()
            elif reduction == "tokenMean":
                sums = sums + losses.sum()
            else:
                sums = sums + losses.sum() / sampling["maxTokens"]
            tokens, responses = tokens + len(losses), responses + 1
    return sums / (tokens if algorithm["lossReduction"] == "tokenMean" else responses)


def schedule(optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> LambdaLR:
    """Hugging Face's, with its warm-up one step earlier."""
    warmup = settings["warmupSteps"]
    if settings["schedule"] == "cosine":
        theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, STEPS, min_lr=settings["minLr"])
    elif settings["schedule"] == "linear":
        theirs = get_linear_schedule_with_warmup(optimizer, warmup, STEPS)
    else:
        theirs = get_constant_schedule_with_warmup(optimizer, warmup)
    (factor,) = theirs.lr_lambdas
    for group in optimizer.param_groups:
        group["lr"] = settings["lr"]
    return LambdaLR(optimizer, lambda k: factor(k + 1) if k < warmup else factor(k))


def make_curve(model: Path, name: str, adapter: Path) -> dict[str, Any]:
    spec = SPECS[name]
    settings, temperature = spec["optimizer"], spec["sampling"]["temperature"]
    peft = PeftModel.from_pretrained(float64_model(model), write_adapter(model, name, adapter), is_trainable=True)
    peft = peft.double().train()
    with torch.no_grad():
        sampler = [
            [[logprobs(peft, r, temperature).tolist() for r in group] for group in recorded(name, step)]
            for step in distinct_steps()
        ]
    parameters = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, settings["lr"], tuple(settings["betas"]), settings["eps"], settings["weightDecay"]
    )
    rates = schedule(optimizer, settings)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = step_loss(spec, peft, recorded(name, step), sampler)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings["clipGrad"] or math.inf)
        steps.append({"loss": loss.item(), "gradNorm": norm.item(), "lr": rates.get_last_lr()[0]})
        optimizer.step()
        rates.step()
    return {"sampler": sampler, "steps": steps}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        for name in SPECS:
            curve = make_curve(model, name, Path(folder) / name)
            path = Path(__file__).parent / f"{name}.json"
            path.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")  # floats in full precision
            sys.stdout.write(f"{path}: {curve['steps'][0]} ... {curve['steps'][-1]}\n")


if __name__ == "__main__":
    main()
