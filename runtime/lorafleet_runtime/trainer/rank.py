"""One trainer rank: the frozen base model, a slot per run, and the calls of docs/interfaces.md section 6.

Called by the loop through actor.py, one call at a time, with the same arguments on every rank. A fault of one run is a
value or a RunError, the same on every rank, and changes nothing of another run; any other exception means that this
trainer's accumulators cannot be trusted, and every later call that would use them is refused. Only rank 0 reads and
writes files.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import ConfigError, RunError, RuntimeFault
from lorafleet_runtime.storage import run_directory
from lorafleet_runtime.trainer.admit import check_load
from lorafleet_runtime.trainer.checkpoint import Identity, Save, TrainState
from lorafleet_runtime.trainer.export import flat_export, peft_config, peft_tensors
from lorafleet_runtime.trainer.layout import PROJECTIONS, flat_layout
from lorafleet_runtime.trainer.lora import SlotAdapter
from lorafleet_runtime.trainer.losses.policy import LossParams
from lorafleet_runtime.trainer.model import BaseModel
from lorafleet_runtime.trainer.optimizer import SlotOptimizer
from lorafleet_runtime.trainer.parallel import Ranks
from lorafleet_runtime.trainer.passes import admit, run_passes
from lorafleet_runtime.trainer.prepare import Prepared, Reader
from lorafleet_runtime.trainer.record import StepRecorder
from lorafleet_runtime.trainer.record_files import Start, StepFigures, describe_run
from lorafleet_runtime.trainer.record_moves import FOLDER, Defer, Outbox, at_once, clear_of_other_boots, forward
from lorafleet_runtime.trainer.slot import Slot, count
from lorafleet_runtime.trainer.snapshot import Snapshots
from lorafleet_runtime.trainer.weights import common_digest
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    Manifest,
    PromptGroup,
    Retention,
    RunFault,
    StepResult,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainerRank:
    """One rank of a trainer.

    Args:
        pool_spec: of the pool; baseModel.dtype is the compute type.
        model_path: directory with the base model's HF files.
        storage_root: shared storage; relative paths in LoadRequests are taken from here.
        dtype: compute type instead of the pool's; tests use float64.
        snapshots: folder on rank 0's node for the state after each step; None keeps none.
        ranks: of the trainer, as the pool's trainer asks for; None starts a single one.
        defer: queue of the thread that writes checkpoints, which moves records to storage.

    Raises:
        ConfigError: the pool asks for what this trainer does not do, or the model's files do not fit.
    """

    def __init__(
        self,
        pool_spec: AdapterPoolSpec,
        model_path: str,
        storage_root: str,
        dtype: torch.dtype | None = None,
        snapshots: Path | None = None,
        ranks: Ranks | None = None,
        *,
        defer: Defer = at_once,
    ) -> None:
        """Load the base model."""
        trainer = pool_spec.trainer
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._ranks = ranks = ranks or Ranks.start(0, 1, 1, None, device)
        if (trainer.data_parallel, trainer.tensor_parallel) != (ranks.dp, ranks.tp):
            raise ConfigError(
                f"trainer: dataParallel {trainer.data_parallel} x tensorParallel {trainer.tensor_parallel} ranks are "
                f"asked for, {ranks.dp} x {ranks.tp} were started"
            )
        self._pool = pool_spec
        self._storage = Path(storage_root)
        self._base_name = pool_spec.base_model.name or pool_spec.base_model.path or model_path
        self._digest = common_digest(model_path, ranks)
        dtype = dtype or _DTYPES[pool_spec.base_model.dtype]
        self._model = BaseModel(model_path, dtype, device, ranks, trainer.recompute, trainer.deterministic)
        self._slots: dict[int, Slot] = {}
        self._keeps_snapshots = snapshots is not None
        self._snapshots = Snapshots(snapshots if ranks.is_first else None)
        self._reader = Reader(self._storage, self._snapshots, self._model.shape, self._master_type)
        self._waiting, self._defer = self._snapshots.records, defer
        if self._waiting is not None:
            clear_of_other_boots(self._waiting)
        self._torn = False

    def load(self, request: LoadRequest, prepared: Prepared | None = None) -> Loaded:
        """Put a run into a slot, from its newest snapshot or checkpoint, from initFrom, or fresh; a loaded one anew.

        Args:
            request: the same on every rank.
            prepared: for it, on rank 0; what is not prepared is read now.

        Raises:
            RunError: the run cannot be trained here; nothing of it is left behind.
        """
        spec = check_load(request, self._pool, self.slots())
        identity = self._identity(request, spec)
        targets = identity.target_modules
        found = prepared

        def state_on_first() -> TrainState:
            nonlocal found
            found = found or self._reader.read(request, spec, identity)
            return found.state

        state = self._ranks.on_first(state_on_first)
        found = found or Prepared(state)  # other ranks tell nobody of the rest
        model = self._model
        adapter = SlotAdapter(
            model.shape, spec.rank, spec.lora_alpha, targets, model.dtype, model.device, state.use_rslora, self._ranks
        )
        # A resumed run keeps its first horizon: the steps that it made followed that one, and so would a live run.
        optimizer = SlotOptimizer(adapter, spec.optimizer, state.target_step)
        slot = Slot(request.uid, spec, LossParams.from_spec(spec), adapter, optimizer, identity, state.incarnation)
        if spec.record_steps:
            slot.recorder = self._recorder(request, slot, state)
        slot.restore(state, found.unfinished)
        self._free(request.uid)
        self._slots[request.slot] = slot
        return Loaded(
            request.uid, state.step, state.cursor, state.incarnation, slot.groups, slot.reward_sum, slot.samples,
            found.passed_over, found.durable_step, slot.policy,
        )  # fmt: skip

    def prepare(self, request: LoadRequest) -> Prepared:
        """Read what a load starts from. For any thread, on rank 0; nobody else waits for the storage.

        Raises:
            RunError: the run cannot be trained here, or the storage cannot be read.
        """
        spec = check_load(request, self._pool, self.slots())
        return self._reader.read(request, spec, self._identity(request, spec))

    def _identity(self, request: LoadRequest, spec: AdapterRunSpec) -> Identity:
        chosen = spec.target_modules or self._pool.target_modules
        targets = tuple(p for p in PROJECTIONS if p in chosen)  # one order whatever the spec says
        return Identity(request.uid, self._digest, request.data_digest, spec.rank, spec.lora_alpha, targets)

    @property
    def _master_type(self) -> torch.dtype:
        return torch.float64 if self._model.dtype == torch.float64 else torch.float32

    def drop(self, uid: str, keep_snapshot: bool = False) -> str:
        """Free the run's slot; a run that is not loaded is fine. Returns what StepRecorder.close does.

        Args:
            uid: of the run.
            keep_snapshot: its last steps are in no checkpoint, and it may come back for them.
        """
        unrecorded = self._free(uid)
        if not keep_snapshot:
            self._snapshots.remove(uid)
        return unrecorded

    def retain(self, uids: Sequence[str]) -> None:
        """Forget the snapshots of all other runs, and store their records: they ended while nobody could say so."""
        self._snapshots.retain(uids)
        if self._waiting is not None:
            forward(self._waiting, self._storage, uids, self._defer)

    def _free(self, uid: str) -> str:
        recorders = [slot.recorder for slot in self._slots.values() if slot.uid == uid and slot.recorder is not None]
        self._slots = {number: slot for number, slot in self._slots.items() if slot.uid != uid}
        return "; ".join(filter(None, (recorder.close() for recorder in recorders)))

    def slots(self) -> dict[int, str]:
        """Slot number to uid, of every live run."""
        return {number: slot.uid for number, slot in sorted(self._slots.items())}

    def accumulate(self, groups: Sequence[PromptGroup]) -> BatchResult:
        """Forward and backward over groups of any live runs; adds each run's gradient sum and denominator to its own.

        Groups whose advantages are all 0 skip the model, unless the run has a KL term, and still count.

        Returns:
            Statistics per run, and faults as values. A run in `faults` contributed nothing: with a malformed group its
            accumulators are as before, with a value that is not finite they are cleared.
        """
        self._check_whole()
        began = time.perf_counter()
        faults, tallies = admit(groups, self._slots, self._model.shape, self._pool.trainer, self._ranks)
        self._torn = True  # until every pass is through: a partial batch cannot be taken back
        rows = run_passes(self._model, self._slots, tallies, self._pool.trainer, self._ranks)
        self._torn = False
        stats = []
        for number, tally in tallies.items():
            slot = self._slots[number]
            if not tally.finite:
                slot.discard()
                text = "the model's log-probability of a response is not finite; lower optimizer.lr or check initFrom"
                faults.append(RunFault(slot.uid, reasons.NON_FINITE, text))
                continue
            stats.append(count(slot, tally))
        return BatchResult(tuple(stats), tuple(faults), time.perf_counter() - began, rows)

    def step(self, uid: str, cursor: Cursor, incarnation: str = "") -> StepResult | RunFault:
        """Sum over ranks, divide by the denominator, clip, AdamW; then zero the accumulators, and begin a snapshot.

        The step is safe from this process's death once `snapshotted` has answered for its ticket. With a denominator
        of 0 (every sample left out) the gradient is 0 and the step counts.

        Args:
            uid: a live run.
            cursor: the prompt groups consumed up to and with this step.
            incarnation: of the run's registration; its snapshots and checkpoints say who made the step.

        Raises:
            RunError: the run is not loaded, or nothing was accumulated.
        """
        self._check_whole()
        slot = self._slot(uid)
        if slot.groups == 0:
            raise RunError(reasons.INTERNAL_ERROR, f"step: run {uid} has accumulated no group since its last step")
        adapter = slot.adapter
        done = slot.optimizer.update(adapter.shares.reduce(adapter.grad).div_(max(slot.denominator, 1)))
        if done is None:
            slot.discard()
            return RunFault(uid, reasons.NON_FINITE, "the gradient is not finite; lower optimizer.lr or clip rewards")
        adapter.refresh()
        owned = (adapter.master, *slot.optimizer.moments)
        if not all(self._ranks.gather(all(bool(torch.isfinite(tensor).all()) for tensor in owned))):
            slot.discard()
            slot.broken = f"a weight or moment is not finite; lower optimizer.lr ({done[0]}) or set clipGrad"
            return RunFault(uid, reasons.NON_FINITE, slot.broken)
        slot.incarnation = incarnation
        figures = StepFigures(slot.optimizer.step_count, *done, slot.denominator, incarnation, cursor)
        unrecorded = "" if slot.recorder is None else slot.recorder.write(figures, self._ranks)
        slot.discard()
        return StepResult(uid, slot.optimizer.step_count, *done, unrecorded, self._keep(slot, cursor))

    def _keep(self, slot: Slot, cursor: Cursor) -> str:
        """Copy the state after a step and have it written. The ticket on rank 0; empty on the others, and without."""
        if not self._keeps_snapshots:
            return ""
        size = (slot.adapter.canonical_layout[-1].end, self._master_type, self._model.device.type == "cuda")
        places = self._snapshots.place(slot.uid, slot.optimizer.step_count, *size)

        def copy(full: torch.Tensor) -> torch.Tensor:  # it waits for no GPU
            return full if places is None else next(places).copy_(full.detach(), non_blocking=True)

        state = slot.state(cursor, copy)  # a collective, with or without a place
        return self._snapshots.add(slot.identity, state) if state is not None and places is not None else ""

    def snapshotted(self, ticket: str) -> bool:
        """Wait for the snapshot of a step; see Snapshots.written. For any thread, on rank 0."""
        return self._snapshots.written(ticket)

    def export(self, uid: str) -> tuple[Manifest, bytes] | None:
        """The run's current adapter for engines, on rank 0; None on the others.

        Raises:
            RunError: the run is not loaded, or NonFinite: its last step left it unusable.
        """
        adapter = self._sound_slot(uid).adapter
        weights = adapter.shares.canonical(adapter.weights) if self._ranks.dp_rank == 0 else None
        return None if weights is None else flat_export(adapter, weights, self._base_name)

    def capture(
        self, uid: str, directory: str, cursor: Cursor, partial: bool = False, retention: Retention | None = None
    ) -> Save | None:
        """Copy what a checkpoint holds, so that it can be written while other calls go on.

        Args:
            uid: a live run.
            directory: the run's own, {storage}/{namespace}/{name}/{uid}.
            cursor: the prompt groups consumed up to the last step, or with `partial` up to now.
            partial: with what was accumulated since the last step.
            retention: which checkpoints stay, and this one's score; None is as at the load, without a score.

        Returns:
            `directory`/step_N in waiting on rank 0, None on the others.

        Raises:
            RunError: the run is not loaded; NonFinite: its last step left it unusable, and must not take the place of a
                good checkpoint; StorageError for a directory outside the storage.
        """
        if partial:
            self._check_whole()
        slot = self._sound_slot(uid)
        if not Path(os.path.normpath(self._storage / directory)).is_relative_to(self._storage):  # by name: it may hang
            raise RunError(reasons.STORAGE_ERROR, f"checkpoint: {directory!r} lies outside the pool's storage")
        retention = retention or Retention(slot.spec.checkpoint.keep, slot.spec.checkpoint.keep_best)
        adapter = slot.adapter
        state = slot.state(cursor)
        unfinished = partial and slot.groups > 0
        sums = slot.partial() if unfinished else None
        recorder = slot.recorder if unfinished else None
        pending = None if recorder is None else recorder.pending(slot.optimizer.step_count + 1, self._ranks)
        weights = adapter.shares.canonical(adapter.weights) if self._ranks.dp_rank == 0 else None
        if state is None or weights is None:
            return None
        return Save(
            self._storage / directory,
            slot.identity,
            replace(state, partial=sums, score=retention.score),
            peft_tensors(adapter, weights),
            peft_config(adapter, self._base_name),
            retention.keep,
            retention.keep_best,
            pending,
        )

    def checkpoint(
        self, uid: str, directory: str, cursor: Cursor, partial: bool = False, score: float | None = None
    ) -> Artifact | None:
        """Capture and write at once; None on ranks other than 0.

        Raises:
            RunError: as `capture`, or StorageError.
        """
        kept = self._slot(uid).spec.checkpoint
        save = self.capture(uid, directory, cursor, partial, Retention(kept.keep, kept.keep_best, score))
        return None if save is None else save.write()

    def adapter(self, uid: str) -> SlotAdapter:
        """The run's adapter in memory, for probes and tests.

        Raises:
            RunError: the run is not loaded.
        """
        return self._slot(uid).adapter

    def _recorder(self, request: LoadRequest, slot: Slot, state: TrainState) -> StepRecorder:
        """The run's recorder, begun; a run without a state of its own begins its records anew."""
        spec, adapter = slot.spec, slot.adapter
        names = (request.namespace, request.name, request.uid)
        folder = run_directory(self._storage, *names) / FOLDER if self._ranks.is_first else None
        outbox = None
        if folder is not None and self._waiting is not None:
            outbox = Outbox(request.uid, folder, run_directory(self._waiting, *names), self._defer)
        recorder = StepRecorder(request.uid, folder, self._master_type, spec.algorithm.mask_truncated, outbox)
        fresh = None
        if self._ranks.is_first and state.step == 0 and state.partial is None:
            about = describe_run(
                spec, uid=request.uid, namespace=request.namespace, name=request.name, baseModel=self._base_name,
                baseDigest=self._digest, dataDigest=request.data_digest,
                dtype=str(self._model.dtype).removeprefix("torch."), rank=adapter.rank, alpha=adapter.alpha,
                rslora=adapter.rslora, targets=list(adapter.targets), targetStep=state.target_step,
            )  # fmt: skip
            layout = flat_layout(self._model.shape, adapter.rank, adapter.targets)
            fresh = Start(about, peft_config(adapter, self._base_name), {e.key: e.view(state.master) for e in layout})
        recorder.start(fresh, state.step)
        return recorder

    def _slot(self, uid: str) -> Slot:
        for slot in self._slots.values():
            if slot.uid == uid:
                return slot
        raise RunError(reasons.INTERNAL_ERROR, f"run {uid} is in no trainer slot; load it first")

    def _sound_slot(self, uid: str) -> Slot:
        slot = self._slot(uid)
        if slot.broken:
            raise RunError(reasons.NON_FINITE, slot.broken)
        return slot

    def _check_whole(self) -> None:
        if self._torn:
            raise RuntimeFault("the trainer failed in the middle of a batch; start it again and reload its runs")
