"""Brings a run into its trainer slot, and its first version onto the engines. Stages of the lifecycle task.

Called by lifecycle.py, and by saving.py for a run whose trainer died before its last checkpoint. It decides nothing
about when a run loads.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Damaged, Retryable, RunError
from lorafleet_runtime.loop.buffers import CursorTracker
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.publishing import publish
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.storage import newest_step
from lorafleet_runtime.types import Loaded, LoadRequest, VersionId

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


async def load(fleet: Fleet, run: Run) -> None:
    """Load into the slot and publish the version that the trainer holds, unless every engine has it already.

    Raises:
        RunError: the run cannot be trained here.
        Retryable: the trainer or an engine is away.
    """
    if not run.loaded:
        await load_trainer(fleet, run)
    state = fleet.state(run)
    if state is None or not run.loaded or run.state not in ("PENDING", "ACTIVE"):
        return
    async with state.stepping:  # the run may be training already, and the buffer must be of this very version
        if not run.loaded or fleet.state(run) is not state:
            raise Retryable("the trainer was lost; the run has to load again")
        n = run.trainer_version
        manifest, buffer = await fleet.trainer.export(run.uid, doing=[Doing("load", run.uid)])
    fleet.blame.loaded(run)
    if run.weight_version < n:
        await publish(fleet, run, n, manifest, buffer)
    else:
        await fleet.engines.renew(VersionId(run.uid, state.incarnation, n), manifest, buffer)


async def load_trainer(fleet: Fleet, run: Run) -> None:
    """Load into the slot, from the run's newest snapshot or checkpoint if it has one.

    Storage that refuses to be read is asked again for saveTimeoutSeconds, unless the run is told to end meanwhile; one
    that does not answer is left alone after that time. Checkpoints that were read and are damaged are not asked again.

    Raises:
        RunError: the run cannot be trained here; StorageError when the time is over, or every checkpoint is damaged.
        Retryable: the trainer was lost.
    """
    loaded = await _ask(fleet, run)
    if loaded is None or run.state not in ("PENDING", "RETIRING"):
        return
    if run.was_loaded and loaded.step > run.step:
        text = f"step {loaded.step} outlived its trainer, its answer did not: it has no samples, log line or figures"
        log.warning("run %s: %s", run.uid, text, extra=about(run.uid, step=loaded.step))
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


async def _ask(fleet: Fleet, run: Run) -> Loaded | None:
    """The trainer's answer; None when the run was told to end before the storage could be read."""
    state, ending, limit = run.state, run.ending, run.spec.save_timeout_seconds
    deadline: float | None = None
    while run.state == state and run.ending is ending:
        try:
            return await _ask_once(fleet, run)
        except TimeoutError as error:
            if run.state != state or run.ending is not ending:
                return None
            text = f"saveTimeoutSeconds: {fleet.directory(run)} could not be read within {limit} s"
            raise RunError(reasons.STORAGE_ERROR, f"{text}; mend the storage or raise it, then run it again") from error
        except RunError as error:
            if error.reason != reasons.STORAGE_ERROR or isinstance(error, Damaged):
                raise
            now = time.monotonic()
            deadline = now + limit if deadline is None else deadline
            if now >= deadline:
                text = f"{error.message} (tried again for saveTimeoutSeconds {limit})"
                raise RunError(error.reason, text, error.detail) from error
            log.warning("run %s: %s; trying again", run.uid, error, extra=about(run.uid))
            fleet.registry.not_saved(run.uid, error.message)
            await asyncio.sleep(min(_RETRY_SECONDS, deadline - now))
    return None


async def _ask_once(fleet: Fleet, run: Run) -> Loaded:
    assert run.slot is not None and run.dataset is not None and run.target_step is not None
    directory, limit = fleet.directory(run), run.spec.save_timeout_seconds
    async with asyncio.timeout(limit):
        try:
            newest = await _look(lambda: newest_step(directory))
        except OSError as error:
            raise RunError(reasons.STORAGE_ERROR, f"{directory} cannot be read ({error}); fix the storage") from error
    async with AsyncExitStack() as held:
        permit = await fleet.trainer.read_permit(limit)
        held.callback(permit.release)
        await fleet.keep_company(held, run.load_deaths > 0, limit)
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
        return await fleet.trainer.load(permit, limit, request)


async def _look(work: Callable[[], Path | None]) -> Path | None:
    """What `work` finds on the storage, on a thread of its own.

    The common ones are few, and one that hangs would keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Path | None] = loop.create_future()

    def tell(path: Path | None, error: Exception | None) -> None:
        if found.done():  # nobody waits any more
            return
        if error is None:
            found.set_result(path)
        else:
            found.set_exception(error)

    def run() -> None:
        path: Path | None = None
        refused: Exception | None = None
        try:
            path = work()
        except OSError as error:
            refused = error
        except Exception as error:  # told too: who waits would wait until the time is over
            log.exception("looking at the storage raised")
            refused = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, path, refused)

    threading.Thread(target=run, name="look at storage", daemon=True).start()
    return await found
