"""The lifecycle task: brings each run from QUEUED to its end, one short task per run and stage.

consumes: registry changes, deadlines      produces: checks, loads, first versions, last checkpoints, cleared slots
waits for: the signal, at most one resync   unblocked by: any registry change
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.wire import PresenceView
from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.publishing import publish
from lorafleet_runtime.loop.trainer import TrainerLost
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.storage import newest_step
from lorafleet_runtime.types import Artifact, Loaded, LoadRequest, RunFault, VersionId

log = logging.getLogger(__name__)

RESYNC_SECONDS = 15.0
_RETRY_SECONDS = 0.5
_SAVE_RETRY_SECONDS = 5.0


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


async def load(fleet: Fleet, run: Run) -> None:
    """Load into the slot and publish the version that the trainer holds, unless every engine has it already."""
    if not run.loaded:
        await _load_trainer(fleet, run)
    state = fleet.state(run)
    if state is None or run.state not in ("PENDING", "ACTIVE"):
        return
    async with state.stepping:  # the run may be training already, and the buffer must be of this very version
        n = run.trainer_version
        manifest, buffer = await fleet.trainer.export(run.uid)
    if run.weight_version < n:
        await publish(fleet, run, n, manifest, buffer)
    else:
        await fleet.engines.renew(VersionId(run.uid, state.incarnation, n), manifest, buffer)


async def _load_trainer(fleet: Fleet, run: Run) -> None:
    """Load into the slot, from the run's newest snapshot or checkpoint if it has one."""
    assert run.slot is not None and run.dataset is not None and run.target_step is not None
    newest = await asyncio.to_thread(newest_step, fleet.directory(run))
    request = LoadRequest(
        uid=run.uid,
        namespace=run.namespace,
        name=run.name,
        slot=run.slot,
        spec=run.spec.to_wire(),
        target_step=run.target_step,
        data_digest=run.dataset.digest,
        checkpoint=None if newest is None else str(newest),
    )
    try:
        loaded: Loaded = await fleet.trainer.call("load", request)
    except TrainerLost as error:
        _count_death(fleet, run, error)
        raise
    run.load_deaths = 0
    if run.state not in ("PENDING", "RETIRING"):
        return
    fleet.registry.loaded(loaded, time.time())
    for text in loaded.passed_over:
        log.warning("run %s: %s; going on from step %d", run.uid, text, loaded.step, extra=about(run.uid))
    origin = f"at step {loaded.step}" if loaded.step or loaded.groups else "afresh"
    more = f" with {loaded.groups} groups of the next" if loaded.groups else ""
    where = f"slot {run.slot} of boot epoch {fleet.registry.boot_epoch}"
    log.info("run %s: loaded %s%s into %s", run.uid, origin, more, where, extra=about(run.uid, slot=run.slot))
    if fleet.state(run) is None:  # the first time, or other weights than those that its groups were sampled for
        fleet.buffers.clear(run.uid)
        fleet.states[run.uid] = RunState(run.incarnation, CursorTracker(loaded.cursor), loaded.cursor)
    fleet.registry.observe_trainer(await fleet.trainer.call("slots"))


def _count_death(fleet: Fleet, run: Run, error: TrainerLost) -> None:
    if not error.executing:
        return
    run.load_deaths += 1
    if run.load_deaths > run.spec.backoff_limit:
        limit = run.spec.backoff_limit
        text = (
            f"the trainer died {run.load_deaths} times while it loaded this run; backoffLimit is {limit}; last: {error}"
        )
        fleet.registry.fail(RunFault(run.uid, reasons.TRAINER_CRASHED, text))


async def save(fleet: Fleet, run: Run) -> None:
    """Stop sampling and make the last checkpoint durable."""
    ending = run.ending
    assert ending is not None
    await fleet.engines.abort(run.uid)
    fleet.buffers.clear(run.uid)
    artifact: Artifact | None = None
    can_load = run.start_time is not None and run.load_deaths <= run.spec.backoff_limit  # else nothing was learnt
    if ending.save and (run.loaded or can_load):
        limit = run.spec.save_timeout_seconds
        try:
            async with asyncio.timeout(limit if ending.outcome == "Deleted" else None):
                if not run.loaded:
                    await _load_trainer(fleet, run)
                if run.ending is not ending:
                    return  # it could not be loaded at its last step, and has to train again
                artifact = await _save_in_time(fleet, run, limit)
        except TimeoutError:
            log.warning("run %s: no last checkpoint within saveTimeoutSeconds %s", run.uid, limit, extra=about(run.uid))
        except RunError as error:
            if ending.outcome == "Complete":
                raise
            log.warning("run %s: the last checkpoint failed: %s", run.uid, error, extra=about(run.uid))
    if run.ending is ending:
        fleet.registry.saved(run.uid, artifact, time.time())


async def _save_in_time(fleet: Fleet, run: Run, limit: int) -> Artifact | None:
    """The last checkpoint; storage that refuses it may come back within saveTimeoutSeconds.

    Raises:
        RunError: it did not.
    """
    deadline = time.monotonic() + limit
    while True:
        try:
            return await checkpoint(fleet, run, run.ending is not None and run.ending.outcome == "Suspended")
        except RunError as error:
            if error.reason != reasons.STORAGE_ERROR or time.monotonic() > deadline:
                raise
            log.warning("run %s: %s; trying again", run.uid, error, extra=about(run.uid))
            fleet.registry.not_saved(run.uid, error.message)
        await asyncio.sleep(_SAVE_RETRY_SECONDS)


async def checkpoint(fleet: Fleet, run: Run, partial: bool = False) -> Artifact | None:
    """Write a checkpoint of the last step boundary; the one that is there already is not written again.

    The trainer copies what is to be saved and goes on; other slots never wait for the disk, and a run that leaves its
    slot meanwhile changes nothing of its copy. One save of a run at a time.

    Args:
        fleet: of the run.
        run: loaded.
        partial: with the groups accumulated since that step, for a run that stops before its batch is full. Also at
            step 0, as step_0: a large batch may take hours. Not with advantage reinforce, whose batches are
            normalised as a whole: there the cursor goes back to the boundary and the groups are sampled again.

    Raises:
        RunError: StorageError, or the run's own fault.
        Retryable: the trainer was lost; the run has to load again.
    """
    state = fleet.state(run)
    if state is None:
        return run.artifact
    partial = (partial and run.spec.algorithm.advantage != "reinforce") or run.restored_groups > 0
    async with state.saving, fleet.trainer.saving:
        async with fleet.accumulating if partial else nullcontext(), state.stepping:
            if not run.loaded or fleet.state(run) is not state:
                raise Retryable("the trainer was lost; the run has to load again")
            partial = partial and run.accumulated_groups > 0
            if run.step == 0 and not partial:
                return None  # nothing was learnt
            if run.artifact is not None and run.artifact.step == run.step and not partial:
                return run.artifact
            directory, cursor = str(fleet.directory(run)), state.tracker.cursor if partial else state.step_cursor
            ticket = await fleet.trainer.call("capture", run.uid, directory, cursor, partial, run.progress.score)
        artifact: Artifact = await fleet.trainer.wait("saved", ticket)
    log.info("run %s: checkpoint of step %d written", run.uid, artifact.step, extra=about(run.uid, path=artifact.path))
    return artifact


async def drain(fleet: Fleet) -> None:
    """Checkpoint every live run with what it has accumulated, side by side; the runtime is about to stop."""
    wanted = [r for r in fleet.registry.in_state("PENDING", "ACTIVE", "RETIRING") if r.ending is None or r.ending.save]
    await asyncio.gather(*(_drain_run(fleet, run) for run in wanted if run.loaded))


async def _drain_run(fleet: Fleet, run: Run) -> None:
    try:
        artifact = await checkpoint(fleet, run, run.ending is None or run.ending.outcome == "Suspended")
    except (RunError, Retryable) as error:
        log.error("run %s: not saved before the stop: %s", run.uid, error, extra=about(run.uid))
    except Exception:  # the other runs are saved all the same
        log.exception("run %s: not saved before the stop", run.uid, extra=about(run.uid))
    else:
        log.info("run %s: saved at step %d before the stop (%s)", run.uid, run.step, artifact)


async def clear(fleet: Fleet, run: Run) -> None:
    """Free the trainer slot, then every engine, and end the run once their own listings agree."""
    unsaved = run.artifact is None or run.artifact.step < run.step
    suspended = run.ending is not None and run.ending.outcome == "Suspended"
    await fleet.trainer.call("drop", run.uid, suspended and unsaved)
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
