"""Steps: made by the trainer, snapshotted, told of, published, saved.

Called by training.py, which holds `accumulating`, with each run whose batch is full. A step waits for its snapshot
beside the next batch, apart from that of a suspect. It decides nothing about batches.
"""

import logging
import time
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pydantic.alias_generators import to_camel

from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.permit import Permit
from lorafleet_runtime.loop.publishing import publish
from lorafleet_runtime.loop.samples import cut_samples, write_samples
from lorafleet_runtime.loop.saving import checkpoint
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import Cursor, Manifest, PromptGroup, RunFault, StepResult

log = logging.getLogger(__name__)


@asynccontextmanager
async def blaming(fleet: Fleet, uids: Collection[str]) -> AsyncIterator[None]:
    """A border of the loop: a trainer that raises in what it does for these runs is replaced."""
    trainer = fleet.trainer.current
    try:
        yield
    except Retryable as error:
        log.info("training: %s; its runs load again", error)
    except Exception as error:
        log.exception("the trainer raised; its accumulators cannot be trusted, so it is replaced")
        fleet.blame.training(uids, f"{type(error).__name__}: {error}")
        fleet.trainer.condemn(trainer)


@dataclass(frozen=True, slots=True)
class _Made:
    """A step that the trainer has made and nobody has been told of."""

    result: StepResult
    cursor: Cursor
    """The groups consumed up to and with it."""
    exported: tuple[Manifest, Any] | None
    """Its version for the engines, where one is wanted."""
    writing: ExitStack
    """Closed once its snapshot is written."""


async def step(fleet: Fleet, run: Run, alone: Permit | None = None) -> None:
    """One optimizer step of one run; its new version goes out in the background.

    The step counts once its snapshot is written, for a trainer that dies before takes it along: no step that was told
    of, and no version that an engine serves, is ever made again with other weights. The next batch does not wait for
    that, nor for a place among the snapshots. Until then the run holds `stepping`, and its batch stays full, so it is
    given no group.

    Args:
        fleet: of the run.
        run: whose batch is full.
        alone: all places for snapshots, for a suspect: the caller waits until the step counts.
    """
    state = fleet.state(run)
    if state is None or not _may_step(run):
        return  # it ended while its batch was training
    async with AsyncExitStack() as held:
        await held.enter_async_context(state.stepping)
        what = f"step {run.step + 1} of run {run.uid}"
        if alone is None and fleet.trainer.snapshots_full:
            fleet.spawn(_step_later(fleet, run, state, held.pop_all()), what)
            return
        finishing = await _make(fleet, run, state, held, alone)
    if finishing is not None and alone is not None:
        await finishing
    elif finishing is not None:
        fleet.spawn(finishing, what)


async def _step_later(fleet: Fleet, run: Run, state: RunState, stepping: AsyncExitStack) -> None:
    """Step once there is a place for the snapshot; batches of others are trained meanwhile."""
    async with stepping:
        place = await fleet.trainer.snapshot_permit()
        finishing = None
        async with blaming(fleet, {run.uid}):
            finishing = await _make(fleet, run, state, stepping, place)
    if finishing is not None:
        await finishing


async def _make(
    fleet: Fleet, run: Run, state: RunState, stepping: AsyncExitStack, place: Permit | None
) -> Coroutine[Any, Any, None] | None:
    """Have the trainer make the step. Returns what remains to be done once it is written, with the lock; or None.

    Args:
        fleet: of the run.
        run: whose batch is full.
        state: of its incarnation.
        stepping: the run's lock, held.
        place: for the snapshot; None takes one.
    """
    with ExitStack() as writing:
        if place is None:
            place = await fleet.trainer.snapshot_permit()
        writing.callback(place.release)
        if fleet.state(run) is not state or not _may_step(run) or not run.loaded or not run.batch_is_full:
            return None  # the trainer was lost while this waited
        cursor, doing = state.tracker.cursor, [Doing("step", run.uid)]
        try:
            outcome = await fleet.trainer.call("step", run.uid, cursor, state.incarnation, doing=doing)
            if isinstance(outcome, RunFault):
                fleet.registry.fail(outcome)
                return None
            writing.callback(fleet.trainer.begin(Doing("snapshot", run.uid)))
            exported = None
            if run.state == "ACTIVE" and (run.target_step is None or outcome.step < run.target_step):
                exported = await fleet.trainer.export(run.uid, doing)  # now, and not behind the next batch
        except RunError as error:  # this run's alone; the trainer is whole
            fleet.registry.fail(error.fault(run.uid))
            return None
        made = _Made(outcome, cursor, exported, writing.pop_all())
    return _finish(fleet, run, state, made, stepping.pop_all())


async def _finish(fleet: Fleet, run: Run, state: RunState, made: _Made, stepping: AsyncExitStack) -> None:
    """Count a step, publish its version, and save it where that is due.

    Args:
        fleet: of the run.
        run: whose trainer made the step.
        state: of its incarnation.
        made: the step.
        stepping: the run's lock, held.
    """
    try:
        async with stepping:
            with made.writing:
                if made.result.snapshot:
                    await fleet.trainer.snapshotted(made.result.snapshot)
            if fleet.state(run) is not state or not run.loaded or run.state not in ("ACTIVE", "RETIRING"):
                return  # it was taken from its slot meanwhile, and this step with it
            if _count(fleet, run, state, made) or run.state != "ACTIVE":
                return  # the lifecycle task writes the final checkpoint
            n = run.trainer_version
            manifest, buffer = made.exported or await fleet.trainer.export(run.uid)
    except Retryable as error:
        log.info("run %s: step %d: %s; it loads again", run.uid, made.result.step, error, extra=about(run.uid))
        return
    except Exception as error:  # a background task's border: the run would wait for this step for ever
        log.exception("run %s: step %d raised", run.uid, made.result.step, extra=about(run.uid))
        if fleet.state(run) is state:
            fault = error.fault(run.uid) if isinstance(error, RunError) else unforeseen(run.uid, error)
            fleet.registry.fail(fault)
        return
    fleet.spawn(_publish(fleet, run, n, manifest, buffer), f"publishing run {run.uid}")
    if fleet.stopping:
        return  # whoever stops saves every run
    if state.save_due or run.step % run.spec.checkpoint.interval_steps == 0:
        state.save_due = state.saving.locked()  # the one before is still on its way
        if not state.save_due:
            fleet.spawn(_checkpoint(fleet, run, state), f"saving run {run.uid}")


def _count(fleet: Fleet, run: Run, state: RunState, made: _Made) -> bool:
    """Tell everybody of a step. True when it was the last."""
    state.step_cursor = made.cursor
    groups = [whitened(state, group) for group in state.taken]
    state.taken.clear()
    fleet.metrics.observe_step(run, time.time())
    last = fleet.registry.stepped(made.result, time.time())
    fleet.blame.stepped(run.uid)
    _record(fleet, run, made.result, groups)
    if made.result.unrecorded:
        log.error("run %s: %s", run.uid, made.result.unrecorded, extra=about(run.uid))
        fleet.registry.not_saved(run.uid, made.result.unrecorded, again="")
    return last


def _may_step(run: Run) -> bool:
    """No whole batch is ever saved, for nothing would step it when the run comes back. So a batch is also stepped when
    its run is being suspended, or has groups that its last checkpoint must keep because the one before had them."""
    if run.state == "RETIRING" and run.ending is not None and run.ending.save:
        return run.ending.outcome == "Suspended" or run.restored_groups > 0
    return run.state == "ACTIVE"


def _record(fleet: Fleet, run: Run, result: StepResult, groups: list[PromptGroup]) -> None:
    """The step and its samples, for people."""
    reward, tokens = run.progress.reward_mean, sum(len(s.token_ids) for g in groups for s in g.samples)
    means = {} if run.progress.policy is None else asdict(run.progress.policy)
    figures = about(
        run.uid, step=result.step, reward=reward, lr=result.lr, gradNorm=result.grad_norm, tokens=tokens,
        **{to_camel(name): value for name, value in means.items()},
    )  # fmt: skip
    log.info("run %s: step %d of %s", run.uid, result.step, run.target_step, extra=figures)
    directory = fleet.directory(run)
    lines = cut_samples(result.step, groups)  # a job that waits for a slow disk must not keep the groups
    fleet.writer.submit(lambda: write_samples(directory, lines), bulky=True)


async def _publish(fleet: Fleet, run: Run, n: int, manifest: Any, buffer: Any) -> None:
    incarnation = run.incarnation
    try:
        await publish(fleet, run, n, manifest, buffer)
    except RunError as error:
        fault = error.fault(run.uid)
    except Exception as error:
        log.exception("run %s: publishing version %d raised", run.uid, n, extra=about(run.uid))
        fault = unforeseen(run.uid, error)
    else:
        return
    if run.incarnation == incarnation:
        fleet.registry.fail(fault)


async def _checkpoint(fleet: Fleet, run: Run, state: RunState) -> None:
    """A checkpoint on the way, beside the training; the last one has to succeed, this one is tried again."""
    try:
        artifact = await checkpoint(fleet, run)
    except Retryable as error:
        state.save_due = True
        log.info("run %s: checkpoint: %s", run.uid, error, extra=about(run.uid))
    except TimeoutError:
        state.save_due = True
        log.error("run %s: its checkpoint is not written yet; trying again", run.uid, extra=about(run.uid))
    except RunError as error:
        state.save_due = True
        log.error("run %s: %s; trying again after its next step", run.uid, error, extra=about(run.uid))
        if fleet.state(run) is state:
            fleet.registry.not_saved(run.uid, error.message)
    else:
        if artifact is not None and fleet.state(run) is state:
            fleet.registry.checkpointed(run.uid, artifact)


def whitened(state: RunState, group: PromptGroup) -> PromptGroup:
    """As it is trained, where the run's advantages are normalised over its batch."""
    return group if state.whitening is None else state.whitening.apply(group)
