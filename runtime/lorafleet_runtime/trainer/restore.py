"""Finds the state that a run goes on from: its newest checkpoint or snapshot that belongs to it and is undamaged.

Called by rank.py at a load; snapshot.py asks whose a file is. What is damaged is set aside and told of, what belongs to
something else is refused by name. Knows neither slots nor the model.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Damaged, RunError
from lorafleet_runtime.storage import DAMAGED, OPTIMIZER_FILE, STATE_FILE, step_directories, step_of, sync_directory
from lorafleet_runtime.trainer.checkpoint import FORMAT, PARTIAL_GRAD, Identity, Partial, TrainState, describe
from lorafleet_runtime.types import Cursor, PolicySums

_FIXES = {
    "uid": "move it out of this run's directory; another run's adapter is used through initFrom",
    "base_digest": "give the pool the base model that it was trained on, or start a new run",
    "data_digest": "restore the data file, or start a new run; initFrom takes this adapter",
}
_FIX = "restore the setting, or start a new run"


def newest_state(
    newest: Path | None, snapshot: TrainState | None, identity: Identity
) -> tuple[TrainState | None, tuple[str, ...]]:
    """The newest state to go on from; of one step, the checkpoint goes before the snapshot.

    A checkpoint whose files are damaged must not strand a run that has an older one, nor be passed over in silence: it
    is set aside as .damaged-step_N-TIME, where neither a later load nor `prune` takes it for one, and told of.

    Args:
        newest: the run's newest step_N, whole or not; None where there is none.
        snapshot: of the run, or None.
        identity: of the run.

    Returns:
        (the state, or None where the run has neither; what was passed over and why).

    Raises:
        Damaged: every checkpoint is (starting afresh would be silent loss: nothing is set aside then).
        RunError: CheckpointMismatch naming the field that differs; StorageError when storage cannot be read.
    """
    state, damaged = snapshot, list[tuple[Path, str]]()
    for path in [] if newest is None else _candidates(newest):
        if snapshot is not None and snapshot.step > step_of(path) and not _is_older(snapshot, path):
            break
        try:
            state = read_checkpoint(path, identity)
            break
        except Damaged as error:
            damaged.append((path, error.message))
    if state is None and damaged:
        text, where = "; ".join(message for _, message in damaged), damaged[0][0].parent
        fix = f"Restore the files of one of them, or remove {where} to start afresh; then run it again"
        raise Damaged(reasons.STORAGE_ERROR, f"{text}. {fix}")
    return state, tuple(f"{message}; set aside as {_set_aside(path).name}" for path, message in damaged)


def _is_older(snapshot: TrainState, path: Path) -> bool:
    """Whether the checkpoint is of a later registration, one that had gone on without this node's snapshot."""
    try:
        made_by = json.loads((path / STATE_FILE).read_text())["incarnation"]
        return _order(snapshot.incarnation) < _order(made_by)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False  # nothing to be read there is no reason to go back
    except OSError as error:
        text = f"checkpoint {path} cannot be read ({error}); fix the storage, or move it away to go on without it"
        raise RunError(reasons.STORAGE_ERROR, text) from error


def _order(incarnation: str) -> tuple[int, ...]:
    return tuple(int(number) for number in incarnation.split(".")) if incarnation else ()


def _candidates(newest: Path) -> list[Path]:
    """Checkpoints from `newest` down, whole or not."""
    found = [path for step, path in reversed(step_directories(newest.parent)) if step <= step_of(newest)]
    return found if newest in found else [newest, *found]


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{DAMAGED}step_{step_of(path)}-{time.time_ns()}")
    try:
        if path.exists():
            path.rename(aside)
            sync_directory(path.parent)
    except OSError as error:
        text = f"checkpoint {path} is damaged and cannot be set aside ({error}); fix the storage, then run it again"
        raise RunError(reasons.STORAGE_ERROR, text) from error
    return aside


def read_checkpoint(path: Path, identity: Identity) -> TrainState:
    """Load a checkpoint that belongs to `identity`.

    Raises:
        Damaged: files are missing, cut or changed.
        RunError: CheckpointMismatch naming the field that differs; StorageError when storage cannot be read.
    """
    try:
        stored = json.loads((path / STATE_FILE).read_text())
        check_identity(path, stored, identity)
        if wrong := [name for name, about in stored["files"].items() if not _is_as_written(path / name, about)]:
            raise ValueError(f"{', '.join(wrong)}: not what state.json says")
        tensors = load_file(path / OPTIMIZER_FILE)
        cursor = Cursor(stored["cursor"]["low"], tuple(stored["cursor"]["consumed"]))
        return TrainState(
            stored["step"], stored["target_step"], cursor, stored["incarnation"], stored["use_rslora"],
            tensors["master"], tensors["exp_avg"], tensors["exp_avg_sq"], _partial(stored, tensors),
            stored.get("score"),
        )  # fmt: skip
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise Damaged(reasons.STORAGE_ERROR, f"checkpoint {path} is damaged ({error})") from error
    except OSError as error:  # it may be whole: going on from an older one would lose steps for a passing fault
        text = f"checkpoint {path} cannot be read ({error}); fix the storage, or move it away to go on without it"
        raise RunError(reasons.STORAGE_ERROR, text) from error


def _is_as_written(path: Path, about: dict[str, Any]) -> bool:
    try:
        return describe(path) == about
    except FileNotFoundError:
        return False


def _partial(stored: dict[str, Any], tensors: dict[str, Tensor]) -> Partial | None:
    about, grad = stored.get("partial"), tensors.get(PARTIAL_GRAD)
    if about is None and grad is None:
        return None
    if about is None or grad is None:
        raise ValueError("a partial gradient without its counts, or counts without the gradient")
    policy = PolicySums(**about.get("policy", {}))
    partial = Partial(grad, about["denominator"], about["groups"], about["reward_sum"], about["samples"], policy)
    if grad.dim() != 3 or grad.shape[2] != tensors["master"].numel() or partial.groups < 1 or partial.denominator < 0:
        raise ValueError(f"a partial gradient {list(grad.shape)} of {partial.groups} groups")
    return partial


def check_identity(path: Path, stored: dict[str, Any], identity: Identity) -> None:
    """Refuse what belongs to another run, base model or data file.

    Raises:
        RunError: CheckpointMismatch naming the field that differs.
    """
    if stored["format"] != FORMAT:
        raise RunError(
            reasons.CHECKPOINT_MISMATCH, f"checkpoint {path}: format is {stored['format']}, this version reads {FORMAT}"
        )
    wanted = json.loads(json.dumps(asdict(identity)))
    for field, value in wanted.items():
        found = stored["identity"].get(field)
        if found != value:
            raise RunError(
                reasons.CHECKPOINT_MISMATCH,
                f"checkpoint {path}: {field} is {found!r}, the run's is {value!r}; {_FIXES.get(field, _FIX)}",
            )
