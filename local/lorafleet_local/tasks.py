"""The demo's three tasks: prompts, held-out prompts, sizes, and the files that hold them.

Called by the demo, `prove` and `baseline`. Everything is drawn from fixed seeds: the files are the same on every
machine. No held-out prompt is ever trained on.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lorafleet_local import rewards

GROUP_SIZE = 8
"""Completions per prompt."""
HELD_OUT = 64
"""Held-out prompts per task."""
_TRAIN_SEED = 1000
_HELD_OUT_SEED = 999

_NAMES = (
    "Ann Bob Carl Dora Eve Finn Gus Hana Ivan Jane Kurt Lena Mark Nina Otto Paul Rosa Sam Tina Walt Amy Ben Cleo Dan "
    "Emma Fred Gina Hugo Iris Jack Kate Liam Maya Noah Olga Pete Ruth Seth Vera Zoe"
)
_WORDS = (
    "apple house river candle tiger window music bread garden winter silver dragon ocean forest school doctor coffee "
    "summer yellow rocket planet bridge camera pencil market island mirror cotton engine butter castle circus guitar "
    "hammer jacket kitten ladder monkey needle orange basket bottle carpet cherry cloud copper corner dinner doll "
    "donkey eagle farmer feather finger fish flower frog glass grass honey horse ice jungle key king lake lamp leaf "
    "lemon letter lion map milk moon mountain mouse night paper pearl piano pizza pony queen rabbit rain ring road "
    "robot rope rose salt sand ship shoe smoke snow soap song spoon star stone storm sugar sun table tea train tree "
    "valley village wall water wheel wind wolf wood wool"
)
NAMES = tuple(_NAMES.split())
WORDS = tuple(_WORDS.split())

Draw = Callable[[Random], tuple[str, Any]]
RewardFunction = Callable[..., float]


@dataclass(frozen=True, slots=True)
class Task:
    """One task and the sizes at which it learns in minutes on two CPU cores."""

    name: str
    reward: RewardFunction
    draw: Draw
    """Draws (prompt, label)."""
    rank: int
    steps: int
    prompts_per_step: int
    max_tokens: int

    @property
    def alpha(self) -> int:
        """Twice the rank: the adapter is scaled by 2."""
        return 2 * self.rank


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Where a task's prompts are, relative to the storage root."""

    train: str
    heldout: str


def chat(question: str) -> str:
    """A user turn and the opening of the assistant's, without a system prompt."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _draw_addition(random: Random) -> tuple[str, Any]:
    a, b = random.randint(1, 12), random.randint(1, 12)
    # The reply is begun for the model: continuing "7 + 12 =" is learnt in few steps, answering freely is not.
    return chat(f"{a} + {b} =") + f"{a} + {b} =", str(a + b)


def _draw_json(random: Random) -> tuple[str, Any]:
    name, age = random.choice(NAMES), random.randint(18, 80)
    return chat(f"JSON with keys name, age: {name}, {age}"), {"name": name, "age": age}


def _draw_sentence(random: Random) -> tuple[str, Any]:
    word = random.choice(WORDS)
    return chat(f"Short sentence with the word {word}."), word


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", rewards.addition, _draw_addition, rank=4, steps=15, prompts_per_step=8, max_tokens=5),
        Task("json", rewards.json_object, _draw_json, rank=8, steps=8, prompts_per_step=4, max_tokens=20),
        Task("sentence", rewards.sentence, _draw_sentence, rank=8, steps=18, prompts_per_step=4, max_tokens=12),
    )
}


def held_out_rows(task: Task) -> dict[str, Any]:
    """`HELD_OUT` distinct prompts and their labels."""
    random = Random(_HELD_OUT_SEED)
    rows: dict[str, Any] = {}
    while len(rows) < HELD_OUT:
        prompt, label = task.draw(random)
        rows.setdefault(prompt, label)
    return rows


def train_rows(task: Task) -> list[tuple[str, Any]]:
    """Every step's prompts in the order of training: distinct within a step, drawn again across steps."""
    random = Random(_TRAIN_SEED)
    held_out = held_out_rows(task)
    rows: list[tuple[str, Any]] = []
    for _ in range(task.steps):
        step: dict[str, Any] = {}
        while len(step) < task.prompts_per_step:
            prompt, label = task.draw(random)
            if prompt not in held_out:
                step.setdefault(prompt, label)
        rows.extend(step.items())
    return rows


def task_files(task: Task) -> TaskFiles:
    """The names of a task's files."""
    return TaskFiles(f"tasks/{task.name}/train.jsonl", f"tasks/{task.name}/heldout.jsonl")


def write_tasks(storage_root: Path) -> dict[str, TaskFiles]:
    """Write every task's files; safe to repeat, also while runs read them.

    Args:
        storage_root: root of the pool's storage.

    Returns:
        Files by task name; each row is {"prompt": str, "label": ...}.
    """
    written: dict[str, TaskFiles] = {}
    for name, task in TASKS.items():
        files = task_files(task)
        _write(storage_root / files.train, train_rows(task))
        _write(storage_root / files.heldout, held_out_rows(task).items())
        written[name] = files
    return written


def read_rows(path: Path) -> list[tuple[str, Any]]:
    """(prompt, label) of each row of one of these files."""
    return [(row["prompt"], row["label"]) for row in map(json.loads, path.read_text().splitlines())]


def _write(path: Path, rows: Iterable[tuple[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps({"prompt": p, "label": label}) + "\n" for p, label in rows))
    temporary.replace(path)
