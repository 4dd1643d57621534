"""Proves that the demo's adapters learnt: plain transformers + PEFT, greedy, on prompts that were never trained on.

    python -m lorafleet_local.prove --model DIR --storage ROOT --adapter addition=DIR --adapter json=DIR --json OUT

Run by the demo at its end. Uses nothing of the runtime: the adapters must work in a stock PEFT stack. Exits 1 unless
every task's mean reward rose by at least `REQUIRED_GAIN`.
"""

import json
import multiprocessing
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lorafleet_local.processes import end_with_parent
from lorafleet_local.rewards import first_integer_is
from lorafleet_local.tasks import TASKS, Task, read_rows, task_files

REQUIRED_GAIN = 0.3
"""Mean held-out reward after training minus before."""


@dataclass(frozen=True, slots=True)
class Score:
    """How one model does on one task's held-out prompts."""

    mean_reward: float
    full_reward: float
    """Share of replies with reward 1."""
    first_integer: float | None
    """Addition only: share of replies whose first integer is the sum, whether or not they stopped there."""
    examples: tuple[str, ...]
    """The first replies."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One task before and after."""

    task: str
    prompts: int
    before: Score
    after: Score
    gain: float
    proven: bool


def prove(model_dir: Path, storage_root: Path, adapters: dict[str, Path]) -> list[Proof]:
    """Score the base model and each adapter on its task's held-out prompts.

    Two processes of one thread each: on a busy machine OpenMP threads that wait for each other are many times slower.

    Args:
        model_dir: HF directory of the base model.
        storage_root: where `tasks.write_tasks` wrote.
        adapters: PEFT directory by task name.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=_end_with_parent) as pool:
        # The longest replies first, so that the two processes end together.
        order = sorted(adapters, key=lambda name: -TASKS[name].max_tokens)
        jobs = {name: pool.submit(prove_task, model_dir, storage_root, name, adapters[name]) for name in order}
        return [jobs[name].result() for name in adapters]


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent ends: a killed pool leaves its workers waiting for ever."""
    end_with_parent(signal.SIGKILL)


def prove_task(model_dir: Path, storage_root: Path, name: str, adapter: Path) -> Proof:
    """Score the base model and one adapter, on one thread.

    Args:
        model_dir: HF directory of the base model.
        storage_root: where `tasks.write_tasks` wrote.
        name: of the task.
        adapter: PEFT directory.
    """
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = read_rows(storage_root / task_files(TASKS[name]).heldout)
    before = _score(base, tokenizer, TASKS[name], rows)
    model = peft.PeftModel.from_pretrained(base, adapter).eval()
    model.merge_adapter()  # a quarter faster than unmerged, and the same function
    after = _score(model, tokenizer, TASKS[name], rows)
    gain = after.mean_reward - before.mean_reward
    return Proof(name, len(rows), before, after, gain, gain >= REQUIRED_GAIN)


def greedy_replies(model: Any, tokenizer: Any, prompts: Sequence[str], max_tokens: int) -> list[tuple[str, bool]]:
    """Greedy replies and whether each ran into max_tokens.

    Args:
        model: a causal LM with `generate`, which computes no gradients.
        tokenizer: pads on the left.
        prompts: [N] full text, special tokens included.
        max_tokens: longest reply.
    """
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
    eos = int(tokenizer.eos_token_id)
    out = model.generate(
        **batch, max_new_tokens=max_tokens, do_sample=False, num_beams=1, repetition_penalty=1.0,
        eos_token_id=eos, pad_token_id=eos, top_k=None, top_p=None, temperature=None,
    )  # fmt: skip
    replies: list[tuple[str, bool]] = []
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        ended = eos in row
        replies.append((tokenizer.decode(row[: row.index(eos)] if ended else row), not ended))
    return replies


def _score(model: Any, tokenizer: Any, task: Task, rows: list[tuple[str, Any]]) -> Score:
    replies = greedy_replies(model, tokenizer, [prompt for prompt, _ in rows], task.max_tokens)
    earned = [
        task.reward(prompt=prompt, response=text, label=label, metadata={}, truncated=truncated)
        for (prompt, label), (text, truncated) in zip(rows, replies, strict=True)
    ]
    first = None
    if task.name == "addition":
        right = [first_integer_is(text, label) for (_, label), (text, _) in zip(rows, replies, strict=True)]
        first = sum(right) / len(rows)
    return Score(
        mean_reward=sum(earned) / len(rows),
        full_reward=sum(reward >= 0.999 for reward in earned) / len(rows),
        first_integer=first,
        examples=tuple(text for text, _ in replies[:3]),
    )


def _parse_adapters(values: Sequence[str]) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for value in values:
        name, _, directory = value.partition("=")
        if name not in TASKS or not (Path(directory) / "adapter_config.json").is_file():
            raise typer.BadParameter(
                f"{value!r}: write NAME=DIR with NAME one of {', '.join(TASKS)} and DIR a PEFT adapter directory"
            )
        adapters[name] = Path(directory)
    return adapters


def main(
    model: Annotated[Path, typer.Option(help="HF directory of the base model.")],
    storage: Annotated[Path, typer.Option(help="Storage root with the tasks' files.")],
    adapter: Annotated[list[str], typer.Option(help="TASK=DIR of a PEFT adapter; repeat it.")],
    json_file: Annotated[Path, typer.Option("--json", help="Where to write the result.")],
) -> None:
    """Compare base and adapters on held-out prompts."""
    adapters = _parse_adapters(adapter)
    started = time.monotonic()
    proofs = prove(model, storage, adapters)
    seconds = time.monotonic() - started
    result = {"required_gain": REQUIRED_GAIN, "seconds": seconds, "tasks": {p.task: asdict(p) for p in proofs}}
    json_file.write_text(json.dumps(result, indent=2) + "\n")
    for p in proofs:
        before, after = p.before, p.after
        line = f"{p.task:9} reward {before.mean_reward:.3f} -> {after.mean_reward:.3f}"
        line += f"  full {before.full_reward:.2f} -> {after.full_reward:.2f}"
        if before.first_integer is not None:
            line += f"  first integer right {before.first_integer:.2f} -> {after.first_integer:.2f}"
        typer.echo(f"{line}  {'ok' if p.proven else f'gain below {REQUIRED_GAIN}'}")
    typer.echo(f"{seconds:.1f} s, {proofs[0].prompts if proofs else 0} held-out prompts per task, greedy")
    if not proofs or not all(p.proven for p in proofs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
