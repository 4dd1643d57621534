"""One trainer rank: the frozen base model, a slot per run, and the calls of docs/interfaces.md section 6.

Called by the loop through actor.py, one call at a time. A fault of one run is a value or a RunError and changes nothing
of another run; any other exception means that this rank's accumulators cannot be trusted, and every later call that
would use them is refused.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.errors import ConfigError, RunError, RuntimeFault
from lorafleet_runtime.storage import inside, step_of
from lorafleet_runtime.trainer import checkpoint as checkpoints
from lorafleet_runtime.trainer.admit import check_group, check_load
from lorafleet_runtime.trainer.batch import MicroBatch, Work, make_micro_batch, pack, split_group
from lorafleet_runtime.trainer.export import flat_export, write_adapter
from lorafleet_runtime.trainer.initial import init_kaiming, load_peft
from lorafleet_runtime.trainer.layout import PROJECTIONS
from lorafleet_runtime.trainer.lora import Segment, SlotAdapter
from lorafleet_runtime.trainer.losses.head import head_logprobs, head_loss
from lorafleet_runtime.trainer.losses.policy import LossParams, PolicyTokens, policy_loss
from lorafleet_runtime.trainer.model import BaseModel
from lorafleet_runtime.trainer.optimizer import SlotOptimizer
from lorafleet_runtime.trainer.slot import Slot, Tally, count, observe, train_state
from lorafleet_runtime.trainer.snapshot import Snapshots
from lorafleet_runtime.trainer.warm_start import init_directory, read_peft_config
from lorafleet_runtime.trainer.weights import base_digest
from lorafleet_runtime.types import (
    Artifact,
    BatchResult,
    Cursor,
    Loaded,
    LoadRequest,
    Manifest,
    PromptGroup,
    RunFault,
    StepResult,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainerRank:
    """A single-rank trainer.

    Args:
        pool_spec: of the pool; baseModel.dtype is the compute type.
        model_path: directory with the base model's HF files.
        storage_root: shared storage; relative paths in LoadRequests are taken from here.
        dtype: compute type instead of the pool's; tests use float64.
        snapshots: folder on this node for the state after each step; None keeps none.

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
    ) -> None:
        """Load the base model."""
        for name, size in (
            ("dataParallel", pool_spec.trainer.data_parallel), ("tensorParallel", pool_spec.trainer.tensor_parallel)
        ):  # fmt: skip
            if size != 1:
                raise ConfigError(
                    f"trainer.{name}: {size} is not supported; this trainer runs on one rank, set it to 1"
                )
        self._pool = pool_spec
        self._storage = Path(storage_root)
        self._base_name = pool_spec.base_model.name or pool_spec.base_model.path or model_path
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._digest = base_digest(model_path)
        self._model = BaseModel(
            model_path, dtype or _DTYPES[pool_spec.base_model.dtype], device, pool_spec.trainer.recompute
        )
        self._slots: dict[int, Slot] = {}
        self._snapshots = Snapshots(snapshots)
        self._torn = False

    def load(self, request: LoadRequest) -> Loaded:
        """Put a run into a slot, from its newest snapshot or checkpoint, from initFrom, or fresh; a loaded one anew.

        Raises:
            RunError: the run cannot be trained here; nothing of it is left behind.
        """
        spec = check_load(request, self._pool, self.slots())
        chosen = spec.target_modules or self._pool.target_modules
        targets = tuple(p for p in PROJECTIONS if p in chosen)  # one order whatever the spec says
        identity = checkpoints.Identity(
            request.uid, self._digest, request.data_digest, spec.rank, spec.lora_alpha, targets
        )
        state, source, rslora = self._stored(request, identity), None, False
        if state is not None:
            rslora = state.use_rslora
        elif spec.init_from is not None:
            source = init_directory(spec.init_from, self._storage)
            rslora = read_peft_config(source, spec.rank, spec.lora_alpha)
        model = self._model
        adapter = SlotAdapter(model.shape, spec.rank, spec.lora_alpha, targets, model.dtype, model.device, rslora)
        # A resumed run keeps its first horizon: the steps that it made followed that one, and so would a live run.
        horizon = request.target_step if state is None else state.target_step
        optimizer = SlotOptimizer(adapter.master, spec.optimizer, horizon)
        if state is not None:
            self._restore(state, adapter, optimizer)
        elif source is not None:
            load_peft(adapter, source)
        else:
            init_kaiming(adapter, spec.init_seed)
        self._free(request.uid)
        made_by = state.incarnation if state else ""
        self._slots[request.slot] = Slot(
            request.uid, spec, LossParams.from_spec(spec), adapter, optimizer, identity, made_by
        )
        return Loaded(request.uid, optimizer.step_count, state.cursor if state else Cursor(), made_by)

    def _stored(self, request: LoadRequest, identity: checkpoints.Identity) -> checkpoints.TrainState | None:
        """The newest state to go on from."""
        snapshot = self._snapshots.read(identity)
        if request.checkpoint is None:
            return snapshot
        path = self._inside(request.checkpoint)
        if snapshot is not None and snapshot.step > step_of(path):
            return snapshot
        return checkpoints.read_checkpoint(path, identity)

    def drop(self, uid: str, keep_snapshot: bool = False) -> None:
        """Free the run's slot; a run that is not loaded is fine.

        Args:
            uid: of the run.
            keep_snapshot: its last steps are in no checkpoint, and it may come back for them.
        """
        self._free(uid)
        if not keep_snapshot:
            self._snapshots.remove(uid)

    def retain(self, uids: Sequence[str]) -> None:
        """Forget the snapshots of all other runs: they ended while nobody could say so."""
        self._snapshots.retain(uids)

    def _free(self, uid: str) -> None:
        self._slots = {number: slot for number, slot in self._slots.items() if slot.uid != uid}

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
        faults, tallies = self._admit(groups)
        work = [piece for number, tally in tallies.items() for piece in self._work(number, tally)]
        rows = 0
        self._torn = True  # until every pass is through: a partial batch cannot be taken back
        budget, deterministic = self._pool.trainer.micro_batch_tokens, self._pool.trainer.deterministic
        for members in pack(work, budget, deterministic):
            rows += self._pass(members, tallies)
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
        """Divide by the denominator, clip, AdamW; then zero the accumulators and leave a snapshot.

        With a denominator of 0 (every sample left out) the gradient is 0 and the step counts.

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
        grad = slot.adapter.grad.div_(max(slot.denominator, 1))
        done = slot.optimizer.update(grad)
        slot.discard()
        if done is None:
            return RunFault(uid, reasons.NON_FINITE, "the gradient is not finite; lower optimizer.lr or clip rewards")
        slot.adapter.refresh()
        if not bool(torch.isfinite(slot.adapter.master).all()):
            return RunFault(uid, reasons.NON_FINITE, f"a weight is not finite; lower optimizer.lr ({done[0]})")
        slot.incarnation = incarnation
        self._snapshots.write(slot.identity, train_state(slot, cursor))
        return StepResult(uid, slot.optimizer.step_count, *done)

    def export(self, uid: str) -> tuple[Manifest, bytes]:
        """The run's current adapter for engines.

        Raises:
            RunError: the run is not loaded.
        """
        return flat_export(self._slot(uid).adapter, self._base_name)

    def checkpoint(self, uid: str, directory: str, cursor: Cursor) -> Artifact:
        """Write `directory`/step_N of the last step boundary and prune to the run's checkpoint.keep.

        Args:
            uid: a live run.
            directory: the run's own, {storage}/{namespace}/{name}/{uid}.
            cursor: the prompt groups consumed up to that boundary.

        Raises:
            RunError: the run is not loaded, or StorageError.
        """
        slot = self._slot(uid)
        self._inside(directory)
        path = self._storage / directory
        artifact = checkpoints.write_checkpoint(
            path,
            slot.identity,
            train_state(slot, cursor),
            lambda into: write_adapter(slot.adapter, self._base_name, into),
        )
        checkpoints.prune(path, slot.spec.checkpoint.keep)
        return artifact

    def adapter(self, uid: str) -> SlotAdapter:
        """The run's adapter in memory, for probes and tests.

        Raises:
            RunError: the run is not loaded.
        """
        return self._slot(uid).adapter

    def _inside(self, path: str) -> Path:
        try:
            return inside(self._storage, path)
        except ValueError as error:
            raise RunError(reasons.STORAGE_ERROR, f"checkpoint: {path!r} {error}") from error

    def _restore(self, state: checkpoints.TrainState, adapter: SlotAdapter, optimizer: SlotOptimizer) -> None:
        if not checkpoints.same_layout(state, adapter.master):
            text = f"the state of step {state.step}: its tensors do not fit this base model; start a new run"
            raise RunError(reasons.CHECKPOINT_MISMATCH, text)
        if not checkpoints.is_finite(state):
            text = f"the state of step {state.step} holds values that are not finite; start a new run"
            raise RunError(reasons.NON_FINITE, text)
        adapter.master.copy_(state.master)
        adapter.refresh()
        device = self._model.device
        optimizer.restore(state.step, state.exp_avg.to(device), state.exp_avg_sq.to(device))

    def _slot(self, uid: str) -> Slot:
        for slot in self._slots.values():
            if slot.uid == uid:
                return slot
        raise RunError(reasons.INTERNAL_ERROR, f"run {uid} is in no trainer slot; load it first")

    def _check_whole(self) -> None:
        if self._torn:
            raise RuntimeFault("the trainer failed in the middle of a batch; start it again and reload its runs")

    def _admit(self, groups: Sequence[PromptGroup]) -> tuple[list[RunFault], dict[int, Tally]]:
        """Sort groups by slot; a run with a group that cannot be trained is left out whole."""
        by_uid: dict[str, list[PromptGroup]] = defaultdict(list)
        for group in groups:
            by_uid[group.uid].append(group)
        faults: list[RunFault] = []
        tallies: dict[int, Tally] = {}
        numbers = {slot.uid: number for number, slot in self._slots.items()}
        for uid, mine in by_uid.items():
            try:
                self._slot(uid)
                for group in mine:
                    check_group(group, self._model.shape)
            except RunError as error:
                faults.append(error.fault(uid))
            else:
                tallies[numbers[uid]] = Tally(groups=mine)
        return faults, tallies

    def _work(self, number: int, tally: Tally) -> list[Work]:
        params, budget = self._slots[number].params, self._pool.trainer.micro_batch_tokens
        needed = [group for group in tally.groups if params.kl_coef > 0 or not group.is_constant]
        return [piece for group in needed for piece in split_group(number, params, group, budget)]

    def _pass(self, members: Sequence[Work], tallies: dict[int, Tally]) -> int:
        """One forward and backward pass. Returns its rows without padding."""
        model = self._model
        loss_type = torch.float64 if model.dtype == torch.float64 else torch.float32
        batch = make_micro_batch(members, model.device, loss_type)
        segments = [Segment(self._slots[n].adapter, start, end) for n, start, end in batch.segments]
        policy = batch.policy
        if any(piece.params.kl_coef > 0 for piece in members):
            policy = self._with_reference(batch)
        hidden = model.hidden(batch.ids, batch.groups, segments)
        with torch.no_grad():
            result = head_loss(
                hidden.detach()[batch.rows],
                model.head_weight,
                batch.head,
                lambda logprob, first, last: policy_loss(logprob, policy.slice(first, last)),
            )
            grad = torch.zeros_like(hidden).index_copy_(0, batch.rows, result.grad_hidden)
            for number, first, last in batch.spans:
                observe(tallies[number], result, policy.sampler, first, last)
        torch.autograd.backward(hidden, grad)
        return batch.num_rows

    def _with_reference(self, batch: MicroBatch) -> PolicyTokens:
        """The batch's tokens with log-probabilities of the base model, for the KL term."""
        with torch.no_grad():
            hidden = self._model.hidden(batch.ids, batch.groups, ())
            reference = head_logprobs(hidden[batch.rows], self._model.head_weight, batch.head)
        return batch.policy.with_reference(reference)
