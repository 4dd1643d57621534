"""The state machine of runs and slots.

    QUEUED ── assign ──▶ PENDING ── published ──▶ ACTIVE ── retire ──▶ RETIRING ── saved ──▶ CLEANUP ── cleaned ──▶ end
       ▲                    ▲                                                                      COMPLETED, FAILED or
       └── resume ──────────┴── trainer_lost (live runs load again from their last checkpoint)     SUSPENDED

No clock, no I/O, no async: callers pass the time and act on what comes back. The HTTP layer and the loop are the
only callers, both on one event loop. `notify` runs after every visible change.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.wire import (
    AdapterList,
    AdapterView,
    EngineView,
    Outcome,
    PresenceView,
    RunState,
    SlotsView,
    TrainerView,
)
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import check_limits, parse_spec
from lorafleet_runtime.registry.run import HOLDS_SLOT, TERMINAL, Ending, Run
from lorafleet_runtime.types import Artifact, DatasetInfo, EngineStatus, Loaded, RunFault, StepResult

log = logging.getLogger(__name__)

_STEP_TIME_DECAY = 0.7


class StaleOperator(Exception):
    """A call carried an operatorEpoch below the newest one seen."""


class Registry:
    """Owns every run's state, slot, incarnation, version and step."""

    def __init__(self, pool: AdapterPoolSpec, boot_epoch: int, notify: Callable[[], None] = lambda: None) -> None:
        self.pool = pool
        self.boot_epoch = boot_epoch
        self.revision = 0
        self.synced = False
        self.operator_epoch = 0
        self.runs: dict[str, Run] = {}
        self.engines: dict[str, EngineStatus] = {}
        self.trainer_ready = False
        self.trainer_slots: dict[int, str] = {}
        self._registrations = 0
        self._notify = notify

    # --- what the operator and API users ask for -------------------------------------------------------------

    def fence(self, operator_epoch: int) -> None:
        """Accept this operator epoch or a newer one from now on.

        Raises:
            StaleOperator: a newer operator has spoken.
        """
        if operator_epoch < self.operator_epoch:
            raise StaleOperator(
                f"operatorEpoch: {operator_epoch} is below {self.operator_epoch}; a newer operator owns this runtime"
            )
        self.operator_epoch = operator_epoch

    def sync(self, uids: Iterable[str]) -> None:
        """The operator's full list: retire its runs that are not on it, and start handing out slots."""
        known = set(uids)
        self.synced = True
        for run in list(self.runs.values()):
            if run.owner == "operator" and run.uid not in known:
                self.delete(run.uid)
        self._changed()

    def put(
        self,
        uid: str,
        spec: dict[str, Any],
        *,
        namespace: str,
        name: str,
        generation: int,
        created: float,
        priority: int = 0,
        owner: Literal["operator", "api"] = "operator",
    ) -> Run:
        """Make the run known or apply a newer generation. Idempotent.

        Raises:
            SpecProblem: the spec does not parse. Limits of the pool do not raise: that run becomes FAILED.
        """
        resolved = parse_spec(spec, self.pool)
        run = self.runs.get(uid)
        if run is None:
            run = Run(uid, namespace, name, owner, resolved, generation, priority, created)
            self.runs[uid] = run
            try:
                check_limits(resolved, self.pool)
            except RunError as error:
                self.fail(error.fault(uid))
        elif generation > run.generation:
            run.spec = resolved
            run.generation = generation
            run.priority = priority
            if resolved.num_step is not None and run.target_step is not None and run.ending is None:
                run.target_step = max(resolved.num_step, run.step)
        self._apply_intent(run)
        self._changed()
        return run

    def delete(self, uid: str) -> bool:
        """Take the run away for good. True when nothing is left of it."""
        run = self.runs.get(uid)
        if run is None:
            return True
        if run.state in TERMINAL:
            del self.runs[uid]
            self._changed()
            return True
        run.deleted = True
        self.retire(uid, "Deleted", reasons.DELETED, "the object is deleted", save=run.spec.deletion_policy == "Save")
        return self._forget_if_done(run)

    def _apply_intent(self, run: Run) -> None:
        if run.state == "SUSPENDED" and not run.spec.suspend and not run.spec.cancel and not run.deleted:
            run.ending = None
            run.state = "QUEUED"
            run.reason, run.message = reasons.PENDING, "resuming"
        elif run.state == "SUSPENDED" and run.spec.cancel:
            run.ending = Ending("Cancelled", reasons.CANCELLED, "spec.cancel is true", save=False)
            run.state = "COMPLETED"
            run.reason, run.message = reasons.CANCELLED, "spec.cancel is true"
        elif run.spec.cancel:
            self.retire(run.uid, "Cancelled", reasons.CANCELLED, "spec.cancel is true", save=True)
        elif run.spec.suspend:
            self.retire(run.uid, "Suspended", reasons.SUSPENDED_REASON, "spec.suspend is true", save=True)

    # --- what the loop does ----------------------------------------------------------------------------------

    def in_state(self, *states: RunState) -> list[Run]:
        """Runs in these states, oldest first."""
        return sorted((r for r in self.runs.values() if r.state in states), key=lambda r: (r.created, r.uid))

    def checked(self, uid: str, dataset: DatasetInfo) -> None:
        """Data and reward are usable; the target is fixed here, once."""
        run = self.runs.get(uid)
        if run is None:
            return
        run.dataset = dataset
        if run.target_step is None:
            epochs = run.spec.num_epoch or 1
            run.target_step = run.spec.num_step or max(1, epochs * dataset.rows // run.groups_per_step)
        self._changed()

    def assign(self) -> list[Run]:
        """Give free slots to checked runs, by priority and then by age. Returns the runs that got one."""
        waiting = [r for r in self.in_state("QUEUED") if r.dataset is not None and (self.synced or r.owner == "api")]
        waiting.sort(key=lambda r: (-r.priority - r.spec.scheduling.priority, r.created, r.uid))
        taken = {r.slot for r in self.runs.values() if r.state in HOLDS_SLOT}
        free = [s for s in range(self.pool.slots) if s not in taken]
        started = waiting[: len(free)]
        for run, slot in zip(started, free, strict=False):
            self._register(run, slot)
        changed = bool(started)
        for position, run in enumerate(waiting[len(free) :], start=1):
            message = f"all {self.pool.slots} slots are taken; position {position} in the queue"
            changed = changed or run.message != message
            run.queue_position = position
            run.reason, run.message = reasons.SLOTS_EXHAUSTED, message
        if changed:
            self._changed()
        return started

    def _register(self, run: Run, slot: int) -> None:
        self._registrations += 1
        run.slot = slot
        run.incarnation = f"{self.boot_epoch}.{self._registrations}"
        run.state = "PENDING"
        run.reason, run.message = reasons.LOADING, f"loading into slot {slot}"
        run.queue_position = None
        run.loaded = False
        run.weight_version = 0
        run.accumulated_groups = 0
        run.progress.reward_sum = run.progress.mismatch_sum = 0.0
        run.progress.reward_count = run.progress.mismatch_count = 0

    def loaded(self, loaded: Loaded) -> None:
        """The trainer holds the run, at this step."""
        run = self.runs[loaded.uid]
        run.loaded = True
        run.step = run.start_step = loaded.step
        self._changed()
        if run.state == "PENDING" and run.target_step is not None and run.step >= run.target_step:
            self._complete(run)

    def published(self, uid: str, n: int, now: float) -> None:
        """Version n is verified on every engine; new requests use it."""
        run = self.runs[uid]
        if n <= run.weight_version:
            return
        run.weight_version = n
        if run.state == "PENDING":
            run.state = "ACTIVE"
            run.reason, run.message = reasons.TRAINING, f"training in slot {run.slot}"
            run.start_time = run.start_time or now
        self._changed()

    def commit(self, uid: str, groups: int, rewards: Iterable[float], mismatch: tuple[float, int]) -> bool:
        """Groups of this run went into its accumulator. True when the batch is full and the run must step."""
        run = self.runs[uid]
        if run.accumulated_groups + groups > run.groups_per_step:
            raise ValueError(
                f"run {uid}: {groups} groups overshoot the batch ({run.accumulated_groups} of {run.groups_per_step})"
            )
        run.accumulated_groups += groups
        progress = run.progress
        for reward in rewards:
            progress.reward_sum += reward
            progress.reward_count += 1
        progress.mismatch_sum += mismatch[0]
        progress.mismatch_count += mismatch[1]
        self._changed()
        return run.accumulated_groups == run.groups_per_step

    def stepped(self, result: StepResult, now: float) -> bool:
        """The run made an optimizer step. True when that was its last."""
        run = self.runs[result.uid]
        run.step = result.step
        run.accumulated_groups = 0
        run.crashes = 0
        p = run.progress
        since = p.last_step_time or run.start_time
        if since is not None:
            seconds = now - since
            old = p.seconds_per_step
            p.seconds_per_step = seconds if old is None else _STEP_TIME_DECAY * old + (1 - _STEP_TIME_DECAY) * seconds
        p.last_step_time = now
        p.lr, p.grad_norm = result.lr, result.grad_norm
        p.reward_mean = p.reward_sum / p.reward_count if p.reward_count else None
        p.mismatch = p.mismatch_sum / p.mismatch_count if p.mismatch_count else None
        p.reward_sum = p.mismatch_sum = 0.0
        p.reward_count = p.mismatch_count = 0
        last = run.target_step is not None and run.step >= run.target_step
        if last:
            self._complete(run)
        self._changed()
        return last

    def _complete(self, run: Run) -> None:
        text = f"all {run.target_step} steps done"
        self.retire(run.uid, "Complete", reasons.COMPLETED, text, save=True)

    def fail(self, fault: RunFault) -> None:
        """End the run for a fault of its own; nobody else is touched."""
        log.warning("run %s failed: %s: %s", fault.uid, fault.reason, fault.message)
        self.retire(fault.uid, "Failed", fault.reason, fault.message, save=False)

    def retire(self, uid: str, outcome: Outcome, reason: str, message: str, *, save: bool) -> None:
        """Begin the run's end. The first reason stays, but a fault replaces a Complete that never became durable."""
        run = self.runs.get(uid)
        if run is None or run.state in TERMINAL or run.state == "CLEANUP":
            return
        if run.ending is not None and not (run.ending.outcome in ("Complete", "Suspended") and outcome != "Suspended"):
            return
        run.ending = Ending(outcome, reason, message, save)
        if run.state == "QUEUED":
            self._end(run)
        else:
            run.state = "RETIRING"
            run.reason, run.message = (reasons.SAVING, "writing the last checkpoint") if save else (reason, message)
        self._changed()

    def saved(self, uid: str, artifact: Artifact | None) -> None:
        """The last checkpoint is durable, or none was wanted: the slot may be cleared."""
        run = self.runs[uid]
        if run.state != "RETIRING" or run.ending is None:
            return
        if artifact is not None:
            run.artifact = artifact
        run.state = "CLEANUP"
        run.reason, run.message = run.ending.reason, run.ending.message
        self._changed()

    def checkpointed(self, uid: str, artifact: Artifact) -> None:
        """A checkpoint on the way is durable."""
        if uid in self.runs:
            self.runs[uid].artifact = artifact
            self._changed()

    def cleaned(self, uid: str, now: float) -> bool:
        """End a CLEANUP run if neither trainer nor any engine lists it. Call after fresh listings. True when ended."""
        run = self.runs[uid]
        if run.state != "CLEANUP" or self.presence(uid) != PresenceView():
            return False
        run.completion_time = now
        self._end(run)
        self._changed()
        return True

    def _end(self, run: Run) -> None:
        assert run.ending is not None
        outcome = run.ending.outcome
        run.state = "FAILED" if outcome == "Failed" else "SUSPENDED" if outcome == "Suspended" else "COMPLETED"
        run.reason, run.message = run.ending.reason, run.ending.message
        run.slot = None
        run.loaded = False
        run.queue_position = None
        run.accumulated_groups = 0
        if not self._forget_if_done(run):
            self._apply_intent(run)

    def _forget_if_done(self, run: Run) -> bool:
        if run.deleted and run.state in TERMINAL:
            self.runs.pop(run.uid, None)
            self._changed()
            return True
        return False

    def trainer_lost(self) -> None:
        """The trainer process died: live runs load again from their last checkpoint, under a new incarnation."""
        self.trainer_ready = False
        self.trainer_slots = {}
        for run in self.in_state("PENDING", "ACTIVE", "RETIRING"):
            if run.state == "RETIRING" and run.ending is not None and run.ending.outcome != "Complete":
                run.state = "CLEANUP"
                run.reason, run.message = run.ending.reason, run.ending.message
                continue
            run.ending = None
            run.restarts += 1 if run.loaded else 0
            assert run.slot is not None
            self._register(run, run.slot)
        self._changed()

    # --- what the trainer and the engines say they hold ------------------------------------------------------

    def observe_trainer(self, slots: dict[int, str]) -> None:
        """The trainer's own listing."""
        if slots != self.trainer_slots or not self.trainer_ready:
            self.trainer_slots = dict(slots)
            self.trainer_ready = True
            self._changed()

    def observe_engine(self, status: EngineStatus) -> None:
        """One engine's own listing."""
        old = self.engines.get(status.engine)
        self.engines[status.engine] = status
        if old is None or (old.adapters, old.ready) != (status.adapters, status.ready):
            self._changed()

    def presence(self, uid: str) -> PresenceView:
        """Who holds the run."""
        prefix = f"{uid}@"
        engines = [e.engine for e in self.engines.values() if any(a.startswith(prefix) for a in e.adapters)]
        return PresenceView(trainer=uid in self.trainer_slots.values(), engines=sorted(engines))

    # --- views -----------------------------------------------------------------------------------------------

    def view(self, uid: str) -> AdapterView:
        """One run. Raises KeyError for an unknown uid."""
        return self.runs[uid].view(self.presence(uid))

    def slots(self) -> SlotsView:
        """How many slots there are, are taken, and are waited for."""
        used = sum(r.state in HOLDS_SLOT for r in self.runs.values())
        return SlotsView(total=self.pool.slots, used=used, queued=len(self.in_state("QUEUED")))

    def engine_views(self) -> list[EngineView]:
        """Every engine's own listing."""
        return [
            EngineView(engine=e.engine, ready=e.ready, adapters=list(e.adapters), listed_at=e.listed_at)
            for e in self.engines.values()
        ]

    def listing(self) -> AdapterList:
        """Everything, for GET /v1/adapters."""
        return AdapterList(
            boot_epoch=self.boot_epoch,
            revision=self.revision,
            synced=self.synced,
            operator_epoch=self.operator_epoch,
            slots=self.slots(),
            trainer=TrainerView(ready=self.trainer_ready, slots=self.trainer_slots),
            engines=self.engine_views(),
            adapters=[self.view(r.uid) for r in sorted(self.runs.values(), key=lambda r: (r.created, r.uid))],
        )

    def _changed(self) -> None:
        self.revision += 1
        self._notify()
