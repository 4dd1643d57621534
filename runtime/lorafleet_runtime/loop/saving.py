"""Checkpoints of runs: on the way, at a run's end, and when the runtime stops.

    checkpoint   place among the saves ─▶ copy in the trainer, between batches ─▶ write, beside the training
    save         the lifecycle stage of a run that ends
    drain        all live runs, at a stop

Called by lifecycle.py, training.py and cli/serve.py. Storage that refuses is asked again, storage that hangs is left
alone after saveTimeoutSeconds; a write that nobody waits for any more keeps its place until it ends. How a run ends
makes no difference to what it waits for: time counts while the storage has the run's part and ends no checkpoint.
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack, nullcontext

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.loading import load_trainer
from lorafleet_runtime.loop.permit import Permit
from lorafleet_runtime.loop.writing import Writing
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import Artifact, Retention

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_BATCH_SECONDS = 10.0
"""A stop waits this long for the batch under way."""


async def save(fleet: Fleet, run: Run) -> None:
    """Stop sampling and make the last checkpoint durable; storage may take saveTimeoutSeconds.

    A run that is suspended, cancelled or deleted goes on without it when there is none in time.

    Raises:
        RunError: of a run that is complete: StorageError, or its own fault.
        Retryable: the trainer was lost; the run has to load again.
    """
    ending = run.ending
    assert ending is not None
    await fleet.engines.abort(run.uid)
    fleet.buffers.clear(run.uid)
    artifact: Artifact | None = None
    if ending.save and _may_save(run):
        limit = run.spec.save_timeout_seconds
        try:
            if not run.loaded:
                await load_trainer(fleet, run)
                fleet.blame.loaded(run)
            if run.ending is not ending:
                return  # another end, or it could not be loaded at its last step and has to train again
            artifact = await _save_in_time(fleet, run, limit)
        except TimeoutError as error:
            text = f"saveTimeoutSeconds: no last checkpoint within {limit} s; mend the storage or raise it"
            if ending.outcome == "Complete":
                raise RunError(reasons.STORAGE_ERROR, f"{text}, then run it again") from error
            log.warning("run %s: %s; it ends without", run.uid, text, extra=about(run.uid))
        except RunError as error:
            if ending.outcome == "Complete":
                raise
            log.warning("run %s: the last checkpoint failed: %s", run.uid, error, extra=about(run.uid))
    if run.ending is ending:
        fleet.registry.saved(run.uid, artifact, time.time())
    elif artifact is not None:
        fleet.registry.checkpointed(run.uid, artifact)


def _may_save(run: Run) -> bool:
    """Whether there is something to be saved, by what is known without killing one more trainer."""
    limit = run.spec.backoff_limit
    given_up = run.ending is not None and run.ending.outcome in ("Deleted", "Cancelled") and run.save_deaths > limit
    can_load = run.start_time is not None and run.load_deaths <= limit  # else nothing was learnt
    return not given_up and (run.loaded or can_load)


async def _save_in_time(fleet: Fleet, run: Run, limit: int) -> Artifact | None:
    """The last checkpoint; storage that refuses it may come back within saveTimeoutSeconds of the first refusal.

    Raises:
        RunError: it did not.
        TimeoutError: it did not even refuse.
    """
    deadline: float | None = None
    while True:
        try:
            suspended = run.ending is not None and run.ending.outcome == "Suspended"
            return await checkpoint(fleet, run, suspended, limit)
        except RunError as error:
            now = time.monotonic()
            deadline = now + limit if deadline is None else deadline
            if error.reason != reasons.STORAGE_ERROR or now >= deadline:
                raise
            log.warning("run %s: %s; trying again", run.uid, error, extra=about(run.uid))
            fleet.registry.not_saved(run.uid, error.message)
        await asyncio.sleep(min(_RETRY_SECONDS, deadline - now))


async def checkpoint(fleet: Fleet, run: Run, partial: bool = False, limit: float | None = None) -> Artifact | None:
    """Write a checkpoint of the last step boundary; the one that is there already is not written again.

    The trainer copies what is to be saved and goes on; other slots never wait for the disk, and a run that leaves its
    slot meanwhile changes nothing of its copy. One save of a run at a time. A run whose save may have killed a trainer
    saves while no other save, no batch and no load is under way, so that nobody else is taken for it; at a stop, where
    nobody is failed any more, it does not wait for them.

    Args:
        fleet: of the run.
        run: loaded.
        partial: with the groups accumulated since that step, for a run that stops before its batch is full. Also at
            step 0, as step_0: a large batch may take hours. Not with advantage reinforce, whose batches are
            normalised as a whole: there the cursor goes back to the boundary and the groups are sampled again.
        limit: seconds that the storage may take without ending any checkpoint; waiting for a batch, or for a save that
            has to be alone, does not count.

    Raises:
        RunError: StorageError, or the run's own fault.
        Retryable: the trainer was lost; the run has to load again.
        TimeoutError: the storage took longer.
    """
    state = fleet.state(run)
    if state is None:
        return run.artifact
    partial = (partial and run.spec.algorithm.advantage != "reinforce") or run.restored_groups > 0
    async with AsyncExitStack() as held:
        async with fleet.trainer.patience(limit):
            await held.enter_async_context(state.saving)
            if state.writing is not None:
                await state.writing.ended()
        alone = run.save_deaths > 0 and not fleet.stopping
        if alone:
            limit = run.spec.save_timeout_seconds if limit is None else limit  # others wait for it
        await fleet.keep_company(held, alone, limit or 0.0, state.stepping)
        async with fleet.trainer.patience(limit):
            permit = await fleet.trainer.permit(alone)
        held.callback(permit.release)
        between = fleet.between_batches(state.stepping) if partial and not alone else nullcontext()
        async with between, state.stepping:
            writing = await _capture(fleet, run, state, permit, partial)
        if not isinstance(writing, Writing):
            return writing
        try:
            async with fleet.trainer.patience(limit):
                artifact = await writing.written()
        except (TimeoutError, asyncio.CancelledError):
            fleet.trainer.abandon(run.uid, writing)
            raise
        state.writing = None
    fleet.blame.saved(run)
    log.info("run %s: checkpoint of step %d written", run.uid, artifact.step, extra=about(run.uid, path=artifact.path))
    return artifact


async def _capture(fleet: Fleet, run: Run, state: RunState, permit: Permit, partial: bool) -> Writing | Artifact | None:
    """The checkpoint on its way, or the one that is there already; None when nothing was learnt."""
    if not run.loaded or fleet.state(run) is not state:
        raise Retryable("the trainer was lost; the run has to load again")
    partial = partial and run.accumulated_groups > 0
    if run.step == 0 and not partial:
        return None
    if run.artifact is not None and run.artifact.step == run.step and not partial:
        return run.artifact
    cursor = state.tracker.cursor if partial else state.step_cursor
    kept = run.spec.checkpoint
    retention = Retention(kept.keep, kept.keep_best, run.progress.score)
    writing = fleet.trainer.save(permit, run.uid, str(fleet.directory(run)), cursor, partial, retention)
    state.writing = writing
    try:
        await writing.captured()
    except asyncio.CancelledError:  # it goes on all the same
        fleet.trainer.abandon(run.uid, writing)
        raise
    return writing


async def drain(fleet: Fleet, batch_seconds: float = _BATCH_SECONDS) -> None:
    """Stop the work and checkpoint every live run, side by side; the runtime is about to stop.

    The batch under way may end first, and what is accumulated then is saved too. When it takes longer than
    `batch_seconds`, each run is saved as of its last step. Runs whose save may kill the trainer come last: it must cost
    no other run its checkpoint.
    """
    fleet.stopping = True
    fleet.signal.set()
    between = True
    try:
        async with asyncio.timeout(batch_seconds), fleet.accumulating:
            pass
    except TimeoutError:
        between = False
        log.warning("the batch under way takes longer than %.0f s; what it holds is not saved", batch_seconds)
    wanted = [r for r in fleet.registry.in_state("PENDING", "ACTIVE", "RETIRING") if r.ending is None or r.ending.save]
    live = [run for run in wanted if run.loaded]
    await asyncio.gather(*(_drain_run(fleet, run, between) for run in live if run.save_deaths == 0))
    for run in live:
        if run.save_deaths > 0 and run.loaded:
            await _drain_run(fleet, run, between)


async def _drain_run(fleet: Fleet, run: Run, between: bool) -> None:
    if not between and run.restored_groups > 0:
        log.warning("run %s: its checkpoint stays as it was loaded", run.uid, extra=about(run.uid))
        return
    try:
        artifact = await checkpoint(fleet, run, between and (run.ending is None or run.ending.outcome == "Suspended"))
    except (RunError, Retryable, TimeoutError) as error:
        log.error("run %s: not saved before the stop: %s", run.uid, error, extra=about(run.uid))
    except Exception:  # the other runs are saved all the same
        log.exception("run %s: not saved before the stop", run.uid, extra=about(run.uid))
    else:
        log.info("run %s: saved at step %d before the stop (%s)", run.uid, run.step, artifact)
