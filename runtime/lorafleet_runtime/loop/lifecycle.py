"""The lifecycle task: brings each run from QUEUED to its end, one short task per run and stage.

consumes: registry changes, deadlines      produces: checks, loads, first versions, last checkpoints, cleared slots
waits for: the signal, at most one resync   unblocked by: any registry change
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.publishing import publish
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.storage import latest_checkpoint
from lorafleet_runtime.types import Artifact, Loaded, LoadRequest, RunFault

log = logging.getLogger(__name__)

RESYNC_SECONDS = 15.0
_RETRY_SECONDS = 0.5


async def lifecycle(fleet: Fleet) -> None:
    """Move every run along, for ever."""
    busy: dict[str, asyncio.Task[None]] = {}
    last_resync = time.monotonic()
    while True:
        busy = {uid: task for uid, task in busy.items() if not task.done()}
        _enforce_deadlines(fleet, time.time())
        fleet.registry.assign()
        for uid in fleet.workers.opened - {r.uid for r in fleet.registry.runs.values() if r.state not in TERMINAL}:
            fleet.spawn(fleet.workers.close(uid), f"closing data and reward of run {uid}")
        for run, stage in _next_stages(fleet):
            if run.uid not in busy:
                busy[run.uid] = fleet.spawn(_guard(fleet, run, stage), f"{stage.__name__} of run {run.uid}")
        if time.monotonic() - last_resync >= RESYNC_SECONDS:
            last_resync = time.monotonic()
            fleet.spawn(fleet.engines.resync(fleet.registry.holds_slot), "engine resync")
        await fleet.signal.wait(timeout=RESYNC_SECONDS)


Stage = Callable[[Fleet, Run], Awaitable[None]]


def _next_stages(fleet: Fleet) -> list[tuple[Run, Stage]]:
    stages: list[tuple[Run, Stage]] = []
    for run in fleet.registry.in_state("QUEUED", "PENDING", "RETIRING", "CLEANUP"):
        if run.state == "QUEUED" and run.dataset is None:
            stages.append((run, check))
        elif run.state == "PENDING" and run.weight_version == 0:
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
    except Retryable as error:
        log.info("run %s: %s; trying again", run.uid, error)
        if stage is check:
            fleet.registry.check_failed(run.uid, str(error))
        await asyncio.sleep(_RETRY_SECONDS)
    except Exception as error:
        log.exception("run %s: %s raised", run.uid, stage.__name__)
        if run.state in ("RETIRING", "CLEANUP"):
            await asyncio.sleep(_RETRY_SECONDS)
        fleet.registry.fail(unforeseen(run.uid, error))


async def check(fleet: Fleet, run: Run) -> None:
    """Open data and reward before a slot is taken."""
    info = await fleet.workers.open(run.uid, run.spec)
    fleet.registry.checked(run.uid, info)


async def load(fleet: Fleet, run: Run) -> None:
    """Load into the slot, from the run's last checkpoint if it has one, and publish the first version."""
    incarnation = run.incarnation
    assert run.slot is not None and run.dataset is not None and run.target_step is not None
    if not run.loaded:
        newest = await asyncio.to_thread(latest_checkpoint, fleet.directory(run))
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
        loaded: Loaded = await fleet.trainer.call("load", request)
        if run.incarnation != incarnation:
            return
        fleet.states[run.uid] = RunState(incarnation, CursorTracker(loaded.cursor), loaded.cursor)
        fleet.registry.loaded(loaded)
        fleet.registry.observe_trainer(await fleet.trainer.call("slots"))
    if run.state == "PENDING" and run.incarnation == incarnation:
        manifest, buffer = await fleet.trainer.export(run.uid)
        await publish(fleet, run, run.trainer_version, manifest, buffer)


async def save(fleet: Fleet, run: Run) -> None:
    """Stop sampling and make the last checkpoint durable."""
    ending = run.ending
    assert ending is not None
    await fleet.engines.abort(run.uid)
    fleet.buffers.clear(run.uid)
    artifact: Artifact | None = None
    if ending.save and run.loaded:
        try:
            limit = run.spec.save_timeout_seconds if ending.outcome == "Deleted" else None
            artifact = await asyncio.wait_for(checkpoint(fleet, run), limit)
        except TimeoutError:
            log.warning("run %s: no last checkpoint within saveTimeoutSeconds %s", run.uid, limit)
        except RunError as error:
            if ending.outcome == "Complete":
                raise
            log.warning("run %s: the last checkpoint failed: %s", run.uid, error)
    if run.ending is ending:
        fleet.registry.saved(run.uid, artifact, time.time())


async def checkpoint(fleet: Fleet, run: Run) -> Artifact | None:
    """Write a checkpoint of the last step boundary; the one that is there already is not written again."""
    state = fleet.state(run)
    if state is None:
        return run.artifact
    async with state.stepping:
        if run.artifact is not None and run.artifact.step == run.step:
            return run.artifact
        directory = str(fleet.directory(run))
        artifact: Artifact = await fleet.trainer.call("checkpoint", run.uid, directory, state.step_cursor)
    return artifact


async def drain(fleet: Fleet) -> None:
    """Checkpoint every live run at its last step boundary; the runtime is about to stop."""
    for run in fleet.registry.in_state("ACTIVE"):
        if run.step > run.start_step:
            try:
                artifact = await checkpoint(fleet, run)
            except RunError as error:
                log.error("run %s: not saved before the stop: %s", run.uid, error)
            else:
                log.info("run %s: saved at step %d before the stop (%s)", run.uid, run.step, artifact)


async def clear(fleet: Fleet, run: Run) -> None:
    """Free the trainer slot, then every engine, and end the run once their own listings agree."""
    await fleet.trainer.call("drop", run.uid)
    fleet.registry.observe_trainer(await fleet.trainer.call("slots"))
    await fleet.engines.clear(run.uid)
    await fleet.engines.refresh()
    await fleet.workers.close(run.uid)
    fleet.forget(run.uid)
    if not fleet.registry.cleaned(run.uid):
        raise Retryable(f"still listed by {fleet.registry.presence(run.uid)}")


def _enforce_deadlines(fleet: Fleet, now: float) -> None:
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
