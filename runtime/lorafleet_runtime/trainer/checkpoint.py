"""Writes, loads and prunes a run's checkpoints; `storage` finds them.

Called by rank.py. A checkpoint is a directory step_N that appears by rename, whole or not at all; it holds a servable
PEFT adapter, the optimizer's tensors and state.json. Nothing here knows slots or the model.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import (
    ASIDE,
    OPTIMIZER_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    checkpoints,
    is_whole,
    step_directories,
)
from lorafleet_runtime.types import Artifact, Cursor

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint belongs to; every field must match on load."""

    uid: str
    base_digest: str
    data_digest: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainState:
    """What a run needs to go on as if it had never stopped."""

    step: int
    target_step: int
    """Horizon of the learning-rate schedule, fixed when the run was first loaded."""
    cursor: Cursor
    incarnation: str
    """Of the registration that made the step."""
    use_rslora: bool
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def write_checkpoint(
    directory: Path, identity: Identity, state: TrainState, write_adapter: Callable[[Path], None]
) -> Artifact:
    """Write `directory`/step_N durably.

    Args:
        directory: the run's own.
        identity: what it belongs to.
        state: what to continue from.
        write_adapter: writes the PEFT files into the directory it is given.

    Raises:
        RunError: StorageError; nothing new is left behind.
    """
    final = directory / f"step_{state.step}"
    temporary = directory / f".tmp-{final.name}-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        write_adapter(temporary)
        tensors = {"master": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, temporary / OPTIMIZER_FILE)
        files = {p.name: _describe(p) for p in sorted(temporary.iterdir())}
        (temporary / STATE_FILE).write_text(json.dumps(_state_json(identity, state, files), indent=2) + "\n")
        _sync(temporary)
        _put(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        text = f"checkpoint {final} cannot be written ({error}); free space or fix the storage, then run it again"
        raise RunError(reasons.STORAGE_ERROR, text) from error
    return Artifact(str(final), state.step, files[WEIGHTS_FILE]["sha256"])


def read_checkpoint(path: Path, identity: Identity) -> TrainState:
    """Load a checkpoint that belongs to `identity`.

    Raises:
        RunError: CheckpointMismatch naming the field that differs; StorageError when files are missing or damaged.
    """
    try:
        stored = json.loads((path / STATE_FILE).read_text())
        check_identity(path, stored, identity)
        for name, about in stored["files"].items():
            if _describe(path / name) != about:
                raise OSError(f"{name} is not what state.json says; the file is damaged")
        tensors = load_file(path / OPTIMIZER_FILE)
        cursor = Cursor(stored["cursor"]["low"], tuple(stored["cursor"]["consumed"]))
        return TrainState(
            stored["step"], stored["target_step"], cursor, stored["incarnation"], stored["use_rslora"],
            tensors["master"], tensors["exp_avg"], tensors["exp_avg_sq"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        text = f"checkpoint {path} cannot be read ({error}); remove it to go on from the one before"
        raise RunError(reasons.STORAGE_ERROR, text) from error


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what interrupted writes left. Failures are left for later."""
    kept = checkpoints(directory)[-keep:]
    paths = {path for _, path in kept}
    for step, path in step_directories(directory):
        if path in paths or not kept or step > kept[-1][0]:
            continue
        doomed = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex}")  # a half-deleted one must not look complete
        try:
            path.rename(doomed)
        except OSError:
            continue
    for path in directory.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _state_json(identity: Identity, state: TrainState, files: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.step,
        "target_step": state.target_step,
        "cursor": asdict(state.cursor),
        "incarnation": state.incarnation,
        "use_rslora": state.use_rslora,
        "identity": asdict(identity),
        "files": files,
    }


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
                f"checkpoint {path}: {field} is {found!r}, the run's is {value!r}; restore it, or start a new run",
            )


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _put(temporary: Path, final: Path) -> None:
    """Rename into place.

    A step_N that is there already (written again after a restart) stays when it is the same, and is set aside until the
    new one is in place when it is not: at every moment `storage.checkpoints` finds one of the two.
    """
    if not final.exists():
        temporary.rename(final)
    elif not is_whole(final):
        final.rename(final.with_name(f".tmp-{final.name}-{uuid.uuid4().hex}"))
        temporary.rename(final)
    elif (final / STATE_FILE).read_bytes() == (temporary / STATE_FILE).read_bytes():  # it has every file's digest
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        _replace(temporary, final)
    _sync_directory(final.parent)


def _replace(temporary: Path, final: Path) -> None:
    aside = final.with_name(f"{ASIDE}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    _sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def same_layout(state: TrainState, like: Tensor) -> bool:
    """Whether the stored tensors fit an adapter's flat buffer."""
    return all(t.shape == like.shape and t.dtype == like.dtype for t in (state.master, state.exp_avg, state.exp_avg_sq))


def is_finite(state: TrainState) -> bool:
    """Whether every stored value is finite."""
    return all(bool(torch.isfinite(t).all()) for t in (state.master, state.exp_avg, state.exp_avg_sq))
