"""The train task: collect, accumulate, commit, step, publish.

consumes: buffered groups                    produces: optimizer steps, versions to publish, checkpoints
waits for: groups, at most the coalesce wait unblocked by: a finished group
"""

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from pydantic.alias_generators import to_camel

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.buffers import Need
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.publishing import publish
from lorafleet_runtime.loop.samples import cut_samples, write_samples
from lorafleet_runtime.loop.saving import checkpoint
from lorafleet_runtime.loop.trainer import TrainerLost
from lorafleet_runtime.loop.whiten import whitening
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import (
    BatchResult,
    Cursor,
    Manifest,
    PolicySums,
    PromptGroup,
    RunBatchStats,
    RunFault,
    StepResult,
)

log = logging.getLogger(__name__)


async def train(fleet: Fleet) -> None:
    """Train whatever is ready, for ever."""
    while True:
        await wait_for_batch(fleet)
        async with fleet.accumulating:
            groups = take_batch(fleet)
            if groups:
                await _train_on(fleet, groups)


async def _train_on(fleet: Fleet, groups: list[PromptGroup]) -> None:
    trainer = fleet.trainer.current
    try:
        result: BatchResult = await fleet.trainer.call("accumulate", groups)
        full = commit(fleet, groups, result)
        for run in full:
            try:
                await step(fleet, run)
            except RunError as error:  # this run's alone; the trainer is whole
                fleet.registry.fail(error.fault(run.uid))
            fleet.suspects.discard(run.uid)
    except TrainerLost as error:
        if error.executing:
            _suspect(fleet, {g.uid for g in groups}, str(error), error.saving)
    except Retryable as error:
        log.info("training: %s; its runs load again", error)
    except Exception as error:
        log.exception("the trainer raised; its accumulators cannot be trusted, so it is replaced")
        _suspect(fleet, {g.uid for g in groups}, f"{type(error).__name__}: {error}")
        fleet.trainer.condemn(trainer)


async def wait_for_batch(fleet: Fleet) -> None:
    """Wait until a batch is worth taking.

    It ships when it is full (globalBatchSize samples), when it completes some run's step, or when no group arrived
    for maxCoalesceWaitSeconds.
    """
    limits = fleet.config.pool.spec.rollout
    ready, grown_at = 0, time.monotonic()
    while True:
        needs = _needs(fleet)
        now_ready = fleet.buffers.samples_ready(needs)
        if now_ready > ready:
            grown_at = time.monotonic()
        ready = now_ready
        completes = any(fleet.buffers.count(uid) >= need.remaining for uid, need in needs.items())
        # Measured from the last group, not from the last wake-up: other runs' events must not put it off.
        patience = grown_at + limits.max_coalesce_wait_seconds - time.monotonic()
        if ready and (ready >= limits.global_batch_size or completes or patience <= 0):
            return
        woken = await fleet.signal.wait(timeout=patience if ready else limits.max_empty_wait_seconds)
        if not woken and not ready:
            _explain_wait(fleet)


def take_batch(fleet: Fleet) -> list[PromptGroup]:
    """Take what can be trained now; the caller holds `accumulating`, and sends it before it awaits anything else."""
    needs = _needs(fleet)
    _fix_whitening(fleet, needs)
    batch = fleet.buffers.collect(needs, fleet.config.pool.spec.rollout.global_batch_size)
    groups: list[PromptGroup] = []
    for group in batch.groups:
        state = fleet.states[group.uid]
        state.in_training += 1
        state.taken.append(group)
        groups.append(_whitened(state, group))
    for group in batch.stale:
        _drop_stale(fleet, group)
    for uid in needs:
        fleet.registry.runs[uid].progress.buffered = fleet.buffers.count(uid)
    return groups


def _fix_whitening(fleet: Fleet, needs: Mapping[str, Need]) -> None:
    """The figures of every batch that is whole now and was not before."""
    for uid, need in needs.items():
        if need.whole and fleet.buffers.count(uid) >= need.remaining:
            run, state = fleet.registry.runs[uid], fleet.states[uid]
            groups = fleet.buffers.first(uid, need.remaining)
            state.whitening = whitening(run.step, groups, run.spec.algorithm.std_norm)


def _whitened(state: RunState, group: PromptGroup) -> PromptGroup:
    return group if state.whitening is None else state.whitening.apply(group)


def _needs(fleet: Fleet) -> dict[str, Need]:
    """What may be taken now, after every stale group was dropped: a count of the others is what follows from here on.

    A run that waits for its whole batch would wait for the places of stale ones, and a suspect would be preferred for
    groups that it cannot use.
    """
    needs: dict[str, Need] = {}
    if fleet.stopping:
        return needs
    for run in fleet.registry.in_state("ACTIVE"):
        state = fleet.state(run)
        if state is None or run.accumulated_groups >= run.groups_per_step:
            continue
        needs[run.uid] = Need(
            remaining=run.groups_per_step - run.accumulated_groups,
            incarnation=run.incarnation,
            oldest_version=run.trainer_version - run.spec.max_staleness,
            weight=run.spec.scheduling.weight,
            whole=run.spec.algorithm.advantage == "reinforce"
            and (state.whitening is None or state.whitening.step != run.step),
        )
    for uid, need in needs.items():
        for group in fleet.buffers.drop_stale(uid, need):
            _drop_stale(fleet, group)
    others = {uid: need for uid, need in needs.items() if uid not in fleet.suspects}
    for uid in sorted(fleet.suspects & needs.keys()):
        full = fleet.buffers.count(uid) >= needs[uid].remaining
        # A suspect trains alone, but only when it fills its step or nobody else has anything: it must not block them.
        if full or (fleet.buffers.samples_ready({uid: needs[uid]}) and not fleet.buffers.samples_ready(others)):
            return {uid: needs[uid]}
    return others


def commit(fleet: Fleet, groups: list[PromptGroup], result: BatchResult) -> list[Run]:
    """Count what the trainer accumulated, once. Returns the runs whose batch is full."""
    fleet.metrics.observe_batch(result)
    faulty = {fault.uid for fault in result.faults}
    for fault in result.faults:
        fleet.registry.fail(fault)
    stats: dict[str, RunBatchStats] = {s.uid: s for s in result.stats}
    by_uid: dict[str, list[PromptGroup]] = defaultdict(list)
    for group in groups:
        by_uid[group.uid].append(group)
    full: list[Run] = []
    for uid, mine in by_uid.items():
        run = fleet.registry.runs.get(uid)
        state = None if run is None else fleet.state(run)
        if run is None or state is None or uid in faulty:
            fleet.suspects.discard(uid)
            continue
        state.in_training -= len(mine)
        for group in mine:
            state.tracker.consume(group.index)
        rewards = [s.reward for g in mine for s in g.samples]
        policy = stats[uid].policy if uid in stats else PolicySums()
        if fleet.registry.commit(uid, len(mine), rewards, policy):
            full.append(run)  # a suspect until its step is through, too
        else:
            fleet.suspects.discard(uid)
    return full


@dataclass(frozen=True, slots=True)
class _Made:
    """A step that the trainer has made and nobody has been told of."""

    result: StepResult
    cursor: Cursor
    """The groups consumed up to and with it."""
    exported: tuple[Manifest, Any] | None
    """Its version for the engines, where one is wanted."""


async def step(fleet: Fleet, run: Run) -> None:
    """One optimizer step of one run; its new version goes out in the background.

    The step counts once its snapshot is written, for a trainer that dies before takes it along: no step that was told
    of, and no version that an engine serves, is ever made again with other weights. The next batch does not wait for
    that. Until then the run holds `stepping`, and its batch stays full, so it is given no group.
    """
    state = fleet.state(run)
    if state is None or not _may_step(run):
        return  # it ended while its batch was training
    async with AsyncExitStack() as held:
        await held.enter_async_context(state.stepping)
        if fleet.state(run) is not state or not _may_step(run) or not run.loaded:
            return  # the trainer was lost while this waited
        cursor = state.tracker.cursor
        outcome: StepResult | RunFault = await fleet.trainer.call("step", run.uid, cursor, state.incarnation)
        if isinstance(outcome, RunFault):
            fleet.registry.fail(outcome)
            return
        exported = None
        if run.state == "ACTIVE" and (run.target_step is None or outcome.step < run.target_step):
            exported = await fleet.trainer.export(run.uid)  # now, and not behind the next batch
        finishing = _finish(fleet, run, state, _Made(outcome, cursor, exported), held.pop_all())
    if outcome.snapshot:
        fleet.spawn(finishing, f"step {outcome.step} of run {run.uid}")
    else:
        await finishing


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
    groups = [_whitened(state, group) for group in state.taken]
    state.taken.clear()
    fleet.metrics.observe_step(run, time.time())
    last = fleet.registry.stepped(made.result, time.time())
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


def _suspect(fleet: Fleet, among: set[str], why: str, saving: Collection[str] = ()) -> None:
    """The trainer died while it worked for these: they train alone from now on; one that kills it alone is failed.

    Args:
        fleet: of the runs.
        among: runs of the batch.
        why: for people.
        saving: runs with a save on its way, which may have been why. Saves under suspicion are made beside no batch, so
            a suspect is counted where these had theirs before.
    """
    uids = sorted(among)
    certain = not fleet.may_be_for_a_save(among, saving)
    fleet.suspects.update(uids)
    log.error("the trainer died while it worked for %s (%s)", ", ".join(uids), why)
    if len(uids) > 1 or not certain:
        return
    run = fleet.registry.runs.get(uids[0])
    if run is None:
        return
    run.crashes += 1
    if run.crashes > run.spec.backoff_limit:
        limit = run.spec.backoff_limit
        text = f"the trainer died {run.crashes} times on this run's batches alone; backoffLimit is {limit}; last: {why}"
        fleet.registry.fail(RunFault(run.uid, reasons.TRAINER_CRASHED, text))


def _drop_stale(fleet: Fleet, group: PromptGroup) -> None:
    run = fleet.registry.runs.get(group.uid)
    state = None if run is None else fleet.state(run)
    if run is None or state is None or state.incarnation != group.version.incarnation:
        return
    state.tracker.consume(group.index)
    run.progress.dropped["stale"] = run.progress.dropped.get("stale", 0) + 1
    log.info("run %s: group %d dropped (stale)", run.uid, group.index, extra=about(run.uid))
    fleet.signal.set()


def _explain_wait(fleet: Fleet) -> None:
    for run in fleet.registry.in_state("ACTIVE"):
        state = fleet.state(run)
        log.info("run %s waits: %d groups sampling, version %d of %d published", run.uid,
                 state.in_flight if state else 0, run.weight_version, run.trainer_version)  # fmt: skip
