"""Reads what a run starts from: its snapshot, its checkpoints, or the adapter that it is to start with.

Called by rank.py on rank 0: by `prepare` beside the trainer's other calls, for storage may hang, and by a `load` that
nobody has prepared. Everything that a load reads of the storage is read here. It touches no slot.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.storage import ASIDE, inside, latest_checkpoint, run_directory, step_of
from lorafleet_runtime.trainer import checkpoint as checkpoints
from lorafleet_runtime.trainer.checkpoint import Identity, TrainState
from lorafleet_runtime.trainer.initial import init_fresh, load_peft
from lorafleet_runtime.trainer.layout import flat_layout
from lorafleet_runtime.trainer.record import Unfinished, read_unfinished
from lorafleet_runtime.trainer.record_moves import FOLDER
from lorafleet_runtime.trainer.restore import newest_state
from lorafleet_runtime.trainer.shape import ModelShape
from lorafleet_runtime.trainer.snapshot import Snapshots
from lorafleet_runtime.trainer.warm_start import init_directory, read_peft_config
from lorafleet_runtime.types import Cursor, LoadRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run starts from; its tensors are on the host."""

    state: TrainState
    passed_over: tuple[str, ...] = ()
    """Checkpoints that are damaged, and what became of them."""
    durable_step: int | None = None
    """Of the newest whole step_N that the storage has now; None: it has none."""
    unfinished: Unfinished | None = None
    """With `state.partial` of a run that records its steps."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads for the runs of one trainer. For any thread.

    Args:
        storage: shared storage.
        snapshots: of the trainer.
        shape: of the base model.
        dtype: of masters and moments.
    """

    storage: Path
    snapshots: Snapshots
    shape: ModelShape
    dtype: torch.dtype

    def read(self, request: LoadRequest, spec: AdapterRunSpec, identity: Identity) -> Prepared:
        """What the run starts from: its newest state, or initFrom, or fresh.

        Raises:
            RunError: the storage cannot be read, or what it has cannot be trained here.
        """
        state, passed_over = self._state(request, spec, identity)
        for text in passed_over:  # also here: the answer may be lost, and the next reader finds them set aside already
            log.warning("run %s: %s", request.uid, text)
        directory = run_directory(self.storage, request.namespace, request.name, request.uid)
        unfinished = None
        if spec.record_steps and state.partial is not None:
            unfinished = read_unfinished(request.uid, directory / FOLDER, state.step + 1, state.partial.groups)
        return Prepared(state, passed_over, _durable_step(directory), unfinished)

    def _state(
        self, request: LoadRequest, spec: AdapterRunSpec, identity: Identity
    ) -> tuple[TrainState, tuple[str, ...]]:
        layout = flat_layout(self.shape, spec.rank, identity.target_modules)
        stored, passed_over = self.snapshots.read(identity), tuple[str, ...]()
        if request.checkpoint is not None:
            stored, passed_over = newest_state(self._inside(request.checkpoint), stored, identity)
        if stored is not None:
            _check_stored(stored, (layout[-1].end,), self.dtype)
            return stored, passed_over
        if spec.init_from is not None:
            source = init_directory(spec.init_from, self.storage)
            rslora = read_peft_config(source, spec.rank, spec.lora_alpha)
            master = load_peft(layout, source)
        else:
            rslora, master = False, init_fresh(layout, spec.init_scheme, spec.init_seed)
        zero = torch.zeros_like(master)
        return TrainState(0, request.target_step, Cursor(), "", rslora, master, zero, zero), passed_over

    def _inside(self, path: str) -> Path:
        try:
            return inside(self.storage, path)
        except ValueError as error:
            raise RunError(reasons.STORAGE_ERROR, f"checkpoint: {path!r} {error}") from error


def _durable_step(directory: Path) -> int | None:
    try:
        newest = latest_checkpoint(directory)
    except OSError:
        return None  # what cannot be seen is not relied on
    return step_of(newest) if newest is not None and not newest.name.startswith(ASIDE) else None


def _check_stored(state: TrainState, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not checkpoints.same_layout(state, torch.empty(shape, dtype=dtype, device="meta")):
        text = f"the state of step {state.step}: its tensors do not fit this base model; start a new run"
        raise RunError(reasons.CHECKPOINT_MISMATCH, text)
    if not checkpoints.is_finite(state):
        text = f"the state of step {state.step} holds values that are not finite; start a new run"
        raise RunError(reasons.NON_FINITE, text)
