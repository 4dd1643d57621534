"""The order in which queued runs take free slots. Pure; called by the registry alone."""

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.registry.run import Run


def ordered(queued: list[Run]) -> list[Run]:
    """Runs that compete for slots: by priority, then those that had a slot before, then by age.

    A run that had a slot before (the runtime restarted) competes even while its data is checked again, so that a
    younger run does not take its slot meanwhile; a new run competes once its data is checked.
    """
    competing = [r for r in queued if r.dataset is not None or (r.start_time is not None and r.check_failures == 0)]
    return sorted(competing, key=lambda r: (-r.queue_priority, r.start_time is None, r.created, r.uid))


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
