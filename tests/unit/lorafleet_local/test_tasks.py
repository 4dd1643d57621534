"""The demo's task files: sizes, shapes, and held-out prompts that are never trained on."""

import json
from pathlib import Path

import pytest
import yaml

from lorafleet_local.paths import repo_root
from lorafleet_local.tasks import TASKS, read_rows, task_files, train_rows, write_tasks

SIZES = {"addition": (120, 8, 5), "json": (32, 4, 20), "sentence": (72, 4, 12)}


@pytest.mark.parametrize("name", TASKS)
def test_files_hold_every_step_and_64_disjoint_held_out_prompts(name: str, tmp_path: Path) -> None:
    files = write_tasks(tmp_path)[name]
    train, held_out = read_rows(tmp_path / files.train), read_rows(tmp_path / files.heldout)
    rows, per_step, max_tokens = SIZES[name]
    assert len(train) == rows and len({prompt for prompt, _ in held_out}) == 64
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in held_out}
    assert (TASKS[name].prompts_per_step, TASKS[name].max_tokens) == (per_step, max_tokens)
    for start in range(0, rows, per_step):
        assert len({prompt for prompt, _ in train[start : start + per_step]}) == per_step


def test_files_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_tasks(first)
    write_tasks(second)
    write_tasks(second)
    for task in TASKS.values():
        files = task_files(task)
        for name in (files.train, files.heldout):
            assert (first / name).read_bytes() == (second / name).read_bytes()


def test_rows_are_what_a_run_reads(tmp_path: Path) -> None:
    files = write_tasks(tmp_path)
    row = json.loads((tmp_path / files["json"].train).read_text().splitlines()[0])
    name, age = row["label"]["name"], row["label"]["age"]
    question = f"JSON with keys name, age: {name}, {age}"
    assert row["prompt"] == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def test_an_addition_prompt_begins_the_reply(tmp_path: Path) -> None:
    for prompt, label in train_rows(TASKS["addition"]):
        question, _, reply = prompt.partition("<|im_end|>\n<|im_start|>assistant\n")
        a, b = reply.removesuffix(" =").split(" + ")
        assert question == f"<|im_start|>user\n{reply}" and int(a) + int(b) == int(label)
        assert 1 <= int(a) <= 12 and 1 <= int(b) <= 12


@pytest.mark.parametrize("name", TASKS)
def test_the_example_manifest_trains_the_task_as_it_is_written_here(name: str) -> None:
    task = TASKS[name]
    spec = yaml.safe_load((repo_root() / "manifests" / "examples" / f"{name}.yaml").read_text())["spec"]
    assert spec["customRmPath"] == f"{task.reward.__module__}.{task.reward.__name__}"
    assert (spec["rank"], spec["alpha"], spec["numStep"]) == (task.rank, task.alpha, task.steps)
    assert (spec["rolloutBatchSize"], spec["sampling"]["maxTokens"]) == (task.prompts_per_step, task.max_tokens)
    assert spec["data"] == task_files(task).train
