"""The prompt groups of each optimizer step, on storage: `{run directory}/samples/step_N.jsonl`.

    header line  {"step", "time", "groups", "samples"}: the true counts
    one line per recorded group  {"index", "version", "prompt", "samples": [{"text", "reward", "advantage", ...}]}

Cut by the train task, written by the background writer, read by the HTTP layer. Bounded: the newest KEPT_STEPS steps
of a run, at most MOST_SAMPLES samples a step, texts cut at MOST_CHARACTERS. Imports no ray and no torch.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorafleet_runtime.types import PromptGroup

KEPT_STEPS = 50
MOST_SAMPLES = 64
MOST_CHARACTERS = 16_384

_FILE = re.compile(r"step_(\d+)\.jsonl")


Lines = list[dict[str, Any]]
"""The header and the recorded groups."""


def cut_samples(step: int, groups: Sequence[PromptGroup]) -> Lines:
    """What is written of a step. Holds nothing of the groups but that: no token ids and no log-probabilities.

    Args:
        step: the step that was just made, from 1.
        groups: what went into it; the first ones are taken, up to MOST_SAMPLES samples.
    """
    header = {
        "step": step,
        "time": time.time(),
        "groups": len(groups),
        "samples": sum(len(group.samples) for group in groups),
    }
    return [header, *(_group_line(group) for group in _first(groups))]


def write_samples(directory: Path, lines: Lines) -> None:
    """Write a step's file, whole or not at all, and delete those that are too old.

    Args:
        directory: the run's.
        lines: of `cut_samples`.

    Raises:
        OSError: the storage refuses.
    """
    step = lines[0]["step"]
    folder = directory / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".writing"
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    temporary.replace(folder / f"step_{step}.jsonl")
    for old in recorded_steps(directory)[:-KEPT_STEPS]:
        (folder / f"step_{old}.jsonl").unlink(missing_ok=True)


def recorded_steps(directory: Path) -> list[int]:
    """Steps whose samples are there, oldest first."""
    folder = directory / "samples"
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name)))


def read_samples(directory: Path, step: int | None) -> dict[str, Any] | None:
    """A step's header with its recorded groups under "prompts"; of the newest step when None. None: not recorded."""
    steps = recorded_steps(directory)
    wanted = step if step is not None else (steps[-1] if steps else None)
    if wanted is None or wanted not in steps:
        return None
    try:
        header, *groups = (directory / "samples" / f"step_{wanted}.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # a newer step has just pushed it out
        return None
    return {**json.loads(header), "prompts": [json.loads(line) for line in groups]}


def _first(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    kept: list[PromptGroup] = []
    for group in groups:
        if kept and sum(len(g.samples) for g in [*kept, group]) > MOST_SAMPLES:
            break
        kept.append(group)
    return kept


def _readable(text: str) -> str:
    """Cut, and without what UTF-8 has no word for."""
    return text[:MOST_CHARACTERS].encode(errors="replace").decode()


def _group_line(group: PromptGroup) -> dict[str, Any]:
    texts = group.texts or ("",) * len(group.samples)
    return {
        "index": group.index,
        "version": group.version.n,
        "prompt": _readable(group.prompt),
        "samples": [
            {
                "text": _readable(text),
                "reward": sample.reward,
                "advantage": sample.advantage,
                "truncated": sample.truncated,
                "tokens": len(sample.token_ids),
            }
            for sample, text in zip(group.samples[:MOST_SAMPLES], texts[:MOST_SAMPLES], strict=True)
        ],
    }
