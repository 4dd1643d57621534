"""The state machine of runs and slots.

    QUEUED ── assign ──▶ PENDING ── published ──▶ ACTIVE ── retire ──▶ RETIRING ── saved ──▶ CLEANUP ── cleaned ──▶ end
       ▲                    ▲                                                                      COMPLETED, FAILED or
       └── resume ──────────┴── trainer_lost (live runs load again where they were)                SUSPENDED

No clock, no I/O, no async: callers pass the time and act on what comes back. The HTTP layer and the loop are the
only callers, both on one event loop. `notify` runs after every visible change.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.wire import (
    AdapterList,
    AdapterView,
    Outcome,
    PresenceView,
    RunState,
    SlotsView,
    TrainerView,
)
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.registry.admission import check_edit, check_limits, parse_spec
from lorafleet_runtime.registry.listings import Listings
from lorafleet_runtime.registry.queue import ordered, place_waiting
from lorafleet_runtime.registry.run import HOLDS_SLOT, TERMINAL, Ending, Run, may_replace
from lorafleet_runtime.types import Artifact, DatasetInfo, Loaded, PolicySums, RunFault, StepResult

log = logging.getLogger(__name__)


class StaleOperator(Exception):
    """A call carried an operatorEpoch below the newest one seen."""


class Registry(Listings):
    """Owns every run's state, slot, incarnation, version and step."""

    def __init__(self, pool: AdapterPoolSpec, boot_epoch: int, notify: Callable[[], None] = lambda: None) -> None:
        super().__init__(pool.engines.replicas, notify)
        self.pool = pool
        self.boot_epoch = boot_epoch
        self.synced = False
        self.operator_epoch = 0
        self.expected: frozenset[str] = frozenset()
        """What the operator's full list named; the runs themselves may still be on their way."""
        self.expects_others = False
        """That list was of some namespaces only."""
        self.runs: dict[str, Run] = {}
        self._registrations = 0

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

    def sync(self, uids: Iterable[str], namespaces: Iterable[str] | None = None) -> None:
        """The operator's full list (of all or these namespaces): retire runs that it lacks, start handing out slots."""
        self.expected, self.expects_others = frozenset(uids), namespaces is not None
        watched = None if namespaces is None else frozenset(namespaces)
        self.synced = True
        for run in list(self.runs.values()):
            seen = watched is None or run.namespace in watched
            if run.owner == "operator" and seen and run.uid not in self.expected:
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
        start_time: float | None = None,
    ) -> Run:
        """Make the run known or apply a newer generation. Idempotent.

        Args:
            uid: of the object.
            spec: as the user wrote it.
            namespace: of the object.
            name: of the object.
            generation: of the spec; an older one changes nothing.
            created: Unix seconds of the object's creation.
            priority: runs of higher priority take a free slot first.
            owner: who may take the run away again.
            start_time: Unix seconds of its first registration, if an earlier runtime had it.

        Raises:
            SpecProblem: the spec does not parse, or an edit asks for what the pool cannot train. A new run that does
                so becomes FAILED instead.
        """
        resolved = parse_spec(spec, self.pool)
        run = self.runs.get(uid)
        if run is None:
            run = Run(uid, namespace, name, owner, resolved, generation, priority, created, start_time=start_time)
            self.runs[uid] = run
            try:
                check_limits(resolved, self.pool)
            except RunError as error:
                self.fail(error.fault(uid))
        elif generation > run.generation:
            self._edit(run, resolved, generation, priority)
        self._apply_intent(run)
        self._changed()
        return run

    def _edit(self, run: Run, spec: AdapterRunSpec, generation: int, priority: int) -> None:
        check_edit(run.spec, spec, self.pool, run.target_step)
        run.spec = spec
        run.generation = generation
        run.priority = priority
        run.retarget()

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
            run.dataset = None  # data and reward were closed with the suspension; they are checked again
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
        """Runs in these states, oldest first; those of the same second in the order in which they came."""
        return sorted((r for r in self.runs.values() if r.state in states), key=lambda r: r.created)

    def checked(self, uid: str, dataset: DatasetInfo) -> None:
        """Data and reward are usable; the target follows from the spec and the rows."""
        run = self.runs.get(uid)
        if run is None:
            return
        run.dataset = dataset
        run.check_failures = 0
        run.retarget()
        self._changed()

    def check_failed(self, uid: str, why: str) -> None:
        """The worker died while it opened this run's data; that too often is the run's own fault."""
        if (run := self.runs.get(uid)) is None:
            return
        run.check_failures += 1
        if run.check_failures > run.spec.backoff_limit:
            text = f"data: the worker died {run.check_failures} times opening it ({why}); use a smaller file"
            self.fail(RunFault(uid, reasons.DATA_ERROR, text))

    def holds_slot(self, uid: str) -> bool:
        """Whether the run may be on the trainer and the engines."""
        return uid in self.runs and self.runs[uid].state in HOLDS_SLOT

    def assign(self) -> list[Run]:
        """Give free slots to checked runs and tell the others their place. Returns the runs that got a slot."""
        taken = {r.slot for r in self.runs.values() if r.state in HOLDS_SLOT}
        free = [s for s in range(self.pool.slots) if s not in taken]
        queue = ordered([r for r in self.in_state("QUEUED") if self.synced or r.owner == "api"])
        started = [r for r in queue[: len(free)] if r.dataset is not None]
        for run, slot in zip(started, free, strict=False):
            self._register(run, slot)
        if place_waiting(queue, self.pool.slots, len(free)) or started:
            self._changed()
        return started

    def _register(self, run: Run, slot: int) -> None:
        self._registrations += 1
        run.begin(slot, f"{self.boot_epoch}.{self._registrations}")

    def loaded(self, loaded: Loaded, now: float) -> None:
        """The trainer holds the run, at this step.

        After a trainer's death this is usually the step that the run was at: its versions on the engines then hold
        these very weights, so it goes on in the same incarnation. Otherwise it starts a new one; also when a checkpoint
        brings other groups of the next step than this incarnation counts on, so that none is trained on twice.
        """
        run = self.runs[loaded.uid]
        if run.was_loaded and not run.is_where_it_was(loaded):
            self._begin_anew(run)
        run.take_over(loaded)
        if run.weight_version and run.state == "PENDING":
            run.activate(now)
        self._changed()
        if run.state == "PENDING" and run.target_step is not None and run.step >= run.target_step:
            self._complete(run)

    def _begin_anew(self, run: Run) -> None:
        assert run.slot is not None
        self._register(run, run.slot)
        if run.ending is not None and run.ending.outcome != "Complete":
            run.state = "RETIRING"
            return
        run.ending = None
        if run.deleted:  # a deletion, cancel or suspend had given way to the completion
            self.delete(run.uid)
        else:
            self._apply_intent(run)

    def published(self, uid: str, n: int, now: float) -> None:
        """Version n is verified on every engine; new requests use it."""
        run = self.runs[uid]
        if n <= run.weight_version:
            return
        run.weight_version = n
        if run.state == "PENDING" and run.loaded:
            run.activate(now)
        self._changed()

    def commit(self, uid: str, groups: int, rewards: Iterable[float], policy: PolicySums) -> bool:
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
        progress.policy_sums += policy
        self._changed()
        return run.accumulated_groups == run.groups_per_step

    def stepped(self, result: StepResult, now: float) -> bool:
        """The run made an optimizer step. True when that was its last."""
        run = self.runs[result.uid]
        run.step = result.step
        run.accumulated_groups = run.restored_groups = run.crashes = 0
        run.progress.finish_step(result, now)
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
        extra = {"run": {"uid": fault.uid, "detail": fault.detail}}  # for the run's own log
        log.warning("run %s failed: %s: %s", fault.uid, fault.reason, fault.message, extra=extra)
        self.retire(fault.uid, "Failed", fault.reason, fault.message, save=False)

    def retire(self, uid: str, outcome: Outcome, reason: str, message: str, *, save: bool) -> None:
        """Begin the run's end. The first reason stays, but a fault replaces a Complete that never became durable."""
        run = self.runs.get(uid)
        if run is None or run.state in TERMINAL or run.state == "CLEANUP":
            return
        if run.ending is not None and not may_replace(run.ending.outcome, outcome):
            return
        run.ending = Ending(outcome, reason, message, save)
        if run.state == "QUEUED":
            self._end(run)
        else:
            run.state = "RETIRING"
            run.reason, run.message = (reasons.SAVING, "writing the last checkpoint") if save else (reason, message)
        self._changed()

    def saved(self, uid: str, artifact: Artifact | None, now: float) -> None:
        """The last checkpoint is durable, or none was wanted: the slot may be cleared."""
        run = self.runs[uid]
        if run.state != "RETIRING" or run.ending is None:
            return
        if artifact is not None:
            run.keep(artifact)
        run.state = "CLEANUP"
        run.completion_time = None if run.ending.outcome == "Suspended" else now
        run.reason, run.message = run.ending.reason, run.ending.message
        self._changed()

    def checkpointed(self, uid: str, artifact: Artifact) -> None:
        """A checkpoint on the way is durable."""
        if (run := self.runs.get(uid)) is not None:
            run.keep(artifact)
            if run.state == "ACTIVE":
                run.message = run.training_message
            self._changed()

    def not_saved(self, uid: str, why: str, again: str = "; it is tried again") -> None:
        """A checkpoint could not be written or read, or with `again` empty a step's record not written."""
        if (run := self.runs.get(uid)) is not None and run.state in ("PENDING", "ACTIVE", "RETIRING"):
            run.message = why + again
            self._changed()

    def ended_without(self, uid: str, what: str) -> None:
        """Something of a run that leaves its slot is missing; its end says so."""
        if (run := self.runs.get(uid)) is not None and run.state == "CLEANUP" and run.ending is not None:
            run.ending.message = run.message = f"{run.ending.message}; {what}"
            self._changed()

    def cleaned(self, uid: str) -> bool:
        """End a CLEANUP run if neither trainer nor any engine lists it. Call after fresh listings. True when ended."""
        run = self.runs[uid]
        if run.state != "CLEANUP" or self.presence(uid) != PresenceView():
            return False
        self._end(run)
        self._changed()
        return True

    def _end(self, run: Run) -> None:
        run.end()
        if not self._forget_if_done(run):
            self._apply_intent(run)

    def _forget_if_done(self, run: Run) -> bool:
        if run.deleted and run.state in TERMINAL:
            self.runs.pop(run.uid, None)
            self._changed()
            return True
        return False

    def trainer_lost(self) -> None:
        """The trainer process died: live runs load again, also those that have yet to write their last checkpoint."""
        self.trainer_ready = False
        self.trainer_slots = {}
        for run in self.in_state("PENDING", "ACTIVE", "RETIRING"):
            run.restarts += 1 if run.loaded else 0
            run.loaded = False
            run.discard_batch()
            if run.state == "ACTIVE":
                run.state = "PENDING"
                run.reason, run.message = reasons.LOADING, f"the trainer restarted; loading into slot {run.slot} again"
        self._changed()

    # --- views -----------------------------------------------------------------------------------------------

    def view(self, uid: str) -> AdapterView:
        """One run. Raises KeyError for an unknown uid."""
        return self.runs[uid].view(self.presence(uid))

    def slots(self) -> SlotsView:
        """How many slots there are, are taken, and are waited for."""
        used = sum(r.state in HOLDS_SLOT for r in self.runs.values())
        return SlotsView(total=self.pool.slots, used=used, queued=len(self.in_state("QUEUED")))

    def listing(self) -> AdapterList:
        """Everything, for GET /v1/adapters."""
        return AdapterList(
            boot_epoch=self.boot_epoch,
            revision=self.revision,
            synced=self.synced,
            operator_epoch=self.operator_epoch,
            listed=self.listed,
            slots=self.slots(),
            trainer=TrainerView(ready=self.trainer_ready, slots=self.trainer_slots),
            engines=self.engine_views(),
            adapters=[self.view(r.uid) for r in sorted(self.runs.values(), key=lambda r: (r.created, r.uid))],
        )
