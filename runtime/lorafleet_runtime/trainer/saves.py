"""Writes captured checkpoints beside the trainer's own work, one after the other.

Called by actor.py on rank 0: `add` in the lane of all calls, `result` in the lane of saves. It touches no slot.
"""

import itertools
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lorafleet_runtime.types import Artifact

log = logging.getLogger(__name__)


class Saves:
    """Checkpoints on their way to the storage.

    One thread: files of several runs at once would share one disk, and a run's saves stay in order. How many may wait
    here is bounded by who asks for them (`TrainerHandle.permit`): a wait here would hold up every slot.
    """

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saves")
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._pending: dict[str, Future[Artifact]] = {}

    def add(self, write: Callable[[], Artifact]) -> str:
        """Queue a write. Returns its ticket, which no other process gives out."""
        ticket = f"{self._name}.{next(self._numbers)}"
        self._pending[ticket] = self._writer.submit(write)
        return ticket

    def defer(self, job: Callable[[], None]) -> None:
        """Queue what nobody waits for, in order with the checkpoints."""
        self._writer.submit(_logged, job)

    def result(self, ticket: str) -> Artifact | None:
        """Wait for a write, and forget it. None for a ticket of another process: what it captured is lost.

        Raises:
            RunError: StorageError; as `write` raised it.
        """
        pending = self._pending.pop(ticket, None)
        return None if pending is None else pending.result()


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # nobody asks for its outcome: without this line nobody would know
        log.exception("a job beside the checkpoints failed")
