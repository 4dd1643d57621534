"""The runtime's end of the trainer: calls, loss detection and restart.

The loop calls it; it knows no rank: `trainer/group.py` makes one trainer of several.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.remote import call

log = logging.getLogger(__name__)

_SAVES_AT_ONCE = 4
"""Checkpoints captured and not yet written; each holds copies of a run's weights and moments in the trainer's node."""


class TrainerLost(Retryable):
    """The trainer died.

    Args:
        message: what Ray says.
        executing: it died in this very call; calls behind it in the actor's queue have nothing to do with it.
    """

    def __init__(self, message: str, executing: bool) -> None:
        super().__init__(message)
        self.executing = executing


class TrainerHandle:
    """One trainer at a time. A call that finds it dead raises Retryable and starts a new one.

    Args:
        spawn: makes the trainer; returns its handle.
        on_lost: runs once per death, before the restart: live runs must load again.
        on_ready: runs when a new trainer answers.
        kill: ends a trainer that may still live: two of them must never work for the same runs.
    """

    def __init__(
        self,
        spawn: Callable[[], Any],
        on_lost: Callable[[], None],
        on_ready: Callable[[dict[int, str]], None],
        kill: Callable[[Any], None] = lambda trainer: trainer.kill(),
    ) -> None:
        self._spawn = spawn
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._kill = kill
        self._actor: Any = None
        self._queue: list[object] = []
        """Calls without an answer, in the order in which the actor works on them."""
        self._ready = asyncio.Event()
        self.saving = asyncio.Semaphore(_SAVES_AT_ONCE)
        """Held from before a `capture` to the end of its `saved`, so that the copies do not pile up behind a slow disk.

        Taken before a run's `stepping` lock: who waits for the disk must not hold up the run."""
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Spawn the trainer and wait until it has loaded the base model.

        Raises:
            ConfigError: the base model or the trainer's settings are unusable.
        """
        self._actor = actor = self._spawn()
        try:
            slots = await call(actor.start.remote())
        except BaseException:
            self._kill(actor)  # ranks that wait for one that raised
            raise
        self._on_ready(slots)
        self._ready.set()

    async def call(self, method: str, *args: object) -> Any:
        """Call a trainer method; waits while the trainer restarts.

        Raises:
            RunError: the run's own fault.
            TrainerLost: the trainer died; its runs load again.
        """
        await self._ready.wait()
        return await self._answer(self._actor, getattr(self._actor, method).remote(*args))

    async def _answer(self, actor: Any, reference: Any) -> Any:
        ticket, queue = object(), self._queue
        queue.append(ticket)
        try:
            answer = await call(reference)
        except Retryable as error:
            self._lost(actor)
            # The ticket stays in the dead trainer's queue: nobody behind it was executing.
            raise TrainerLost(str(error), executing=queue[0] is ticket) from error
        except BaseException:
            queue.remove(ticket)
            raise
        queue.remove(ticket)
        self._check_current(actor)
        return answer

    async def wait(self, method: str, *args: object) -> Any:
        """Call a method of the lane of saves, which no call in the queue waits for and that waits for none.

        Raises:
            RunError: the run's own fault.
            TrainerLost: the trainer died, and what was to be saved with it.
        """
        actor = self._actor
        if not self._ready.is_set():
            raise TrainerLost("the trainer was lost with what it was to save", executing=False)
        try:
            answer = await call(getattr(actor, method).remote(*args))
        except Retryable as error:
            self._lost(actor)
            raise TrainerLost(str(error), executing=False) from error
        if answer is None:
            raise TrainerLost(f"{method}: this trainer never took it; the one that did was lost", executing=False)
        return answer

    @property
    def current(self) -> Any:
        """The trainer of now, to be condemned for what it is about to be asked."""
        return self._actor

    def _check_current(self, actor: Any) -> None:
        if actor is not self._actor or not self._ready.is_set():  # its runs have been told to load again
            raise TrainerLost("the trainer was lost while its answer was on the way", executing=False)

    async def export(self, uid: str) -> tuple[Any, Any]:
        """The run's adapter as (Manifest, reference to the flat buffer); the bytes do not pass through here."""
        await self._ready.wait()
        actor = self._actor
        manifest_ref, buffer_ref = actor.export.options(num_returns=2).remote(uid)
        return await self._answer(actor, manifest_ref), buffer_ref

    def condemn(self, actor: Any) -> None:
        """Replace a trainer whose state cannot be trusted any more: it raised in the middle of a batch."""
        self._lost(actor, at_work=False)

    def _lost(self, actor: Any, at_work: bool = True) -> None:
        if actor is not self._actor or not self._ready.is_set():
            return
        if not at_work:
            self._queue.insert(0, object())  # none of the calls that end now is why
        log.error("the trainer died; starting a new one")
        self._ready.clear()
        self._queue = []  # of the next trainer; the calls that wait for this one keep theirs
        self._kill(actor)
        self._on_lost()
        self._restart = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        delay = 1.0
        while True:
            try:
                await self.start()
            except Exception:
                log.exception("the trainer did not start; next try in %.0f s", delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, 60.0)
            else:
                log.warning("a new trainer is ready")
                return
