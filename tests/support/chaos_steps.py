"""What the trainer really did, from the record that tests/chaos/seam keeps, and the rule that no step is trained twice.

Called by support.chaos.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of one run in one trainer process."""

    pid: int
    time: float
    """Unix seconds."""
    uid: str
    step: int
    before: str
    """SHA-256 of the fp32 masters before the step."""
    after: str
    """The same after it."""


def read_steps(folder: Path) -> list[Step]:
    """Every step so far, in the order in which they were made."""
    path = folder / "steps.jsonl"
    if not path.exists():
        return []
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()]


def artifact_digest(artifact: dict[str, Any]) -> str:
    """SHA-256 of the masters in a final checkpoint."""
    masters = load_file(Path(artifact["path"]) / "optimizer.safetensors")["master"]
    return hashlib.sha256(masters.tobytes()).hexdigest()


def repeated_steps(steps: Sequence[Step], target: int, final: str) -> list[Step]:
    """The steps that are not among those that made the final weights.

    The rule: going back from the masters in the final checkpoint, step n is the newest record of number n whose masters
    after the step are those before step n + 1. So 1 to `target` are all there, each once, and each started where the
    one before ended. Whatever is left was undone; it must be the work of a process that did not live to go on with it.

    Args:
        steps: of one run, oldest first.
        target: the run's targetStep.
        final: digest of the masters in its final checkpoint.

    Raises:
        AssertionError: a step is missing, or trained on weights other than those that its predecessor left.
    """
    chain: list[Step] = []
    place, wanted = len(steps), final
    for number in range(target, 0, -1):
        fits = [i for i in range(place) if steps[i].step == number and steps[i].after == wanted]
        made = [(s.step, s.pid) for s in steps]
        assert fits, f"no record of step {number} ends with the weights that step {number + 1} began with: {made}"
        place = fits[-1]
        chain.append(steps[place])
        wanted = chain[-1].before
    undone = [s for s in steps if s not in chain]
    for lost in undone:
        heir = next(s for s in chain if s.step == lost.step)
        assert heir.pid != lost.pid, f"process {lost.pid} made step {lost.step} twice"
        assert heir.time > lost.time
    return undone
