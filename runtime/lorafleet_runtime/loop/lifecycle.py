"""The lifecycle task: brings each run from QUEUED to its end, one short task per run and stage.

consumes: registry changes, deadlines      produces: checks, loads, first versions, last checkpoints, cleared slots
waits for: the signal, at most one resync   unblocked by: any registry change
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import PresenceView
from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.loading import load
from lorafleet_runtime.loop.saving import save
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.types import RunFault

log = logging.getLogger(__name__)

RESYNC_SECONDS = 15.0
_RETRY_SECONDS = 0.5


async def lifecycle(fleet: Fleet) -> None:
    """Move every run along, for ever."""
    busy: dict[str, asyncio.Task[None]] = {}
    last_resync = time.monotonic()
    while True:
        busy = {uid: task for uid, task in busy.items() if not task.done()}
        enforce_deadlines(fleet, time.time())
        fleet.registry.assign()
        for uid in fleet.workers.opened - {r.uid for r in fleet.registry.runs.values() if r.state not in TERMINAL}:
            fleet.spawn(fleet.workers.close(uid), f"closing data and reward of run {uid}")
        if fleet.registry.synced and not fleet.registry.expects_others and not fleet.swept and "" not in busy:
            busy[""] = fleet.spawn(_sweep(fleet), "forgetting the snapshots of runs that ended")
        _forget_ended(fleet)
        for run, stage in _next_stages(fleet):
            if run.uid not in busy:
                busy[run.uid] = fleet.spawn(_guard(fleet, run, stage), f"{stage.__name__} of run {run.uid}")
        if time.monotonic() - last_resync >= RESYNC_SECONDS:
            last_resync = time.monotonic()
            fleet.spawn(fleet.engines.resync(fleet.registry.holds_slot), "engine resync")
        await fleet.signal.wait(timeout=RESYNC_SECONDS)


async def _sweep(fleet: Fleet) -> None:
    registry = fleet.registry
    wanted = _unended(fleet) | (registry.expected - registry.runs.keys())
    try:
        await fleet.trainer.call("retain", sorted(wanted))
    except Retryable as error:
        log.info("snapshots: %s; trying again", error)
        await asyncio.sleep(_RETRY_SECONDS)
        return
    except Exception:  # a file that cannot be removed is no reason to stop, nor to try for ever
        log.exception("snapshots of runs that ended meanwhile could not be removed; they lie in the trainer's TMPDIR")
    fleet.swept = True


def _unended(fleet: Fleet) -> set[str]:
    return {uid for uid, run in fleet.registry.runs.items() if run.state not in ("COMPLETED", "FAILED")}


def _forget_ended(fleet: Fleet) -> None:
    """A run that ended, wherever it was, will not come back for its snapshot."""
    unended = _unended(fleet)
    for uid in fleet.unended - unended:
        fleet.spawn(_forget(fleet, uid), f"forgetting the snapshot of run {uid}")
    fleet.unended = unended


async def _forget(fleet: Fleet, uid: str) -> None:
    try:
        await fleet.trainer.call("drop", uid)
    except Retryable as error:
        log.info("run %s: %s; its snapshot goes at the next start", uid, error)


Stage = Callable[[Fleet, Run], Awaitable[None]]


def _next_stages(fleet: Fleet) -> list[tuple[Run, Stage]]:
    stages: list[tuple[Run, Stage]] = []
    for run in fleet.registry.in_state("QUEUED", "PENDING", "RETIRING", "CLEANUP"):
        if run.state == "QUEUED" and run.dataset is None:
            stages.append((run, check))
        elif run.state == "PENDING":
            stages.append((run, load))
        elif run.state == "RETIRING":
            stages.append((run, save))
        elif run.state == "CLEANUP":
            stages.append((run, clear))
    return stages


async def _guard(fleet: Fleet, run: Run, stage: Stage) -> None:
    """A stage's error ends its own run only."""
    try:
        await stage(fleet, run)
    except RunError as error:
        fleet.registry.fail(error.fault(run.uid))
        if run.state == "CLEANUP":
            await asyncio.sleep(_RETRY_SECONDS)
    except Retryable as error:
        log.info("run %s: %s; trying again", run.uid, error, extra=about(run.uid))
        if stage is check:
            fleet.registry.check_failed(run.uid, str(error))
        await asyncio.sleep(_RETRY_SECONDS)
    except Exception as error:
        log.exception("run %s: %s raised", run.uid, stage.__name__, extra=about(run.uid))
        if run.state == "RETIRING" and run.ending is not None and run.ending.outcome != "Complete":
            fleet.registry.saved(run.uid, None, time.time())  # it ends as it was told to, without this checkpoint
            return
        if run.state in ("RETIRING", "CLEANUP"):
            await asyncio.sleep(_RETRY_SECONDS)
        fleet.registry.fail(unforeseen(run.uid, error))


async def check(fleet: Fleet, run: Run) -> None:
    """Open data and reward before a slot is taken."""
    info = await fleet.workers.open(run.uid, run.spec, run.start_time is not None)
    fleet.registry.checked(run.uid, info)
    skipped = f", {info.skipped} skipped as too long" if info.skipped else ""
    log.info("run %s: data and reward are usable: %d prompts%s", run.uid, info.rows, skipped, extra=about(run.uid))


async def clear(fleet: Fleet, run: Run) -> None:
    """Free the trainer slot, then every engine, and end the run once their own listings agree."""
    unsaved = run.artifact is None or run.artifact.step < run.step
    suspended = run.ending is not None and run.ending.outcome == "Suspended"
    if unrecorded := await fleet.trainer.call("drop", run.uid, suspended and unsaved):
        log.error("run %s: %s", run.uid, unrecorded, extra=about(run.uid))
        fleet.registry.ended_without(run.uid, unrecorded)
    fleet.registry.observe_trainer(await fleet.trainer.call("slots"))
    await fleet.engines.clear(run.uid)
    await fleet.engines.refresh()
    await fleet.workers.close(run.uid)
    fleet.forget(run.uid)
    if run.ending is not None and fleet.registry.presence(run.uid) == PresenceView():
        ending = run.ending  # told before it is cleaned: a deleted run is forgotten then
        log.info("run %s: %s: %s; its slot is free", run.uid, ending.outcome, ending.message, extra=about(run.uid))
    if not fleet.registry.cleaned(run.uid):
        raise Retryable(f"still listed by {fleet.registry.presence(run.uid)}")


def enforce_deadlines(fleet: Fleet, now: float) -> None:
    """Fail what is over time at `now`, Unix seconds. Time counts while a run is suspended; it fails once it resumes."""
    for run in fleet.registry.in_state("QUEUED", "PENDING", "ACTIVE"):
        spec = run.spec
        if spec.registration_deadline_seconds and not run.start_time:
            _enforce(fleet, run, "registrationDeadlineSeconds", spec.registration_deadline_seconds, now - run.created)
        if spec.active_deadline_seconds and run.start_time:
            _enforce(fleet, run, "activeDeadlineSeconds", spec.active_deadline_seconds, now - run.start_time)


def _enforce(fleet: Fleet, run: Run, field: str, limit: int, age: float) -> None:
    if age > limit:
        text = f"{field}: {limit} s passed at step {run.step} of {run.target_step}; raise it or lower numStep"
        fleet.registry.fail(RunFault(run.uid, reasons.DEADLINE_EXCEEDED, text))
