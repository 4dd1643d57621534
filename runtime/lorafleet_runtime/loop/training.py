"""The train task: collect, accumulate, commit, step, publish.

consumes: buffered groups                    produces: optimizer steps, versions to publish, checkpoints
waits for: groups, at most the coalesce wait unblocked by: a finished group
"""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping

from lorafleet_runtime.loop.buffers import Need
from lorafleet_runtime.loop.fleet import Fleet
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.loop.permit import Permit
from lorafleet_runtime.loop.stepping import blaming, step, whitened
from lorafleet_runtime.loop.trainer import Doing
from lorafleet_runtime.loop.whiten import whitening
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import (
    BatchResult,
    PolicySums,
    PromptGroup,
    RunBatchStats,
)

log = logging.getLogger(__name__)


async def train(fleet: Fleet) -> None:
    """Train whatever is ready, for ever."""
    while True:
        await wait_for_batch(fleet)
        async with fleet.accumulating:
            if fleet.blame.suspects.isdisjoint(_needs(fleet)):
                alone = None
            else:  # a suspect trains beside no snapshot of another run
                alone = await fleet.trainer.snapshot_permit(alone=True)
            try:
                groups = take_batch(fleet)
                if groups:
                    await _train_on(fleet, groups, alone)
            finally:
                if alone is not None:
                    alone.release()


async def _train_on(fleet: Fleet, groups: list[PromptGroup], alone: Permit | None = None) -> None:
    """Accumulate, and step what is full; with `alone` nothing else trains until the step is through."""
    uids = {group.uid for group in groups}
    async with blaming(fleet, uids):
        batch = [Doing("batch", uid) for uid in uids]
        result: BatchResult = await fleet.trainer.call("accumulate", groups, doing=batch)
        for run in commit(fleet, groups, result):
            await step(fleet, run, alone)


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
        groups.append(whitened(state, group))
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
    others = {uid: need for uid, need in needs.items() if uid not in fleet.blame.suspects}
    for uid in sorted(fleet.blame.suspects & needs.keys()):
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
            fleet.blame.suspects.discard(uid)
            continue
        state.in_training -= len(mine)
        for group in mine:
            state.tracker.consume(group.index)
        rewards = [s.reward for g in mine for s in g.samples]
        policy = stats[uid].policy if uid in stats else PolicySums()
        if fleet.registry.commit(uid, len(mine), rewards, policy):
            full.append(run)
    return full


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
