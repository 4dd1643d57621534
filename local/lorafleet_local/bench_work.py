"""The training work of `make bench-trainer`: prompt groups with drawn tokens, in the demo's sizes or any other.

Called by bench_case.py and bench_peft.py, each in a process of its own; the same arguments give the same groups.
"""

import time
from dataclasses import replace
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from lorafleet_local.tasks import GROUP_SIZE, TASKS, Task, train_rows
from lorafleet_runtime.types import PromptGroup, Sample, VersionId

VOCAB = 49_152
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0
TIS_CAP = 2.0


def make_group(uid: str, prompt: tuple[int, ...], lengths: tuple[int, ...], seed: int) -> PromptGroup:
    """A group whose responses have these lengths; the log-probabilities are of the size that a sampler reports."""
    random = Random(f"{uid}:{seed}")
    samples = tuple(
        Sample(
            tuple(random.randrange(VOCAB) for _ in range(n)), tuple(random.gauss(-8.0, 1.0) for _ in range(n)), 0.0,
            random.gauss(0.0, 1.0), False,
        )
        for n in lengths
    )  # fmt: skip
    return PromptGroup(uid, VersionId(uid, "1.1", 1), seed, prompt, samples)


def drawn_group(uid: str, prompt: int, lengths: tuple[int, ...], seed: int) -> PromptGroup:
    """A group with a prompt of `prompt` drawn tokens."""
    random = Random(f"prompt:{uid}:{seed}")
    return make_group(uid, tuple(random.randrange(VOCAB) for _ in range(prompt)), lengths, seed)


def task_groups(model: Path, task: Task, step: int) -> list[PromptGroup]:
    """One step of a demo task: its prompts, and responses of half to all of its longest."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = train_rows(task)[step * task.prompts_per_step : (step + 1) * task.prompts_per_step]
    random = Random(f"{task.name}:{step}")
    groups = []
    for i, (prompt, _) in enumerate(rows):
        lengths = tuple(random.randint((task.max_tokens + 1) // 2, task.max_tokens) for _ in range(GROUP_SIZE))
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        groups.append(make_group(task.name, ids, lengths, step * task.prompts_per_step + i))
    return groups


def demo_step(model: Path, step: int) -> dict[str, list[PromptGroup]]:
    """The groups of one step of each of the demo's runs, by task."""
    return {name: task_groups(model, task, step) for name, task in TASKS.items()}


def plain(groups: list[PromptGroup]) -> list[PromptGroup]:
    """Every sample as a group of its own, so that no prompt is shared."""
    return [replace(group, samples=(sample,)) for group in groups for sample in group.samples]


def count_tokens(groups: list[PromptGroup]) -> int:
    """Tokens of the data: each prompt once per group, and every response. Padding and repeated prompts are no work."""
    return sum(len(g.prompt_ids) + sum(len(s.token_ids) for s in g.samples) for g in groups)


class Clock:
    """Wall and CPU seconds of this process (all its threads) since it was made."""

    def __init__(self) -> None:
        """Start."""
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, float]:
        """(wall seconds, CPU seconds)."""
        return time.monotonic() - self._wall, time.process_time() - self._cpu


def resident_bytes(field: str = "VmHWM") -> int:
    """Resident memory of this process: VmHWM is its peak, VmRSS what it holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Let VmHWM start again from what is held now: loading the model has a peak of its own."""
    Path("/proc/self/clear_refs").write_text("5")
