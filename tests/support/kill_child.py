"""A trainer in a process that is killed: what the child does, and the moments inside its writes where it can be caught.

The parent (kills.py) forks children from a server that has imported this module, so that a restart costs no imports.
Everything that writes is the product's own: TrainerRank, its snapshots, and its checkpoints on the thread of `Saves`.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.storage import newest_step
from lorafleet_runtime.trainer import checkpoint, snapshot
from lorafleet_runtime.trainer.rank import TrainerRank
from lorafleet_runtime.trainer.saves import Saves
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    PromptGroup,
    Retention,
    RunFault,
    StepResult,
)

SEAMS = (
    "half of adapter_model.safetensors", "half of optimizer.safetensors", "half of snapshot", "sync of a file",
    "before the snapshot's rename", "before a rename", "after a rename", "while pruning",
)  # fmt: skip
"""Moments inside a write. A rename is that of a checkpoint into place, of an old one out of the way, or for pruning."""

INCARNATION = "1.1"


@dataclass(frozen=True)
class Catch:
    """Where the child stops to be killed."""

    seam: str
    nth: int
    """Times that it passes there before."""


@dataclass(frozen=True)
class Place:
    """Where a trainer works."""

    model: Path
    storage: Path
    node: Path
    """Its folder of snapshots; gone after the loss of a node."""


def serve(place: Place, requests: list[LoadRequest], catch: Catch | None, calls: Connection, marks: Connection) -> None:
    """Answer calls until the process is killed."""
    torch.set_num_threads(1)
    if catch is not None:
        _patch(catch, marks)
    trainer = _Trainer(place)
    calls.send([trainer.load(request) for request in requests])
    while True:
        name, arguments = calls.recv()
        calls.send(getattr(trainer, name)(*arguments))


class _Trainer:
    def __init__(self, place: Place) -> None:
        spec = {
            "baseModel": {"path": str(place.model), "dtype": "float32"},
            "slots": 4,
            "maxRank": 8,
            "trainer": {"deterministic": True},
        }
        pool = AdapterPoolSpec.model_validate(spec)
        self._rank = TrainerRank(pool, str(place.model), str(place.storage), snapshots=place.node)
        self._storage = place.storage
        self._saves = Saves()

    def load(self, request: LoadRequest) -> Loaded:
        newest = newest_step(self._storage / request.uid)
        return self._rank.load(replace(request, checkpoint=None if newest is None else str(newest)))

    def accumulate(self, groups: list[PromptGroup]) -> BatchResult:
        return self._rank.accumulate(groups)

    def step(self, uid: str, cursor: Cursor) -> StepResult | RunFault:
        return self._rank.step(uid, cursor, INCARNATION)

    def snapshotted(self, ticket: str) -> bool:
        return self._rank.snapshotted(ticket)

    def capture(self, uid: str, cursor: Cursor, partial: bool, score: float) -> str:
        kept = self._rank._slot(uid).spec.checkpoint
        save = self._rank.capture(uid, uid, cursor, partial, Retention(kept.keep, kept.keep_best, score))
        assert save is not None
        return self._saves.add(save.write)

    def saved(self, ticket: str) -> Artifact | None:
        return self._saves.result(ticket)

    def state(self, uid: str) -> dict[str, Any]:
        """What is compared bit for bit, as arrays: a tensor's memory would go with this process."""
        save = self._rank.capture(uid, uid, Cursor(), False, None)
        assert save is not None
        tensors = {"master": save.state.master, "exp_avg": save.state.exp_avg, "exp_avg_sq": save.state.exp_avg_sq}
        return {name: tensor.numpy() for name, tensor in (save.tensors | tensors).items()}


def _patch(catch: Catch, marks: Connection) -> None:
    """Stop for good at the seam; the parent sees the mark and kills."""
    passed = 0

    def at(seam: str) -> None:
        nonlocal passed
        if seam != catch.seam:
            return
        passed += 1
        if passed > catch.nth:
            marks.send(seam)
            time.sleep(60)

    def before(owner: Any, name: str, moment: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            moment(*args)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def half(_: object, path: Path) -> None:
        seam = "half of snapshot" if _of_snapshot(path) else f"half of {path.name}"
        if seam == catch.seam:
            path.write_bytes(os.urandom(512))
            at(seam)

    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        at("before a rename")
        result = rename(path, target)
        at("after a rename")
        return result

    before(checkpoint, "save_file", half)
    before(snapshot, "save_file", half)
    before(os, "fsync", lambda _: at("sync of a file"))
    before(Path, "replace", lambda *_: at("before the snapshot's rename"))
    before(shutil, "rmtree", lambda path, *_: None if _of_snapshot(Path(path) / "file") else at("while pruning"))
    Path.rename = renamed  # type: ignore[method-assign, assignment]


def _of_snapshot(path: Path) -> bool:
    """Whether a file is one that the snapshots' thread writes."""
    return path.parent.name.startswith(".writing-")
