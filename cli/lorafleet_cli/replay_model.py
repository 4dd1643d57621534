"""The run's model for `lorafleet replay`: Hugging Face base, PEFT adapter, torch AdamW; one response per pass.

Called by replay.py. Nothing is packed, shared, chunked or fused: what is slow here is what makes it a check.
"""

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lorafleet_cli.errors import CliError
from lorafleet_cli.replay_math import learning_rate, response_loss, token_weight
from lorafleet_cli.replay_records import RecordedGroup, RecordedSample, Saved, Step

_TOLERATED, _DRIFT = 5.0, 250.0
"""Error of a gradient element that `allowed` makes room for, in root mean squares of the gradient: by the tolerance,
and by the difference of the log-probabilities. The largest errors of millions of elements are several times the usual
one: SmolLM2-135M took 1.6 times of 1 and 50 after 3 steps."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replayed step compares with its record."""

    lr: float
    """|recomputed - recorded| / recorded (absolute where the recorded one is 0)."""
    grad_norm: float
    """The same of the gradient norm before clipping."""
    logprob: float
    """Largest |recomputed - recorded| of the trainer's own log-probabilities."""
    where: str
    """The token with that difference."""


class Replay:
    """A run's adapter, trained again.

    Args:
        run: run.json.
        base_model: directory of the base model's files.
        initial: the adapter to start from, by PEFT key.
        dtype: arithmetic of the replay.
        device: torch device.
        tolerance: error of a gradient element, in root mean squares of the gradient, that `allowed` makes room for.

    Raises:
        CliError: the model or the adapter cannot be put together.
    """

    def __init__(
        self, run: dict[str, Any], base_model: Path, initial: dict[str, Tensor], *, dtype: torch.dtype, device: str,
        tolerance: float,
    ) -> None:  # fmt: skip
        self._run, self._dtype, self._device, self._tolerance = run, dtype, device, tolerance
        self._compute = DTYPES[run["dtype"]]
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            # the trainer holds the base in the pool's type: what that rounds away is not there for it either
            base = AutoModelForCausalLM.from_pretrained(base_model, dtype=self._compute, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise CliError("base-model", base_model, f"transformers cannot load it: {error}") from error
        config = LoraConfig(
            task_type="CAUSAL_LM", r=run["rank"], lora_alpha=run["alpha"], use_rslora=run["rslora"],
            target_modules=list(run["targets"]), lora_dropout=0.0, bias="none",
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = get_peft_model(base.to(device=device, dtype=dtype), config, autocast_adapter_dtype=False)
        self._model.eval()
        self._parameters = {
            name.replace(".default", ""): p for name, p in self._model.named_parameters() if p.requires_grad
        }
        if self._parameters.keys() != initial.keys():
            odd = sorted(self._parameters.keys() ^ initial.keys())
            text = f"PEFT on this base model has other matrices ({len(odd)} differ, first {odd[0]})"
            raise CliError("initial adapter", "keys", text)
        self.masters = {
            key: initial[key].to(device=device, dtype=dtype).clone().requires_grad_(True) for key in self._parameters
        }
        self.allowed = {key: torch.zeros_like(master) for key, master in self.masters.items()}
        """How far each weight may be from the trainer's: see `_widen`."""
        self._adamw = self._make_adamw()
        self._refresh()

    def _make_adamw(self) -> torch.optim.AdamW:
        o = self._run["optimizer"]
        return torch.optim.AdamW(
            list(self.masters.values()), lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"],
            weight_decay=o["weightDecay"], foreach=False,
        )  # fmt: skip

    def restore(self, saved: Saved) -> None:
        """Go on from a checkpoint."""
        for key, master in self.masters.items():
            with torch.no_grad():
                master.copy_(saved.masters[key])
            first, second = (m[key].to(device=self._device, dtype=self._dtype).clone() for m in saved.moments)
            self._adamw.state[master] = {
                "step": torch.tensor(float(saved.step)),
                "exp_avg": first,
                "exp_avg_sq": second,
            }
        self._refresh()

    def _refresh(self) -> None:
        """The model computes with the masters rounded to the pool's type, as the trainer's does."""
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                exact = self._compute in (torch.float32, torch.float64)
                master = self.masters[key]
                parameter.copy_(master if exact else master.to(self._compute))

    def step(self, step: Step) -> Outcome:
        """One optimizer step on the recorded samples, compared with what the trainer recorded."""
        optimizer = self._run["optimizer"]
        worst, where = 0.0, ""
        for parameter in self._parameters.values():
            parameter.grad = None
        for group in step.groups:
            for i, sample in enumerate(group.samples):
                gap, token = self._sample(group, sample)
                if not gap <= worst:  # NaN counts as the largest
                    worst, where = gap, f"group {group.index}, sample {i}, token {token}"
        grads = self._divide(step.denominator)
        norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
        scale = min(1.0, optimizer["clipGrad"] / (norm + 1e-6)) if optimizer["clipGrad"] > 0 else 1.0
        for key, master in self.masters.items():
            master.grad = grads[key] * scale
        rate = learning_rate(optimizer, step.number, self._run["targetStep"])
        self._adamw.param_groups[0]["lr"] = rate
        self._adamw.step()
        self._widen(rate, norm * scale, worst)
        self._refresh()
        return Outcome(_relative(rate, step.lr), _relative(norm, step.grad_norm), worst, where)

    def _widen(self, rate: float, norm: float, drift: float) -> None:
        """Make room for what a gradient that is a little off does to each weight in this step.

        AdamW divides by the root of the second moment, so a weight with next to no gradient moves by up to the learning
        rate in a direction that rounding decides, while most weights follow the gradient closely. A fixed bound would
        be too wide for these or too narrow for those. Weights that rounding has sent elsewhere change the gradients of
        others: the log-probabilities, whose difference has a limit of its own, tell how far the models have come apart.
        """
        beta, eps = self._run["optimizer"]["betas"][1], self._run["optimizer"]["eps"]
        usual = norm / math.sqrt(sum(m.numel() for m in self.masters.values()))
        noise = (_TOLERATED * self._tolerance + _DRIFT * drift) * usual
        for key, master in self.masters.items():
            state = self._adamw.state[master]
            second = (state["exp_avg_sq"] / (1 - beta ** float(state["step"]))).sqrt()
            moved = torch.where(second > 0, (noise / (second + eps)).clamp(max=2.0), torch.zeros_like(second))
            self.allowed[key] += rate * moved + torch.finfo(torch.float32).eps * master.detach().abs()

    def _divide(self, denominator: int) -> dict[str, Tensor]:
        return {
            key: torch.zeros_like(p) if p.grad is None else p.grad / max(denominator, 1)
            for key, p in self._parameters.items()
        }

    def _sample(self, group: RecordedGroup, sample: RecordedSample) -> tuple[float, int]:
        """Forward and backward of one response.

        Returns:
            Largest difference to the trainer's recorded log-probabilities and its token; (0, 0) without a record.
        """
        algorithm, sampling = self._run["algorithm"], self._run["sampling"]
        tokens = len(sample.token_ids)
        with_kl = algorithm["klCoef"] > 0
        trains = sample.in_loss and tokens > 0 and (sample.advantage != 0 or with_kl)
        if not trains and not len(sample.old):
            return 0.0, 0
        reference = self._logprobs(group, sample, base=True) if with_kl else None
        logprob = self._logprobs(group, sample)
        if trains:
            sampler = sample.sampler.to(device=self._device, dtype=self._dtype)
            total = response_loss(logprob, sampler, reference, sample.advantage, algorithm)
            torch.autograd.backward(token_weight(algorithm, sampling["maxTokens"], tokens) * total)
        if len(sample.old) != tokens:
            return float("nan"), len(sample.old)  # a trained response without them
        gaps = (logprob.detach().cpu() - sample.old).abs()
        return float(gaps.max()), int(gaps.argmax())

    def _logprobs(self, group: RecordedGroup, sample: RecordedSample, base: bool = False) -> Tensor:
        """[R] log-probabilities of the response at the sampling temperature; of the base model without gradient."""
        ids = torch.cat((group.prompt_ids, sample.token_ids)).to(self._device)
        with self._model.disable_adapter() if base else nullcontext(), torch.set_grad_enabled(not base):
            logits = self._model(input_ids=ids[None], use_cache=False).logits[0]
            rows = logits[len(group.prompt_ids) - 1 : -1] / self._run["sampling"]["temperature"]
            picked: Tensor = rows.log_softmax(dim=-1).gather(1, ids[len(group.prompt_ids) :, None])
        return picked[:, 0]


def _relative(value: float, recorded: float) -> float:
    return abs(value - recorded) / (abs(recorded) or 1.0)
