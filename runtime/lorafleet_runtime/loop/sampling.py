"""The rollout task: keeps each run's allowance of prompt groups in flight.

consumes: registry changes, finished groups   produces: PromptGroups into the run's buffer
waits for: the signal                         unblocked by: a published version, a step, a finished group

Staleness is bounded where groups start. A run may have (maxStaleness + 1 - lag) x groupsPerStep groups outstanding
(sampling, buffered, training or accumulated), lag being the versions that the engines are behind the trainer. So with
maxStaleness 0 nothing starts before the version of the last step is on every engine.
"""

import asyncio
import logging
from dataclasses import replace

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.errors import Retryable, RunError, unforeseen
from lorafleet_runtime.loop.fleet import Fleet, RunState
from lorafleet_runtime.loop.journal import about
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import DroppedGroup, PromptGroup, RunFault, VersionId

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_MAX_TRIES = 20
"""A group that fails this often on living engines never will succeed."""
_MIN_DROPS = 16
_DROPPED_BATCHES = 4
"""A run that drops this many batches in a row (and at least _MIN_DROPS groups) learns nothing and never ends."""


async def rollout(fleet: Fleet) -> None:
    """Start groups whenever a run has allowance, for ever; one group a turn, so that no run crowds out another."""
    turn = 0
    while True:
        runs = fleet.registry.in_state("ACTIVE")
        started = True
        while started:
            started = False
            for run in runs[turn % len(runs) :] + runs[: turn % len(runs)] if runs else []:
                if _in_flight(fleet) >= fleet.config.pool.spec.rollout.max_in_flight_groups:
                    break
                if allowance(fleet, run) > 0:
                    _start_group(fleet, run)
                    started = True
            turn += 1
        await fleet.signal.wait()


def allowance(fleet: Fleet, run: Run) -> int:
    """Groups that the run may start now."""
    state = fleet.state(run)
    if state is None or run.state != "ACTIVE" or fleet.stopping:
        return 0
    outstanding = run.accumulated_groups + state.in_training + fleet.buffers.count(run.uid) + state.in_flight
    lag = run.trainer_version - run.weight_version
    free = (run.spec.max_staleness + 1 - lag) * run.groups_per_step - outstanding
    if run.target_step is not None:
        free = min(free, (run.target_step - run.step) * run.groups_per_step - outstanding)
    cap = run.spec.scheduling.max_in_flight_groups
    return free if cap is None else min(free, cap - state.in_flight)


def _in_flight(fleet: Fleet) -> int:
    return sum(s.in_flight for s in fleet.states.values())


def _start_group(fleet: Fleet, run: Run) -> None:
    state, version = fleet.state(run), run.version
    assert state is not None and version is not None
    index = state.tracker.take()
    state.in_flight += 1
    fleet.spawn(_sample_group(fleet, run, state, index, version), f"group {index} of run {run.uid}")


async def _sample_group(fleet: Fleet, run: Run, state: RunState, index: int, version: VersionId) -> None:
    fault: RunFault | None = None
    try:
        outcome = await _ask(fleet, run, state, index, version)
    except RunError as error:
        fault = error.fault(run.uid)
        if error.reason == reasons.NON_FINITE:
            fault = replace(fault, message=f"run {run.name}, step {run.step}: {error.message}")
    except Retryable as error:
        if _current(fleet, run, state):
            log.info("run %s: group %d: %s; it is sampled again", run.uid, index, error, extra=about(run.uid))
        fault = _too_often(run, state, index, error)
        if fault is None:
            state.tracker.give_back(index)
            await asyncio.sleep(_RETRY_SECONDS)
            return
    except Exception as error:
        log.exception("run %s: group %d raised", run.uid, index, extra=about(run.uid))
        fault = unforeseen(run.uid, error)
    finally:
        state.in_flight -= 1
    if not _current(fleet, run, state):
        return  # a straggler of an incarnation that ended: neither its groups nor its faults count
    if fault is not None:
        fleet.registry.fail(fault)
    else:
        _take(fleet, run, state, outcome)


def _current(fleet: Fleet, run: Run, state: RunState) -> bool:
    return fleet.state(run) is state and run.state in ("ACTIVE", "PENDING")  # PENDING: the trainer is restarting


async def _ask(fleet: Fleet, run: Run, state: RunState, index: int, version: VersionId) -> PromptGroup | DroppedGroup:
    engine = await fleet.engines.acquire()
    try:
        if not _current(fleet, run, state):
            return DroppedGroup(run.uid, version, index, "aborted", "the run ended while it waited for an engine")
        return await fleet.workers.run_group(run.uid, run.spec, index, version, engine)
    except Retryable:
        if await fleet.engines.check(engine, version):
            state.tries[index] = state.tries.get(index, 0) + 1
        raise
    finally:
        fleet.engines.release(engine)


def _too_often(run: Run, state: RunState, index: int, error: Retryable) -> RunFault | None:
    if state.tries.get(index, 0) < _MAX_TRIES:
        return None
    text = f"prompt group {index} failed {_MAX_TRIES} times in a row; last: {error}; look at its row of {run.spec.data}"
    return RunFault(run.uid, reasons.INTERNAL_ERROR, text)


def _take(fleet: Fleet, run: Run, state: RunState, outcome: PromptGroup | DroppedGroup) -> None:
    if isinstance(outcome, DroppedGroup):
        dropped = run.progress.dropped
        dropped[outcome.reason] = dropped.get(outcome.reason, 0) + 1
        why = outcome.message or "no reason given"
        text = "run %s: group %d dropped (%s): %s"
        log.warning(text, run.uid, outcome.index, outcome.reason, why, extra=about(run.uid))
        if outcome.reason == "aborted":
            state.tracker.give_back(outcome.index)
        else:
            state.tracker.consume(outcome.index)
            _count_drop(fleet, run, state, why)
        return
    state.drops_in_a_row = 0
    state.tries.pop(outcome.index, None)
    fleet.metrics.rollout_tokens.inc(sum(len(s.token_ids) for s in outcome.samples))
    fleet.buffers.add(outcome)
    run.progress.buffered = fleet.buffers.count(run.uid)


def _count_drop(fleet: Fleet, run: Run, state: RunState, why: str) -> None:
    state.drops_in_a_row += 1
    if state.drops_in_a_row >= max(_MIN_DROPS, _DROPPED_BATCHES * run.groups_per_step):
        text = (
            f"{state.drops_in_a_row} prompt groups in a row were dropped; last: {why}; correct the reward or the data"
        )
        fleet.registry.fail(RunFault(run.uid, reasons.REWARD_ERROR, text))
