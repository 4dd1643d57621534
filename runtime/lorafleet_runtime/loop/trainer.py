"""The runtime's end of the trainer: calls, saves, loss detection and restart.

The loop calls it; it knows no rank: `trainer/group.py` makes one trainer of several.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lorafleet_runtime.errors import Retryable
from lorafleet_runtime.loop.permit import Permit
from lorafleet_runtime.loop.writing import Writing
from lorafleet_runtime.remote import call
from lorafleet_runtime.types import Artifact, Loaded, LoadRequest

log = logging.getLogger(__name__)

_SAVES_AT_ONCE = 4
"""Checkpoints captured and not yet written; each holds copies of a run's weights and moments in the trainer's node."""

_SNAPSHOTS_AT_ONCE = 4
"""Steps whose snapshots are not yet written; the trainer has room for as many copies."""


_READS_AT_ONCE = 4
"""Loads that are being read or wait for their turn in the trainer, each with a run's state in host memory."""


class Doing(NamedTuple):
    """Something that a trainer does for a run, and may die of."""

    kind: Literal["batch", "step", "snapshot", "save", "load"]
    uid: str


class TrainerLost(Retryable):
    """The trainer died, or was replaced."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """A call's place in the queue."""

    doing: tuple[Doing, ...]


@dataclass(slots=True)
class _Work:
    """What one trainer has been asked; whoever waits for it keeps this, also when the next trainer has its own."""

    queue: list[_Ticket] = field(default_factory=list)
    """Calls without an answer, in the order in which the actor works on them."""
    beside: list[Doing] = field(default_factory=list)
    """What goes on beside those."""

    def under_way(self) -> frozenset[Doing]:
        """What the trainer works on now; calls behind the first have nothing to do with its death."""
        return frozenset([*(self.queue[0].doing if self.queue else ()), *self.beside])


class TrainerHandle:
    """One trainer at a time. A call that finds it dead raises Retryable and starts a new one.

    Args:
        spawn: makes the trainer; returns its handle.
        on_lost: runs once per death, before the restart, with what was under way (nothing when it was condemned) and
            what Ray says: live runs must load again.
        on_ready: runs when a new trainer answers.
        kill: ends a trainer that may still live: two of them must never work for the same runs.
    """

    def __init__(
        self,
        spawn: Callable[[], Any],
        on_lost: Callable[[frozenset[Doing], str], None],
        on_ready: Callable[[dict[int, str]], None],
        kill: Callable[[Any], None] = lambda trainer: trainer.kill(),
    ) -> None:
        self._spawn = spawn
        self._on_lost = on_lost
        self._on_ready = on_ready
        self._kill = kill
        self._actor: Any = None
        self._work = _Work()
        self._ready = asyncio.Event()
        self._places = asyncio.Semaphore(_SAVES_AT_ONCE)
        self._snapshot_places = asyncio.Semaphore(_SNAPSHOTS_AT_ONCE)
        self._read_places = asyncio.Semaphore(_READS_AT_ONCE)
        self._overdue: set[asyncio.Future[Any]] = set()
        """Reads that took longer than they may; they keep their places until they end."""
        self._patient: dict[asyncio.Timeout, tuple[float, bool]] = {}
        """Limits, and whether they are of reads."""
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

    async def call(self, method: str, *args: object, doing: Collection[Doing] = ()) -> Any:
        """Call a trainer method; waits while the trainer restarts.

        Args:
            method: of the trainer.
            args: of the method.
            doing: what it may die of while it works on this.

        Raises:
            RunError: the run's own fault.
            TrainerLost: the trainer died; its runs load again.
        """
        await self._ready.wait()
        return await self._queued(self._actor, getattr(self._actor, method).remote(*args), doing)

    def _queued(self, actor: Any, reference: Any, doing: Collection[Doing] = ()) -> Coroutine[Any, Any, Any]:
        """The answer to a call that was sent just now."""
        ticket = _Ticket(tuple(doing))
        self._work.queue.append(ticket)
        return self._answer(actor, reference, ticket, self._work)

    async def _answer(self, actor: Any, reference: Any, ticket: _Ticket, work: _Work) -> Any:
        task = asyncio.ensure_future(call(reference))
        try:
            answer = await asyncio.shield(task)
        except Retryable as error:
            self._lost(actor, str(error))
            raise TrainerLost(str(error)) from error  # the ticket stays: nobody behind it was being worked on
        except asyncio.CancelledError:  # the trainer works on it all the same, and may die of it
            task.add_done_callback(lambda ended: _forget(ended, ticket, work))
            raise
        except Exception as error:
            work.queue.remove(ticket)
            if work is not self._work:  # condemned meanwhile; what its calls raise says nothing of their runs
                raise TrainerLost("the trainer was lost while it answered") from error
            raise
        work.queue.remove(ticket)
        self._check_current(actor)
        return answer

    async def _beside(self, method: str, argument: object) -> Any:
        """A call in a lane that no other call waits for, of the trainer of now."""
        if not self._ready.is_set():
            raise TrainerLost(f"{method}: the trainer was lost")
        actor = self._actor
        try:
            return await call(getattr(actor, method).remote(argument))
        except Retryable as error:
            self._lost(actor, str(error))
            raise TrainerLost(str(error)) from error

    def begin(self, doing: Doing) -> Callable[[], None]:
        """Something goes on beside the calls, until the function returned is called or the trainer dies."""
        beside = self._work.beside
        beside.append(doing)
        ends = [beside.remove]
        return lambda: ends.pop()(doing) if ends else None

    async def read_permit(self, limit: float) -> Permit:
        """Wait for a place among the reads; what a load reads goes on beside all other calls.

        Waiting for others that read in time is no waiting for the storage, and has no limit.

        Raises:
            TimeoutError: all places were held by overdue reads for `limit` seconds.
        """
        while True:
            try:
                async with asyncio.timeout(limit):
                    return await Permit.of(self._read_places, 1)
            except TimeoutError:
                if len(self._overdue) < _READS_AT_ONCE:
                    continue
                raise

    async def load(self, permit: Permit, limit: float, request: LoadRequest) -> Loaded:
        """Have the trainer read what the run's load starts from, then load it; no other call waits for the storage.

        Args:
            permit: of `read_permit`; given back when the load has ended, whatever the caller does meanwhile.
            limit: seconds for the reading, as in `patience`; waiting for a trainer takes no time.
            request: of the run.

        Raises:
            RunError: the run's own fault, or the storage's.
            TimeoutError: it was not read in time.
            TrainerLost: the trainer died.
        """
        await self._ready.wait()
        actor, ended, doing = self._actor, self.begin(Doing("load", request.uid)), [Doing("load", request.uid)]
        reading = asyncio.ensure_future(self._beside("prepare", request))
        try:
            async with self.patience(limit, reading=True):
                await asyncio.shield(reading)
            self._renew(read=True)
        except (TimeoutError, asyncio.CancelledError):
            place = permit.hand_over()
            self._overdue.add(reading)
            reading.add_done_callback(lambda read: self._read_ended(read, place))
            raise
        finally:
            ended()
        self._check_current(actor)  # another one has read nothing, and would read in the lane of all calls
        loaded: Loaded = await self._queued(actor, actor.load.remote(request), doing)
        return loaded

    def _read_ended(self, reading: asyncio.Future[Any], place: Permit) -> None:
        self._overdue.discard(reading)
        place.release()
        if not reading.cancelled():
            reading.exception()  # nobody waits for it any more

    @property
    def snapshots_full(self) -> bool:
        """A step would have to wait for the snapshots of others."""
        return self._snapshot_places.locked()

    async def snapshot_permit(self, alone: bool = False) -> Permit:
        """Wait for a place among the snapshots. Taken before the step is sent: the trainer itself waits for no disk.

        Args:
            alone: wait for all places, so that none is under way and none begins. One at a time.
        """
        return await Permit.of(self._snapshot_places, _SNAPSHOTS_AT_ONCE if alone else 1)

    async def permit(self, alone: bool = False) -> Permit:
        """Wait for a place among the saves, so that their copies do not pile up behind a slow disk.

        Taken before a run's `stepping` lock: who waits for the disk must not hold up the run.

        Args:
            alone: wait for all places: also for writes that nobody else waits for any more. One at a time.
        """
        return await Permit.of(self._places, _SAVES_AT_ONCE if alone else 1)

    @contextlib.asynccontextmanager
    async def patience(self, limit: float | None, reading: bool = False) -> AsyncIterator[None]:
        """A time limit that begins anew whenever a save of this trainer ends, or a read: slow storage is no hung one.

        Args:
            limit: in seconds; None is without.
            reading: what ends must be a read; saves may go on where one file hangs.

        Raises:
            TimeoutError: none ended within `limit` seconds.
        """
        async with asyncio.timeout(limit) as timeout:
            if limit is not None:
                self._patient[timeout] = limit, reading
            try:
                yield
            finally:
                self._patient.pop(timeout, None)

    def _renew(self, read: bool) -> None:
        """A read or a save has ended: the storage answers."""
        for timeout, (limit, reading) in self._patient.items():
            if not timeout.expired() and (read or not reading):
                timeout.reschedule(asyncio.get_running_loop().time() + limit)

    def abandon(self, uid: str, writing: Writing) -> None:
        """Nobody waits for the run's write any more, or will: a death while it hangs says nothing of it."""
        beside = self._work.beside

        def forget() -> None:
            with contextlib.suppress(ValueError):
                beside.remove(Doing("save", uid))

        writing.once_captured(forget)

    def save(self, permit: Permit, uid: str, *args: object) -> Writing:
        """Capture a run's checkpoint and write it, in a lane that no other call waits for.

        Args:
            permit: given back when the write has ended or the trainer has died, whatever the caller does meanwhile.
            uid: of the run.
            args: of the trainer's `capture`, which is sent before this returns: it is of the run as it is now.

        Raises:
            TrainerLost: there is no trainer at the moment.
        """
        if not self._ready.is_set():
            raise TrainerLost("the trainer was lost with what it was to save")
        answer = self._queued(self._actor, self._actor.capture.remote(uid, *args), [Doing("save", uid)])
        captured = asyncio.create_task(self._capture(uid, answer), name=f"capturing run {uid}")
        written = asyncio.create_task(self._write(uid, captured), name=f"writing run {uid}")
        place = permit.hand_over()
        written.add_done_callback(lambda _: place.release())
        for task in (captured, written):
            task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # told to who waits
        return Writing(captured, written)

    async def _capture(self, uid: str, answer: Coroutine[Any, Any, str]) -> tuple[str, _Work]:
        ticket = await answer
        self._work.beside.append(Doing("save", uid))
        return ticket, self._work

    async def _write(self, uid: str, captured: asyncio.Task[tuple[str, _Work]]) -> Artifact:
        ticket, work = await captured
        try:
            if work is not self._work:
                raise TrainerLost("the trainer was lost with what it was to save")
            artifact: Artifact | None = await self._beside("saved", ticket)
        finally:
            with contextlib.suppress(ValueError):  # abandoned
                work.beside.remove(Doing("save", uid))
            self._renew(read=False)
        if artifact is None:
            raise TrainerLost("saved: this trainer never took it; the one that did was lost")
        return artifact

    @property
    def current(self) -> Any:
        """The trainer of now, to be condemned for what it is about to be asked."""
        return self._actor

    def _check_current(self, actor: Any) -> None:
        if actor is not self._actor or not self._ready.is_set():  # its runs have been told to load again
            raise TrainerLost("the trainer was lost while its answer was on the way")

    async def export(self, uid: str, doing: Collection[Doing] = ()) -> tuple[Any, Any]:
        """The run's adapter as (Manifest, reference to the flat buffer); the bytes do not pass through here."""
        await self._ready.wait()
        actor = self._actor
        manifest_ref, buffer_ref = actor.export.options(num_returns=2).remote(uid)
        return await self._queued(actor, manifest_ref, doing), buffer_ref

    async def snapshotted(self, ticket: str) -> None:
        """Wait until a step outlives the trainer that made it.

        Args:
            ticket: of the step's result.

        Raises:
            TrainerLost: the trainer died, and perhaps the step with it.
        """
        actor = self._actor
        if not await self._beside("snapshotted", ticket):
            raise TrainerLost("snapshotted: this trainer did not make the step; the one that did was lost")
        self._check_current(actor)

    def condemn(self, actor: Any) -> None:
        """Replace a trainer whose state cannot be trusted any more: it raised in the middle of a batch."""
        self._lost(actor, "condemned", at_work=False)

    def _lost(self, actor: Any, why: str, at_work: bool = True) -> None:
        if actor is not self._actor or not self._ready.is_set():
            return
        # Of one that is condemned, none of the calls and saves that end now is why.
        under_way, self._work = self._work.under_way() if at_work else frozenset(), _Work()
        log.error("the trainer died; starting a new one")
        self._ready.clear()
        try:
            self._kill(actor)
        except Exception:  # Ray itself may be restarting; without the rest nobody would ever start a new one
            log.exception("the trainer that was lost could not be ended")
        self._on_lost(under_way, why)
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


def _forget(ended: asyncio.Future[Any], ticket: _Ticket, work: _Work) -> None:
    """A call that nobody waited for has ended; one that its trainer died in stays, as for the others."""
    if ended.cancelled() or not isinstance(ended.exception(), Retryable):
        work.queue.remove(ticket)
