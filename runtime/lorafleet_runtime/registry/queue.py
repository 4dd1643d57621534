"""The order in which queued runs take free slots. Pure; called by the registry alone."""

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.registry.run import Run


def ordered(queued: list[Run]) -> list[Run]:
    """Runs that compete for slots: API-owned ones, then by priority, those that had a slot before, age.

    An API-owned run was let in because a slot was free for it, so it never waits behind one that queues. It and a run
    that had a slot before (the runtime restarted) compete even while their data is checked, so that nobody takes their
    slot meanwhile; another run competes once its data is checked. Creation times have whole seconds: runs of the same
    second keep the order of `queued`.
    """
    competing = [r for r in queued if r.dataset is not None or (_has_claim(r) and r.check_failures == 0)]
    return sorted(competing, key=lambda r: (r.owner != "api", -r.queue_priority, r.start_time is None, r.created))


def _has_claim(run: Run) -> bool:
    return run.owner == "api" or run.start_time is not None


def place_waiting(queue: list[Run], slots: int, free: int) -> bool:
    """Tell the runs of `queue` beyond the first `free` their place. True when that changed something visible."""
    changed = False
    waiting = [r for r in queue[free:] if r.dataset is not None and r.state == "QUEUED"]
    for position, run in enumerate(waiting, start=1):
        message = f"all {slots} slots are taken; position {position} in the queue"
        changed = changed or run.message != message
        run.queue_position = position
        run.reason, run.message = reasons.SLOTS_EXHAUSTED, message
    return changed
