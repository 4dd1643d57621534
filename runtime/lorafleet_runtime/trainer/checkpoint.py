"""Writes and prunes a run's checkpoints; restore.py reads them, `storage` finds them.

Called by rank.py. A checkpoint is a directory step_N that appears by rename, whole or not at all; it holds a servable
PEFT adapter, the optimizer's tensors and state.json. Nothing here knows slots or the model: a `Save` holds copies, so
that it can be written on another thread while its run trains on.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import (
    ASIDE,
    CONFIG_FILE,
    DAMAGED,
    OPTIMIZER_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    checkpoints,
    is_whole,
    step_directories,
    sync_directory,
)
from lorafleet_runtime.trainer.record import PendingRecord
from lorafleet_runtime.trainer.record_files import clean_pending
from lorafleet_runtime.trainer.record_moves import FOLDER
from lorafleet_runtime.types import Artifact, Cursor, PolicySums

log = logging.getLogger(__name__)

FORMAT = 1

DAMAGED_KEPT = 2
"""Checkpoints that were set aside as damaged and stay, as evidence."""

PARTIAL_GRAD = "partial_grad"
"""Name of a partial gradient in optimizer.safetensors."""


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
class Partial:
    """What a run has accumulated since its last step."""

    grad: Tensor
    """[data-parallel ranks, tensor-parallel ranks, elements]: what each has of the sum, in the canonical layout."""
    denominator: int
    """Samples or tokens in the sums, by lossReduction."""
    groups: int
    """Prompt groups in the sums; the cursor counts them as consumed."""
    reward_sum: float = 0.0
    """Over the samples of these groups."""
    samples: int = 0
    policy: PolicySums = field(default_factory=PolicySums)
    """Over their response tokens."""


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
    """[elements] in the canonical layout, as the moments."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    partial: Partial | None = None
    """Only in a checkpoint taken at a suspension or a stop."""
    score: float | None = None
    """What checkpoint.keepBest compares."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint on its way to the disk; all tensors are its own, so that it is written while the slot goes on."""

    directory: Path
    """The run's own."""
    identity: Identity
    state: TrainState
    tensors: dict[str, Tensor]
    """Of adapter_model.safetensors."""
    config: dict[str, Any]
    """Of adapter_config.json."""
    keep: int
    """Newest checkpoints that stay."""
    keep_best: bool = False
    """The one with the best score stays too."""
    pending: PendingRecord | None = None
    """With `state.partial` of a run that records its steps: the groups of that gradient."""

    def write(self) -> Artifact:
        """Write `directory`/step_N durably, then prune. Saves of one directory come one after the other.

        Without a score of its own it keeps that of a step_N that is there already.

        Raises:
            RunError: StorageError; what was there before is there still.
        """
        final = self.directory / f"step_{self.state.step}"
        temporary = self.directory / f".tmp-{final.name}-{uuid.uuid4().hex}"
        if self.pending is not None:  # first: a checkpoint with a gradient always has the record of its groups
            self.pending.write()
        state = self.state if self.state.score is not None else replace(self.state, score=_score(final))
        try:
            temporary.mkdir(parents=True)
            save_file(self.tensors, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
            (temporary / CONFIG_FILE).write_text(json.dumps(self.config, indent=2) + "\n")
            save_file(_tensors(state), temporary / OPTIMIZER_FILE)
            files = {p.name: describe(p) for p in sorted(temporary.iterdir())}
            text = json.dumps(_state_json(self.identity, state, files), indent=2) + "\n"
            (temporary / STATE_FILE).write_text(text)
            _sync(temporary)
            _put(temporary, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            text = f"checkpoint {final} cannot be written ({error}); free space or fix the storage, then run it again"
            raise RunError(reasons.STORAGE_ERROR, text) from error
        prune(self.directory, self.keep, self.keep_best)
        return Artifact(str(final), state.step, files[WEIGHTS_FILE]["sha256"])


def prune(directory: Path, keep: int, keep_best: bool = False) -> None:
    """Delete all but the newest `keep` checkpoints, what interrupted writes left, damaged checkpoints but for those set
    aside last, and records of unfinished steps that only deleted ones needed. Failures are left for later.

    Args:
        directory: of the run.
        keep: newest checkpoints that stay.
        keep_best: the one with the largest score stays too, of equal ones the newer.
    """
    try:
        whole = checkpoints(directory)
        kept = whole[-keep:]
        paths = {path for _, path in kept}
        if keep_best:
            scored = [(score, step, path) for step, path in whole if (score := _score(path)) is not None]
            paths.update(path for _, _, path in sorted(scored, key=lambda item: item[:2])[-1:])
        for step, path in step_directories(directory):
            if path in paths or not kept or step > kept[-1][0]:
                continue
            doomed = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex}")  # half deleted it must not look complete
            path.rename(doomed)
        for path in directory.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True)
        clean_pending(directory / FOLDER)
        for path in sorted(directory.glob(f"{DAMAGED}*"), key=_set_aside_at)[:-DAMAGED_KEPT]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log.info("%s is removed: it is damaged, and %d that were set aside later stay", path, DAMAGED_KEPT)
    except OSError as error:
        log.warning("old checkpoints in %s stay for now (%s)", directory, error)


def _set_aside_at(path: Path) -> int:
    """Nanoseconds: the last part of the name, which a copy of the storage keeps."""
    time = path.name.rpartition("-")[2]
    return int(time) if time.isdecimal() else 0


def _score(path: Path) -> float | None:
    """What state.json says; None where there is none."""
    try:
        score = json.loads((path / STATE_FILE).read_text()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score if isinstance(score, float) and math.isfinite(score) else None


def _state_json(identity: Identity, state: TrainState, files: dict[str, Any]) -> dict[str, Any]:
    stored: dict[str, Any] = {
        "format": FORMAT,
        "step": state.step,
        "target_step": state.target_step,
        "cursor": asdict(state.cursor),
        "incarnation": state.incarnation,
        "use_rslora": state.use_rslora,
        "identity": asdict(identity),
        "files": files,
    }
    if state.score is not None:
        stored["score"] = float(state.score)
    if (partial := state.partial) is not None:
        stored["partial"] = {
            "denominator": partial.denominator,
            "groups": partial.groups,
            "reward_sum": partial.reward_sum,
            "samples": partial.samples,
            "policy": asdict(partial.policy),
        }
    return stored


def _tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = {"master": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    if state.partial is not None:
        tensors[PARTIAL_GRAD] = state.partial.grad
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", copy=True).contiguous()


def describe(path: Path) -> dict[str, Any]:
    """What state.json says of a file: its size and SHA-256."""
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
    elif _same(temporary, final):
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        _replace(temporary, final)
    sync_directory(final.parent)


def _same(temporary: Path, final: Path) -> bool:
    """Whether both say the same (state.json has every file's digest), and the old one's files are what it says."""
    state = (temporary / STATE_FILE).read_bytes()
    files = json.loads(state)["files"]
    return (final / STATE_FILE).read_bytes() == state and all(describe(final / n) == files[n] for n in files)


def _replace(temporary: Path, final: Path) -> None:
    aside = final.with_name(f"{ASIDE}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_directory(directory)


def same_layout(state: TrainState, like: Tensor) -> bool:
    """Whether the stored tensors fit an adapter's flat buffer [elements]."""
    sums = state.partial.grad.flatten(0, 1) if state.partial else ()
    tensors = [state.master, state.exp_avg, state.exp_avg_sq, *sums]
    return all(t.shape == like.shape and t.dtype == like.dtype for t in tensors)


def is_finite(state: TrainState) -> bool:
    """Whether every stored value is finite."""
    tensors = [state.master, state.exp_avg, state.exp_avg_sq, *([state.partial.grad] if state.partial else [])]
    return all(bool(torch.isfinite(t).all()) for t in tensors)
