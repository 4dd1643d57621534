"""The demo's three tasks trained one after another with plain transformers + PEFT, for comparison in the benchmark.

    python -m lorafleet_local.baseline --model DIR --storage ROOT --json OUT

Same prompts, steps, batch sizes, ranks, rewards and optimizer as the demo's runs, and nothing of the runtime. At its
best settings: each prompt is computed once per group, in sampling and in training (with gradient), and the model is
loaded once. Called by the benchmark; G = samples per group, N = prompts of a step, T = longest reply.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import transformers
import typer

from lorafleet_local.tasks import GROUP_SIZE, TASKS, Task, read_rows, task_files

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task's training."""

    task: str
    seconds: float
    rollout_seconds: float
    train_seconds: float
    tokens: int
    """Non-padding tokens: each prompt once per group, and every reply."""
    tokens_per_second: float
    rewards: tuple[float, ...]
    """Mean reward of each step."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    ids: torch.Tensor
    """[N, P], padded on the left."""
    mask: torch.Tensor
    """[N, P], 1 on tokens."""


class Baseline:
    """One model, one adapter at a time.

    Args:
        model_dir: HF directory of the base model.
        seed: of adapter weights and sampling.
    """

    def __init__(self, model_dir: Path, seed: int) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir, padding_side="left")
        self._base: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._eos = int(self._tokenizer.eos_token_id)
        self._tokenizer.pad_token = self._tokenizer.eos_token
        self._seed = seed

    def train(self, task: Task, rows: Sequence[tuple[str, Any]], save_to: Path | None) -> TaskResult:
        """Train a fresh adapter on a task's rows, in order.

        Args:
            task: the task.
            rows: (prompt, label) of every step, steps x prompts_per_step.
            save_to: where to write the PEFT adapter; None does not.
        """
        started = time.monotonic()
        torch.manual_seed(self._seed)
        config = peft.LoraConfig(
            r=task.rank, lora_alpha=task.alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(self._base, config).eval()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
        rollout_seconds = train_seconds = 0.0
        tokens = 0
        curve: list[float] = []
        for step in range(task.steps):
            batch = rows[step * task.prompts_per_step : (step + 1) * task.prompts_per_step]
            begin = time.monotonic()
            prompts = self._encode([prompt for prompt, _ in batch])
            replies, mask = self._sample(model, prompts, task.max_tokens)
            rewards = self._rewards(task, batch, replies, mask)
            sampled = time.monotonic()
            optimizer.zero_grad(set_to_none=True)
            if self._backward(model, prompts, replies, mask, rewards):
                torch.nn.utils.clip_grad_norm_(parameters, CLIP_GRAD)
                optimizer.step()
            rollout_seconds += sampled - begin
            train_seconds += time.monotonic() - sampled
            tokens += int(prompts.mask.sum()) + int(mask.sum())
            curve.append(float(rewards.mean()))
        if save_to is not None:
            model.save_pretrained(save_to)
        self._base = model.unload()
        seconds = time.monotonic() - started
        return TaskResult(task.name, seconds, rollout_seconds, train_seconds, tokens, tokens / seconds, tuple(curve))

    def _encode(self, prompts: Sequence[str]) -> _Prompts:
        batch = self._tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
        return _Prompts(batch["input_ids"], batch["attention_mask"])

    def _prefill(self, model: Any, prompts: _Prompts, copies: int) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Logits [N*copies, V] after the prompts, the cache and the mask, each prompt computed once."""
        cache = transformers.DynamicCache(config=self._base.config)
        out = model(
            input_ids=prompts.ids, attention_mask=prompts.mask, position_ids=_positions(prompts.mask),
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        cache.batch_repeat_interleave(copies)
        return out.logits[:, -1].repeat_interleave(copies, 0), cache, prompts.mask.repeat_interleave(copies, 0)

    @torch.no_grad()
    def _sample(self, model: Any, prompts: _Prompts, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replies [N*G, T] at temperature 1 and their mask (bool, the closing token included)."""
        logits, cache, mask = self._prefill(model, prompts, GROUP_SIZE)
        lengths = mask.sum(1)
        done = torch.zeros(len(mask), dtype=torch.bool)
        replies: list[torch.Tensor] = []
        live: list[torch.Tensor] = []
        for t in range(max_tokens):
            token = torch.multinomial(torch.softmax(logits.float(), -1), 1)[:, 0].masked_fill(done, self._eos)
            replies.append(token)
            live.append(~done)
            done = done | (token == self._eos)
            if t == max_tokens - 1 or bool(done.all()):
                break
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            out = model(
                input_ids=token[:, None], attention_mask=mask, position_ids=(lengths + t)[:, None],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            logits = out.logits[:, -1]
        return torch.stack(replies, 1), torch.stack(live, 1)

    def _rewards(
        self, task: Task, batch: Sequence[tuple[str, Any]], replies: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """[N, G]"""
        scores: list[float] = []
        for i, (row, live) in enumerate(zip(replies.tolist(), mask.tolist(), strict=True)):
            prompt, label = batch[i // GROUP_SIZE]
            ids = [token for token, on in zip(row, live, strict=True) if on]
            ended = ids[-1] == self._eos
            text = self._tokenizer.decode(ids[:-1] if ended else ids)
            scores.append(task.reward(prompt=prompt, response=text, label=label, metadata={}, truncated=not ended))
        return torch.tensor(scores).view(len(batch), GROUP_SIZE)

    def _backward(
        self, model: Any, prompts: _Prompts, replies: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor
    ) -> bool:
        """Gradient of the token-mean GRPO loss; False when every group is constant."""
        std = rewards.std(1, keepdim=True)
        keep = (std[:, 0] > 1e-6).nonzero()[:, 0]
        if not len(keep):
            return False
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (std + 1e-6))[keep].flatten()
        rows = (keep[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)).flatten()
        kept = _Prompts(prompts.ids[keep], prompts.mask[keep])
        logprobs = self._logprobs(model, kept, replies[rows], mask[rows])
        weights = advantages[:, None].expand_as(mask[rows])[mask[rows]]
        loss = -(weights * torch.exp(logprobs - logprobs.detach())).sum() / mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return True

    def _logprobs(self, model: Any, prompts: _Prompts, replies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the reply tokens, flat in row order, with gradient through the shared prompts."""
        first, cache, prompt_mask = self._prefill(model, prompts, GROUP_SIZE)
        width = replies.shape[1]
        logits = first[:, None]
        if width > 1:
            out = model(
                input_ids=replies[:, :-1], attention_mask=torch.cat([prompt_mask, mask[:, :-1].long()], 1),
                position_ids=prompt_mask.sum(1)[:, None] + torch.arange(width - 1),
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            logits = torch.cat([logits, out.logits], 1)
        chosen = torch.log_softmax(logits[mask].float(), -1)
        return chosen.gather(1, replies[mask][:, None])[:, 0]


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def main(
    model: Annotated[Path, typer.Option(help="HF directory of the base model.")],
    storage: Annotated[Path, typer.Option(help="Storage root with the tasks' files.")],
    json_file: Annotated[Path, typer.Option("--json", help="Where to write the result.")],
    save: Annotated[Path | None, typer.Option(help="Directory for the adapters, one folder per task.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of adapter weights and sampling.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Train the three tasks one after another."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    started = time.monotonic()
    baseline = Baseline(model, seed)
    load_seconds = time.monotonic() - started
    results: list[TaskResult] = []
    for name, task in TASKS.items():
        rows = read_rows(storage / task_files(task).train)
        results.append(baseline.train(task, rows, save / name if save else None))
        last = results[-1]
        typer.echo(f"{name:9} {last.seconds:.1f} s  reward {last.rewards[0]:.2f} -> {last.rewards[-1]:.2f}")
    total = time.monotonic() - started
    tokens = sum(r.tokens for r in results)
    summary = {"load_seconds": load_seconds, "total_seconds": total, "tokens": tokens, "threads": threads, "seed": seed}
    summary |= {"tokens_per_second": tokens / total}
    json_file.write_text(json.dumps({**summary, "tasks": {r.task: asdict(r) for r in results}}, indent=2) + "\n")
    typer.echo(f"total {total:.1f} s, {tokens / total:.1f} tokens/s")


if __name__ == "__main__":
    typer.run(main)
